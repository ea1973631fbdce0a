"""Define options that several commands share, where commands print, and the folders and files that
other users of the machine cannot read."""

import json
import os
import stat
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from treadle_cli.exits import Terminal, UsageProblem, err

DEFAULT_PORT = 7401  # port of the scheduler, as in the services' own defaults
DEFAULT_SCHEDULER = f"127.0.0.1:{DEFAULT_PORT}"
NATS_VARIABLE = "TREADLE_NATS_URL"
DEFAULT_OUT = Path("runs")
PRIVATE_UMASK = 0o077  # of what commands write: conversations, keys, logs

# Sixteen times the papers' cluster: beyond, a simulation takes longer than anyone waits, and then
# the memory.
MOST_GPUS, MOST_SLOTS = 1_024, 4_096
MOST_PORT = 65_000  # of the scheduler: those of the services and of each engine's sidecar follow


def complete_from(*values: str) -> Callable[[str], list[str]]:
    """Return what a shell offers for an option with these values; of a list with commas, for the
    last one."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in values if value.startswith(last)]

    return complete


Engines = Annotated[
    int, typer.Option(min=0, help="Engines to start. On a CPU each needs a core of its own.")
]
Model = Annotated[
    str,
    typer.Option(
        help="A model folder, or a name that SGLang can fetch. The default comes with the "
        "engine's venv."
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        help="Of engines on a CPU: int8, float, or auto, which is int8 where the processor "
        "multiplies bytes.",
        autocompletion=complete_from("auto", "int8", "float"),
    ),
]
Slots = Annotated[int, typer.Option(min=1, help="Steps that decode at once on an engine.")]
ToolLatency = Annotated[
    float, typer.Option(min=0, help="Seconds that each tool call takes beside its own work.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, environments and sampling.")]
Prompts = Annotated[int, typer.Option(min=1, help="Prompts: FrozenLake and puzzles in turn.")]
Samples = Annotated[int, typer.Option(min=1, help="Trajectories of each prompt.")]
Scheduler = Annotated[
    str,
    typer.Option(
        help="host:port of the mesh's scheduler, of several schedulers with commas between."
    ),
]
# Options of simulated engines.
Llm = Annotated[str, typer.Option(help="Model whose engines are simulated.")]
Accelerator = Annotated[
    str,
    typer.Option(
        help="A100, H100, H200, H800 or H20.",
        autocompletion=complete_from("A100", "H100", "H200", "H800", "H20"),
    ),
]
Gpus = Annotated[int, typer.Option(min=1, max=MOST_GPUS, help="Accelerators of each system.")]
SimulatedSlots = Annotated[
    int,
    typer.Option(
        min=1, max=MOST_SLOTS, help="Steps that decode at once for each GPU of an engine."
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        help="Engine measured live (sim/README.md) instead of --llm, --accelerator, --slots."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Out = Annotated[Path, typer.Option("--out", help="Folder that runs are written to.")]


def choose_console(as_json: bool) -> Console:
    """Return where a command shows its progress and its tables: with --json, stdout is for one JSON
    object."""
    return err if as_json else Terminal()


def print_json(found: Mapping[str, Any]) -> None:
    """Print the one line of --json, in which every letter beyond ASCII is escaped."""
    typer.echo(json.dumps(found).replace("\x7f", "\\u007f"))


def new_run_folder(out_folder: Path, kind: str = "") -> Path:
    """Create the folder <kind><time>-<four letters>: names sort by time, two runs of one second
    differ. What this process and its children write from now on is for this user alone. Raises
    UsageProblem."""
    os.umask(PRIVATE_UMASK)
    folder = out_folder / f"{kind}{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    try:
        folder.mkdir(parents=True)
        found = out_folder.stat()
    except OSError as error:
        raise UsageProblem(f"--out: {out_folder}: {error.strerror}") from error
    # Its owner, or whoever may write there, could put another folder in the place of this one.
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if open_to_all or found.st_uid not in (0, os.geteuid()):
        folder.rmdir()
        raise UsageProblem(
            f"--out: {out_folder} belongs to user {found.st_uid}, or all users may write there: "
            "name a folder of your own"
        )
    return folder


def make_private_folder(folder: Path) -> Path:
    """Make a folder for this user alone unless it is there, and return it. Raises UsageProblem
    where another user owns it or may write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(folder)
    return folder


def require_own(path: Path) -> None:
    """Raise UsageProblem unless this user owns a file or folder and nobody else may write there."""
    owners = {path.lstat().st_uid, path.stat().st_uid}  # of a link, too
    if owners != {os.geteuid()}:
        raise UsageProblem(f"{path} belongs to another user: name a folder of your own")
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageProblem(f"{path} can be changed by other users: run chmod go-w {path}")


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file in one step, readable by its owner alone: a process may be reading the one
    before."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    part.replace(path)
