"""Run a mesh on this machine: NATS, the services, the engines and their sidecars, in one process tree.

`treadle up` (`run_up`) runs one until Ctrl-C; `treadle demo` runs its arms on one. Engines take most of a minute to
start and live as long as the mesh; the control plane takes seconds, and `renew_control_plane` replaces it with a fresh
one (empty store, no history) on the same engines. An engine that dies is recorded, and its sidecar reports it to the
scheduler; any other child that dies ends the mesh, with its name and the end of its log.
"""

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import grpc
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from treadle_cli.mesh import engines, services
from treadle_cli.mesh.checks import require_bubblewrap
from treadle_cli.mesh.engines import Engine, EnginePlan
from treadle_cli.mesh.processes import Child, ChildDiedError, ProcessTree, describe_exit
from treadle_cli.mesh.services import Addresses, Services, free_ports, is_free
from treadle_cli.problems import UsageProblem

ASK_TIMEOUT_S = 10.0
REGISTRATION_TIMEOUT_S = 60.0  # a sidecar registers as soon as its engine has answered it


class Board(Protocol):
    """Where progress and messages go."""

    def note(self, text: str) -> None:
        """Show a message."""
        ...

    def part(self, name: str) -> AbstractContextManager[None]:
        """Show that something starts while the block runs."""
        ...


@dataclass(frozen=True)
class MeshPlan:
    """What to start. folder: for state that is deleted with the mesh. base_port: the scheduler's; 0: free ports."""

    engines: EnginePlan
    folder: Path
    base_port: int = 0

    @property
    def engine_ids(self) -> list[str]:
        """Names of the engines, in order."""
        return [f"engine-{index}" for index in range(self.engines.count)]


@dataclass(frozen=True)
class EngineDeath:
    """The process of an engine ended although nobody stopped it. time_s: unix time."""

    engine_id: str
    time_s: float
    how: str


class Mesh:
    """Made by `Mesh.start`; its `tree` stops it."""

    def __init__(self, plan: MeshPlan, tree: ProcessTree, board: Board) -> None:
        self.plan = plan
        self.engines: list[Engine] = []
        self.engine_deaths: list[EngineDeath] = []
        self.model_path = ""
        self.where = _addresses(plan)
        self.nats_url = ""
        self.board: Board = board  # changed by whoever displays
        self._tree = tree
        self._environ = dict(os.environ)
        self._control: list[Child] = []
        self._generation = 0
        self._preempt = True
        self._serving = False
        self._broken: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, plan: MeshPlan, tree: ProcessTree, board: Board) -> "Mesh":
        """Start everything; return when every engine answers and is registered with the scheduler."""
        require_bubblewrap()
        mesh = cls(plan, tree, board)
        tree.on_death = mesh.on_death
        async with asyncio.TaskGroup() as group:
            group.create_task(mesh._start_engines())
            group.create_task(mesh._start_control())
        await mesh._start_sidecars()
        mesh._serving = True
        return mesh

    @property
    def hicache_folder(self) -> Path:
        """The shared folder of KV pages."""
        return self.plan.folder / "kv"

    def on_death(self, child: Child) -> None:
        """Record the death of an engine; end the mesh at the death of any other child."""
        if child.name in self.plan.engine_ids:
            if not self._serving:
                return  # `until_healthy` raises it
            death = EngineDeath(child.name, time.time(), describe_exit(child.returncode))
            self.engine_deaths.append(death)
            self.board.note(f"{death.engine_id} {death.how}; its trajectories go on elsewhere")
        elif not self._broken.done():
            self._broken.set_result(child)

    async def until_broken(self) -> None:
        """Raise ChildDiedError once a child dies that the mesh needs."""
        raise ChildDiedError(await asyncio.shield(self._broken))

    async def renew_control_plane(self, *, preempt: bool) -> None:
        """Stop NATS, the services and the sidecars, empty all KV caches, and start them again with an empty store.

        preempt: whether the sidecars may preempt a running step for a waiting one.
        """
        self._preempt = preempt
        await self._tree.stop([child for child in self._control if child.stage == services.STAGE])
        await self._tree.stop(self._control)
        self._control = []
        await engines.forget_caches(self.engines, self.hicache_folder, self.board.note)
        self._generation += 1
        self.where = _addresses(self.plan)
        await self._start_control()
        await self._start_sidecars()

    async def _start_engines(self) -> None:
        plan = self.plan.engines
        if plan.count == 0:
            return
        with self.board.part("model"):
            self.model_path = await engines.prepare_model(self._tree, plan, self._environ)
        self.hicache_folder.mkdir(parents=True, exist_ok=True)
        ports = free_ports(plan.count)
        self.engines = engines.start_engines(
            self._tree, plan, self.model_path, ports, self.hicache_folder, self._environ
        )
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(self._until_healthy(engine))

    async def _until_healthy(self, engine: Engine) -> None:
        pinned = f" (core {', '.join(map(str, engine.cores))}, one thread)" if engine.cores else ""
        with self.board.part(f"{engine.engine_id}{pinned}"):
            await engines.until_healthy(engine)

    async def _start_control(self) -> None:
        folder = self.plan.folder / f"control-{self._generation}"
        (folder / "nats").mkdir(parents=True, exist_ok=True)
        with self.board.part("NATS and services"):
            nats, self.nats_url = await services.start_nats(self._tree, folder / "nats", self._environ)
            self._control.append(nats)
            self._services = Services(self._tree, self.where, self.nats_url, folder, self._environ)
            self._control += await self._services.start_control(sys.executable)

    async def _start_sidecars(self) -> None:
        alive = [engine for engine in self.engines if not engine.child.exited.is_set()]
        if not alive:
            return
        with self.board.part("sidecars"):
            for engine in alive:
                settings = self._sidecar_settings(engine)
                self._control.append(await self._services.start_sidecar(sys.executable, engine.engine_id, settings))
            await self._until_registered({engine.engine_id for engine in alive})

    async def _until_registered(self, engine_ids: set[str]) -> None:
        """Return once the scheduler has a lease of each engine."""
        sidecars = [child for child in self._control if child.name.startswith("sidecar-")]
        async with grpc.aio.insecure_channel(self.where.scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

            async def registered() -> bool | None:
                answer = await stub.ListEngines(scheduler_pb2.ListEnginesRequest(), timeout=ASK_TIMEOUT_S)
                return engine_ids <= {engine.info.engine_id for engine in answer.engines} or None

            for sidecar in sidecars:
                await sidecar.until(registered, "registration with the scheduler", REGISTRATION_TIMEOUT_S)

    def _sidecar_settings(self, engine: Engine) -> dict[str, str]:
        settings = {
            "TREADLE_SIDECAR_ENGINE_URL": engine.url,
            "TREADLE_SIDECAR_SLOTS": str(self.plan.engines.slots),
            "TREADLE_SIDECAR_KV_STORAGE_DIR": str(self.hicache_folder.absolute()),
            "TREADLE_SIDECAR_PREEMPT": "true" if self._preempt else "false",
        }
        return settings | engines.CPU_CURVE_SETTINGS if self.plan.engines.on_cpu else settings


def _addresses(plan: MeshPlan) -> Addresses:
    names = list(services.PORT_OFFSETS)
    if plan.base_port == 0:
        ports = free_ports(len(names) + plan.engines.count)
    else:
        ports = [plan.base_port + services.PORT_OFFSETS[name] for name in names]
        ports += [plan.base_port + services.SIDECAR_PORT_OFFSET + index for index in range(plan.engines.count)]
        taken = [str(port) for port in ports if not is_free(port)]
        if taken:
            raise UsageProblem(
                f"port {', '.join(taken)} is taken: another mesh runs? Pass --port 0 for free ones, or another --port."
            )
    return services.addresses(
        dict(zip(names, ports, strict=False)), dict(zip(plan.engine_ids, ports[len(names) :], strict=True))
    )


class StartBoard:
    """Shows parts while they start. Used as a context manager; closing it leaves the last state on the screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(finished_text="[green]✓[/green]"),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
            )
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def note(self, text: str) -> None:
        """Print a message above the progress lines."""
        self._console.print(text, style="yellow", highlight=False, soft_wrap=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Show `name` as starting until the block ends."""
        started_s = time.monotonic()
        task = self._progress.add_task(name, total=1) if self._progress is not None else None
        if task is None:
            self._console.print(f"starting {name}", highlight=False)
        yield
        if self._progress is not None and task is not None:
            self._progress.update(task, completed=1)
        else:
            self._console.print(f"{name} ready after {time.monotonic() - started_s:.1f} s", highlight=False)


async def run_up(plan: MeshPlan, logs: Path, console: Console, hurry: asyncio.Event) -> int:
    """Start the mesh, print its addresses, and wait for a signal or ChildDiedError.

    logs: the folder of the children's logs. The plan's folder, the state of the mesh, is removed at the end.
    """
    try:
        async with ProcessTree(logs, hurry=hurry) as tree:
            with StartBoard(console) as board:
                mesh = await Mesh.start(plan, tree, board)
            console.print(_table(mesh))
            console.print(f"Logs: {logs}. Ctrl-C stops everything.", highlight=False, soft_wrap=True)
            await mesh.until_broken()
    finally:
        shutil.rmtree(plan.folder, ignore_errors=True)
    return 0


def _table(mesh: Mesh) -> Table:
    table = Table("service", "address", "what for", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    purposes = {
        "scheduler": "the one address that a client needs",
        "predictor": "how much is left?",
        "placement": "where?",
        "migrator": "how does the KV get there?",
        "tools": "who runs the tool?",
        "rollout": "which trajectories are worth finishing?",
    }
    for name, purpose in purposes.items():
        table.add_row(name, mesh.where.services[name], purpose)
    for engine in mesh.engines:
        cores = f", core {', '.join(map(str, engine.cores))}" if engine.cores else ""
        table.add_row(
            f"sidecar of {engine.engine_id}", mesh.where.sidecars[engine.engine_id], f"SGLang at {engine.url}{cores}"
        )
    table.add_row("NATS", mesh.nats_url, "facts and state")
    return table
