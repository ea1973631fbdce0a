"""Start NATS as a child process, on a free port of the loopback interface, with JetStream's files in a given folder."""

import json
from pathlib import Path

from treadle_cli.mesh.checks import nats_server
from treadle_cli.mesh.processes import Child, ProcessTree

START_TIMEOUT_S = 20.0  # it takes 10 ms; a busy disk may delay it
FREE_PORT = -1
STAGE = 0  # stopped last: services drain into it


async def start_nats(
    tree: ProcessTree, folder: Path, environ: dict[str, str], port: int = FREE_PORT
) -> tuple[Child, str]:
    """Start nats-server with its store in `folder`; return the child and its URL once it listens."""
    command = [str(nats_server()), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder / "jetstream")]
    child = tree.start("nats", [*command, "--ports_file_dir", str(folder)], env=environ, stage=STAGE)

    async def url() -> str | None:
        return _written_url(folder, child.pid)

    return child, await child.until(url, "ports file", START_TIMEOUT_S)


def _written_url(folder: Path, pid: int) -> str | None:
    for path in folder.glob(f"*_{pid}.ports"):
        try:
            return str(json.loads(path.read_text())["nats"][0])
        except (json.JSONDecodeError, KeyError, IndexError):
            return None  # still being written
    return None
