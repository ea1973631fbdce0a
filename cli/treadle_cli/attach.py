"""Run `treadle attach`: put sidecars beside SGLang servers that somebody else started, and a mesh
around them.

The servers are read before anything starts (`doctor.servers`), and are never started, stopped or
reconfigured. The mesh is one of its own (NATS and services), or one that runs already. When the
command ends, its sidecars take their engines from the scheduler, end the steps that they run, and
the servers go on as they were.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc.aio
import typer
from rich.console import Console
from rich.table import Table
from treadle.certificates import FOLDER_VARIABLE, Certificates
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_runtime.config import is_loopback

from treadle_cli import exits
from treadle_cli.certs import OPERATOR, describe_clients, make_certificates
from treadle_cli.doctor.findings import OK, PROBLEM, Finding, print_alike, report
from treadle_cli.exits import Terminal, UsageProblem
from treadle_cli.mesh.mesh import Board, StartBoard
from treadle_cli.mesh.processes import Child, ProcessError, ProcessTree, describe_exit
from treadle_cli.mesh.scheduler import reach_scheduler
from treadle_cli.mesh.services import Access, Addresses, ControlPlane, choose_addresses, open_tree
from treadle_cli.options import (
    DEFAULT_OUT,
    DEFAULT_PORT,
    MOST_PORT,
    NATS_VARIABLE,
    AsJson,
    Out,
    choose_console,
    new_run_folder,
    print_json,
)

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

REGISTRATION_S = (
    120.0  # a sidecar first probes its engine, for 10 s at most; a busy engine is not probed
)
CALL_S = 10.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class AttachPlan:
    """Plan of `treadle attach`: sidecars beside the servers at `urls`. scheduler, nats_url: of a
    mesh that runs already; empty: one is started with its scheduler at `base_port`. host: the name
    or address at which that mesh reaches this machine; empty: the mesh runs on this machine. slots:
    steps at once on each engine, 0: as many as the engine reports. kv_folder: the engines' shared
    storage of KV, None: not known."""

    urls: tuple[str, ...]
    scheduler: str = ""
    nats_url: str = ""
    base_port: int = 0
    host: str = ""
    slots: int = 0
    kv_folder: Path | None = None
    secure: bool = False

    @property
    def reached_at(self) -> str:
        """Return the host of the sidecars' addresses."""
        return self.host or LOOPBACK

    def require_sound(self) -> None:
        """Raise UsageProblem for options that do not go together."""
        if self.scheduler and not self.nats_url:
            raise UsageProblem(
                "--scheduler needs --nats-url: the NATS of that mesh, where sidecars publish facts"
            )
        if self.nats_url and not self.scheduler:
            raise UsageProblem(
                "--nats-url needs --scheduler: without one, attach starts a mesh with a NATS of "
                "its own"
            )
        elsewhere = [
            each for each in self.scheduler.split(",") if each and not is_loopback(each.strip())
        ]
        if elsewhere and not self.host:
            raise UsageProblem(
                f"--scheduler {elsewhere[0]} needs --host: the name or address at which that mesh "
                "reaches this machine"
            )
        if self.scheduler and self.secure:
            raise UsageProblem(
                "--secure is of a mesh that attach starts; for one that runs, set "
                f"{FOLDER_VARIABLE} to the folder of a sidecar's certificate"
            )
        if self.kv_folder is not None and not self.kv_folder.is_dir():
            raise UsageProblem(f"--kv-folder {self.kv_folder}: there is no such folder")


def attach(
    urls: Annotated[
        list[str], typer.Argument(help="SGLang servers that run, e.g. http://127.0.0.1:30000.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Say what must change, and start nothing.")
    ] = False,
    scheduler: Annotated[str, typer.Option(help="host:port of a mesh that runs, to join it.")] = "",
    nats_url: Annotated[
        str,
        typer.Option(
            help="The NATS of that mesh, nats://host:port; with a password by TREADLE_NATS_URL, "
            "since other users read command lines."
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(
            help="Where that mesh reaches this machine, if it runs on another.",
            show_default="127.0.0.1",
        ),
    ] = "",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_PORT, help="Port of the scheduler that is started; 0: free ports."
        ),
    ] = DEFAULT_PORT,
    slots: Annotated[
        int, typer.Option(min=0, help="Steps that decode at once on an engine; 0: as it says.")
    ] = 0,
    kv_folder: Annotated[
        Path | None,
        typer.Option(help="The folder in which the servers' HiCache stores KV, if they share one."),
    ] = None,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Encrypt every connection, and let nobody call without a certificate."
        ),
    ] = False,
    out_folder: Out = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """Put a sidecar beside each SGLang server that somebody else started, until Ctrl-C, which
    leaves the servers as they were. Checks the servers' flags first; exit code 1 of --check where
    one must change."""
    nats_url = nats_url or (os.environ.get(NATS_VARIABLE, "") if scheduler else "")
    plan = AttachPlan(tuple(urls), scheduler, nats_url, port, host, slots, kv_folder, secure)

    def begin(hurry: asyncio.Event) -> Coroutine[Any, Any, int]:
        if check:
            return run_check(plan.urls, as_json, Terminal())
        announce = print_json if as_json else None
        return run_attach(plan, out_folder, choose_console(as_json), hurry, announce)

    exits.run(begin)


async def run_check(urls: Sequence[str], as_json: bool, out: Console) -> int:
    """Run `--check`: print what must change on the servers; return the exit code. Raises
    UsageProblem for a bad URL."""
    from treadle_cli.doctor.servers import check_servers, clean_urls, read_servers

    return report(list(check_servers(await read_servers(clean_urls(urls)))), as_json, out)


async def run_attach(
    plan: AttachPlan,
    out_folder: Path,
    out: Console,
    hurry: asyncio.Event,
    announce: Callable[[Mapping[str, object]], None] | None = None,
) -> int:
    """Check the servers, start what is missing, and wait for a signal. announce: called with all
    addresses by name when every engine is registered. Raises UsageProblem, ProcessError."""
    from treadle_cli.doctor.servers import check_servers, clean_urls, read_servers
    from treadle_cli.mesh.checks import nats_server, require_bubblewrap

    plan.require_sound()
    servers = await read_servers(clean_urls(plan.urls))
    _require_usable(list(check_servers(servers)), out)
    urls = {server.name(plan.reached_at): server.url for server in servers}
    if len(urls) < len(servers):
        raise UsageProblem(
            f"{', '.join(plan.urls)}: two of these are one server, by its host and port"
        )
    if not plan.scheduler:
        require_bubblewrap()
        nats_server()
        if not plan.secure:
            # of another mesh; this one is plaintext on the loopback interface
            os.environ.pop(FOLDER_VARIABLE, None)
    folder = new_run_folder(out_folder, "attach-")
    state = folder / "state"
    try:
        async with open_tree(folder / "logs", hurry) as tree:
            model_path = str(servers[0].model["model_path"])  # they all serve the same
            attachment = _Attachment(plan, urls, model_path, tree, state)
            with StartBoard(out) as board:
                await attachment.start(board)
            out.print(attachment.table())
            for line in attachment.hints(folder / "logs"):
                out.print(line, highlight=False, soft_wrap=True, markup=False)
            if announce is not None:
                announce(attachment.addresses())
            await attachment.until_broken()
    finally:
        shutil.rmtree(state, ignore_errors=True)
    return 0


def _require_usable(findings: Sequence[Finding], out: Console) -> None:
    """Show what could be better. Raises UsageProblem where a server cannot be used."""
    noted = [finding for finding in findings if finding.level != OK]
    print_alike(noted, out)
    problems = [
        f"{finding.subject}: {finding.check}: {finding.says}"
        for finding in noted
        if finding.level == PROBLEM
    ]
    if problems:
        raise UsageProblem("nothing was started: " + "; ".join(problems))


async def _engine_ids(stub: SchedulerServiceAsyncStub) -> list[str]:
    answer = await stub.ListEngines(pb.ListEnginesRequest(), timeout=CALL_S)
    return [engine.info.engine_id for engine in answer.engines]


class _Attachment:
    """The sidecars of one command, and the mesh if the command started it."""

    def __init__(
        self,
        plan: AttachPlan,
        urls: dict[str, str],
        model_path: str,
        tree: ProcessTree,
        folder: Path,
    ) -> None:
        self._plan, self._urls, self._model_path, self._tree = plan, urls, model_path, tree
        folder.mkdir(parents=True)
        self._certificates = (
            make_certificates(folder.absolute() / "certificates") if plan.secure else None
        )
        if plan.scheduler:
            self._where = Addresses({"scheduler": plan.scheduler}, {})
        else:
            self._where = replace(
                choose_addresses(tree.ports, plan.base_port, list(urls)), resources=""
            )
        self._control = ControlPlane(tree, self._where, folder, certificates=self._certificates)
        self._broken: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._sidecars: dict[str, str] = {}
        self._front_door = self._page = ""
        tree.on_death = self._on_death

    async def start(self, board: Board) -> None:
        """Start the sidecars; return once every engine is registered with the scheduler. Raises
        ProcessError, UsageProblem."""
        if self._plan.scheduler:
            self._control.nats_url = self._plan.nats_url
        else:
            with board.part("NATS and services"):
                await self._control.start()
        own = None if self._certificates is None else Certificates(self._certificates / OPERATOR)
        async with reach_scheduler(self._where.scheduler, own) as stub:
            taken = sorted(set(self._urls) & set(await _engine_ids(stub)))
            if taken:
                raise UsageProblem(
                    f"{self._urls[taken[0]]}: the mesh has an engine {taken[0]}: is it attached "
                    "already?"
                )
            async with asyncio.TaskGroup() as group:
                for engine_id in self._urls:
                    group.create_task(self._start_sidecar(engine_id, stub, board))
        if not self._plan.scheduler:
            with board.part("gateway and console"):
                self._front_door = await self._control.start_gateway(self._model_path)
                self._page = await self._control.start_console(self._plan.base_port)

    def addresses(self) -> dict[str, object]:
        """Return the addresses of the mesh by name, with the sidecars of this command."""
        return replace(self._where, sidecars=self._sidecars).named(self._access)

    @property
    def _access(self) -> Access:
        key = self._control.api_key if self._front_door else ""
        return Access(self._control.nats_url, self._front_door, self._page, key)

    async def until_broken(self) -> None:
        """Raise ProcessError once a child dies."""
        child = await asyncio.shield(self._broken)
        raise ProcessError(child, describe_exit(child.returncode))

    async def _start_sidecar(
        self, engine_id: str, stub: SchedulerServiceAsyncStub, board: Board
    ) -> None:
        async def is_registered() -> bool | None:
            try:
                return engine_id in await _engine_ids(stub) or None
            except grpc.aio.AioRpcError:
                return None  # it may be restarting; the limit of time holds

        address = (
            self._where.sidecars.get(engine_id)
            or f"{self._plan.reached_at}:{self._tree.ports.choose(1)[0]}"
        )
        settings = {
            "TREADLE_SIDECAR_ENGINE_URL": self._urls[engine_id],
            "TREADLE_SIDECAR_SLOTS": str(self._plan.slots),
            "TREADLE_SIDECAR_LISTEN": address,
        }
        if self._plan.kv_folder is not None:
            settings["TREADLE_SIDECAR_KV_STORAGE_DIR"] = str(self._plan.kv_folder.absolute())
        if self._plan.scheduler:
            settings["TREADLE_SIDECAR_TLS_FOLDER"] = os.environ.get(FOLDER_VARIABLE, "")
        with board.part(f"sidecar of {self._urls[engine_id]}"):
            child = await self._control.start_sidecar(engine_id, settings)
            self._sidecars[engine_id] = address
            await child.until(is_registered, "registration with the scheduler", REGISTRATION_S)

    def _on_death(self, child: Child) -> None:
        if not self._broken.done():
            self._broken.set_result(child)

    def table(self) -> Table:
        """Return a table of the addresses, as treadle up prints them."""
        servers = {engine_id: f"SGLang at {url}" for engine_id, url in self._urls.items()}
        where = replace(self._where, sidecars=self._sidecars)
        return where.table(self._access, servers)

    def hints(self, logs: Path) -> list[str]:
        """Return lines that name what to do next."""
        lines = []
        if self._certificates is not None:
            lines.append(describe_clients(self._certificates))
        lines += [] if self._plan.scheduler else self._access.lines()
        lines.append(f"Watch it: treadle top --scheduler {self._where.scheduler}")
        lines.append(
            f"Logs: {logs}. Ctrl-C takes the sidecars away and leaves the servers as they are."
        )
        return lines
