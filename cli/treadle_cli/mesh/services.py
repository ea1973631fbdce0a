"""Start NATS and the seven services of a mesh as child processes, on free ports of the loopback interface.

All addresses are chosen before the first service starts, because the scheduler and the migrator name each other. A
service has started once it has written its ready file. Which variable a service takes stands in its config.py; a wrong
value ends the service with one line, which the caller sees.
"""

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from treadle_cli.mesh.checks import nats_server
from treadle_cli.mesh.processes import Child, ProcessTree

HOST = "127.0.0.1"
LOWEST = 10_000  # above the ports of well-known services
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_FROM = 32_768  # Linux' own default, where that file is not there
ENOUGH = 1_000  # ports to choose from
ATTEMPTS_PER_PORT = 100


def free_ports(count: int) -> list[int]:
    """`count` different free ports, chosen at random. Raises OSError if there are not so many.

    They lie below the range from which the kernel takes ports for outgoing connections and for port 0, so that no
    connection takes one of them before its service starts, however long an engine loads.
    """
    among = range(LOWEST, _ephemeral_from())
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for _ in range(count * ATTEMPTS_PER_PORT):
            if len(ports) == count:
                break
            listener = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind((HOST, random.choice(among)))
                ports.append(int(listener.getsockname()[1]))
    if len(ports) < count:
        raise OSError(f"only {len(ports)} of {count} ports from {among.start} to {among.stop - 1} are free on {HOST}")
    return ports


def free_port() -> int:
    """One free port, as in `free_ports`."""
    return free_ports(1)[0]


def is_free(port: int) -> bool:
    """Whether no socket listens on this port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
        return True


def _ephemeral_from() -> int:
    """The first port that the kernel assigns by itself."""
    try:
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return EPHEMERAL_FROM
    return first if first > LOWEST + ENOUGH else EPHEMERAL_FROM


START_TIMEOUT_S = 90.0  # about 2 s on an idle machine; engines may be loading on the same cores
DRAIN_GRACE_S = 1.0  # when the tree stops, no other client waits for a call in flight
LEASE_TTL_S = 4.0  # shorter than the default, which is made for networks
STAGE = 2  # stopped first
NATS_STAGE = 0  # stopped last: services drain into it
NATS_TIMEOUT_S = 20.0  # it takes 10 ms; a busy disk may delay it
ANY_PORT = -1
CONTROL_SERVICES = ("predictor", "placement", "migrator", "tools", "rollout", "scheduler")
PORT_OFFSETS = {"scheduler": 0, "predictor": 1, "placement": 2, "migrator": 3, "tools": 4, "rollout": 5}
SIDECAR_PORT_OFFSET = 9  # the first sidecar's; one more for each further engine


@dataclass(frozen=True)
class Addresses:
    """host:port of each service of one mesh, by name; sidecars by engine id."""

    services: Mapping[str, str]
    sidecars: Mapping[str, str]

    @property
    def scheduler(self) -> str:
        """The one address that a client needs."""
        return self.services["scheduler"]


def addresses(ports: Mapping[str, int], sidecar_ports: Mapping[str, int]) -> Addresses:
    """Addresses from ports by name."""
    return Addresses(
        {name: f"{HOST}:{ports[name]}" for name in CONTROL_SERVICES},
        {engine_id: f"{HOST}:{port}" for engine_id, port in sidecar_ports.items()},
    )


class Services:
    """Starts services in `tree`, with NATS at `nats_url`; ready files go to `folder`, which exists."""

    def __init__(
        self, tree: ProcessTree, where: Addresses, nats_url: str, folder: Path, environ: Mapping[str, str]
    ) -> None:
        self._tree, self._where, self._folder = tree, where, folder
        self._environ = {**environ, "TREADLE_NATS_URL": nats_url, "TREADLE_DRAIN_GRACE_S": str(DRAIN_GRACE_S)}

    async def start_control(self, python: str) -> list[Child]:
        """Start all but the sidecars, at once; return when all are ready."""
        peers = {f"TREADLE_SCHEDULER_{name.upper()}": address for name, address in self._where.services.items()}
        peers.pop("TREADLE_SCHEDULER_SCHEDULER")
        extra = {
            "scheduler": {**peers, "TREADLE_SCHEDULER_LEASE_TTL_S": str(LEASE_TTL_S)},
            "migrator": {"TREADLE_MIGRATOR_SCHEDULER": self._where.scheduler},
            # Nobody restarts the service here, so its sandboxes end with it.
            "tools": {"TREADLE_TOOLS_STATE_DIR": str(self._folder / "tools"), "TREADLE_TOOLS_KEEP_S": "0"},
        }
        children = [
            self._start(python, name, f"treadle_{name}", name, self._where.services[name], extra.get(name, {}))
            for name in CONTROL_SERVICES
        ]
        await self._ready(children)
        return children

    async def start_sidecar(self, python: str, engine_id: str, settings: Mapping[str, str]) -> Child:
        """Start the sidecar of one engine; `settings` are its own variables."""
        extra = {"TREADLE_SIDECAR_SCHEDULER": self._where.scheduler, "TREADLE_SIDECAR_ENGINE_ID": engine_id, **settings}
        name = f"sidecar-{engine_id}"
        child = self._start(python, name, "treadle_sidecar", "sidecar", self._where.sidecars[engine_id], extra)
        await self._ready([child])
        return child

    def _start(
        self, python: str, name: str, module: str, service: str, address: str, extra: Mapping[str, str]
    ) -> Child:
        ready_file = self._ready_file(name)
        ready_file.unlink(missing_ok=True)
        prefix = f"TREADLE_{service.upper()}_"
        own = {f"{prefix}LISTEN": address, f"{prefix}READY_FILE": str(ready_file)}
        return self._tree.start(name, [python, "-m", module], env={**self._environ, **own, **extra}, stage=STAGE)

    async def _ready(self, children: list[Child]) -> None:
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(self._one_ready(child))

    async def _one_ready(self, child: Child) -> str:
        async def address() -> str | None:
            try:
                return str(json.loads(self._ready_file(child.name).read_text())["address"])
            except FileNotFoundError:
                return None

        return await child.until(address, "ready file", START_TIMEOUT_S)

    def _ready_file(self, name: str) -> Path:
        return self._folder / f"{name}.ready.json"


async def start_nats(
    tree: ProcessTree, folder: Path, environ: dict[str, str], port: int = ANY_PORT
) -> tuple[Child, str]:
    """Start nats-server with its store in `folder`; return it and its URL once it listens. port: any free one."""
    command = [str(nats_server()), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder / "jetstream")]
    child = tree.start("nats", [*command, "--ports_file_dir", str(folder)], env=environ, stage=NATS_STAGE)

    async def url() -> str | None:
        return _written_url(folder, child.pid)

    return child, await child.until(url, "ports file", NATS_TIMEOUT_S)


def _written_url(folder: Path, pid: int) -> str | None:
    for path in folder.glob(f"*_{pid}.ports"):
        try:
            return str(json.loads(path.read_text())["nats"][0])
        except (json.JSONDecodeError, KeyError, IndexError):
            return None  # still being written
    return None
