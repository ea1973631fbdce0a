"""Run a mesh on this machine: NATS, the services, the engines and their sidecars, in one process
tree.

`treadle up` (`run_up`) runs one until Ctrl-C; `treadle demo` plays on one. Engines take most of a
minute to start and live as long as the mesh. `forget_caches` and `set_policy` prepare it for
another play, with the history that it has; a control plane takes seconds, and `renew_control_plane`
replaces it with a fresh one (empty store, no history). An engine that dies is recorded, and its
sidecar reports it to the scheduler; any other child that dies ends the mesh, with its name and the
end of its log.
"""

import asyncio
import itertools
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import grpc
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from treadle.certificates import Certificates, open_channel
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle_runtime.fields import require

from treadle_cli.certs import OPERATOR, describe_clients, make_certificates
from treadle_cli.exits import printable
from treadle_cli.mesh import checks, engines
from treadle_cli.mesh.engines import Engine, EnginePlan
from treadle_cli.mesh.processes import Child, ProcessError, ProcessTree, describe_exit
from treadle_cli.mesh.services import (
    CONSOLE,
    TOGETHER,
    Access,
    ControlPlane,
    choose_addresses,
    open_tree,
)
from treadle_cli.resources.plan import EngineClass, EngineFailed, ResourcePlan, require_room
from treadle_cli.resources.servicer import serve_resources

ASK_TIMEOUT_S = 10.0
POLICY_TIMEOUT_S = 30.0
REGISTRATION_TIMEOUT_S = 60.0  # a sidecar registers once it has probed its engine, for 10 s at most


class Board:
    """Display of progress and messages; this one shows messages alone."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        """Print a message, above any progress lines."""
        self.console.print(Text(printable(text), "yellow"), soft_wrap=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Show `name` as starting until the block ends."""
        yield


class StartBoard(Board):
    """Display of parts while they start, a context manager; closing it leaves the last state on the
    screen."""

    def __enter__(self) -> Self:
        columns = (
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )
        self._progress = Progress(
            *columns, console=self.console, disable=not self.console.is_terminal
        )
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Show `name` as starting until the block ends."""
        started_s = time.monotonic()
        task = self._progress.add_task(name, total=1)
        if self._progress.disable:
            self.console.print(f"starting {name}", highlight=False, markup=False)
        yield
        self._progress.update(task, completed=1)
        if self._progress.disable:
            ready = f"{name} ready after {time.monotonic() - started_s:.1f} s"
            self.console.print(ready, highlight=False, markup=False)


@dataclass(frozen=True)
class MeshPlan:
    """Plan of a mesh. folder: for state that is deleted with the mesh. base_port: the scheduler's;
    0: free ports. takes_resource_plans: whether this process is to answer `where.resources`.
    front_door: whether a gateway answers `where.http`. secure: with certificates, made in `folder`,
    on every connection but that of an engine with its sidecar. probes: whether sidecars probe
    engines that are idle for them. together: the services that share a process."""

    engines: EnginePlan
    folder: Path
    base_port: int = 0
    takes_resource_plans: bool = False
    front_door: bool = False
    secure: bool = False
    probes: bool = True
    together: tuple[str, ...] = TOGETHER


@dataclass(frozen=True)
class EngineDeath:
    """The process of an engine ended although nobody stopped it. time_s: unix time."""

    engine_id: str
    time_s: float
    how: str


class Mesh:
    """A mesh that runs. `Mesh.start` makes it; its `tree` stops it."""

    def __init__(self, plan: MeshPlan, tree: ProcessTree, board: Board) -> None:
        self.engines: list[Engine] = []
        self.engine_deaths: list[EngineDeath] = []
        self.model_path = ""
        self.front_door = ""  # the gateway's URL
        plan.folder.mkdir(parents=True, exist_ok=True)
        self.plan = plan = replace(plan, engines=engines.with_key(plan.engines, plan.folder))
        self.certificates = (
            make_certificates(plan.folder.absolute() / "certificates") if plan.secure else None
        )
        self.kv = engines.place_kv(tree, plan.engines, plan.folder)
        self.board = board  # a play puts its own display here
        self._tree = tree
        self._generation = 0
        self._plan_control()
        self._serving = False
        self._numbers = itertools.count(plan.engines.count)  # of engines: no id is given twice
        self._starting: set[str] = set()  # names of children whose end `until_up` reports
        self._broken: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, plan: MeshPlan, tree: ProcessTree, board: Board) -> "Mesh":
        """Start everything; return when every engine answers and is registered with the
        scheduler."""
        mesh = cls(plan, tree, board)
        tree.on_death = mesh.on_death
        async with asyncio.TaskGroup() as group:
            group.create_task(mesh._start_engines())
            group.create_task(mesh._start_control())
        await mesh._start_sidecars()
        if plan.front_door:
            await mesh._start_gateway()
        mesh._serving = True
        return mesh

    @property
    def nats_url(self) -> str:
        """Return the URL of the NATS that runs now."""
        return self._control.nats_url

    def access(self, page: str) -> Access:
        """Return how callers reach the mesh. page: the URL of the console."""
        return Access(self.nats_url, self.front_door, page, self._control.api_key)

    def on_death(self, child: Child) -> None:
        """Record the death of an engine; end the mesh at the death of any other child that it
        needs."""
        if child.name in self._starting:
            return
        if child.name == CONSOLE:
            self.board.note("the console has ended; the mesh goes on without a page")
            return
        if child.name in {engine.engine_id for engine in self.engines}:
            if not self._serving:
                return  # `until_healthy` raises it
            death = EngineDeath(child.name, time.time(), describe_exit(child.returncode))
            self.engine_deaths.append(death)
            self.board.note(f"{death.engine_id} {death.how}; its trajectories go on elsewhere")
        elif not self._broken.done():
            self._broken.set_result(child)

    async def until_broken(self) -> None:
        """Raise ProcessError once a child dies that the mesh needs."""
        child = await asyncio.shield(self._broken)
        raise ProcessError(child, describe_exit(child.returncode))

    async def renew_control_plane(self, policy: scheduler_pb2.Policy) -> None:
        """Stop NATS, the services and the sidecars, empty all KV caches, and start them again with
        an empty store and this policy."""
        await self._control.stop()
        await self.forget_caches()
        self._generation += 1
        self._plan_control()
        await self._start_control()
        await self._start_sidecars()
        await self.set_policy(policy)

    async def forget_caches(self) -> None:
        """Empty the KV caches of all engines and the KV in shared storage, while no trajectory is
        open."""
        await engines.forget_caches(self.engines, self.kv.folder, self.board.note)

    async def set_policy(self, policy: scheduler_pb2.Policy) -> None:
        """Set the policy of the trajectories that are opened from now on."""
        async with self._to_scheduler() as channel:
            request = scheduler_pb2.SetPolicyRequest(request_id=uuid.uuid4().hex, policy=policy)
            await scheduler_pb2_grpc.SchedulerServiceStub(channel).SetPolicy(
                request, timeout=POLICY_TIMEOUT_S
            )

    async def list_engines(self) -> list[scheduler_pb2.RegisteredEngine]:
        """Return the engines that are registered with the scheduler, by id."""
        async with self._to_scheduler() as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            answer = await stub.ListEngines(
                scheduler_pb2.ListEnginesRequest(), timeout=ASK_TIMEOUT_S
            )
        return sorted(answer.engines, key=lambda engine: str(engine.info.engine_id))

    @property
    def own_certificates(self) -> Certificates | None:
        """Return the certificates of this process."""
        return None if self.certificates is None else Certificates(self.certificates / OPERATOR)

    def _to_scheduler(self) -> grpc.aio.Channel:
        return open_channel(self.where.scheduler, "scheduler", self.own_certificates)

    def start_engine(self, kind: EngineClass, units: tuple[str, ...]) -> str:
        """Start one more engine on these cores or accelerators and return its id; `until_up` waits
        for it."""
        engine_id = f"engine-{next(self._numbers)}"
        self._starting |= {engine_id, f"sidecar-{engine_id}"}
        where = (self.model_path, self.kv)
        self.engines.append(
            engines.start_engine(self._tree, self.plan.engines, engine_id, kind, units, *where)
        )
        return engine_id

    async def until_up(self, engine_id: str) -> None:
        """Return once an engine that was started answers and its sidecar serves. Raises
        ProcessError."""
        engine = self.engine(engine_id)
        await engines.until_healthy(engine)
        await self._start_sidecar(engine)
        self._starting -= {engine_id, f"sidecar-{engine_id}"}

    def engine(self, engine_id: str) -> Engine:
        """Return a started engine. Raises KeyError."""
        return {engine.engine_id: engine for engine in self.engines}[engine_id]

    def service(self, name: str) -> Child:
        """Return the process of a service, as started last."""
        return self._control.child(name)

    async def start_console(self) -> str:
        """Start the console and return the URL of its page. Raises ProcessError."""
        return await self._control.start_console(self.plan.base_port)

    async def restart_service(self, name: str) -> None:
        """Restart a service that has ended, at its address. Raises ProcessError."""
        await self._control.start_service(name)

    async def stop_engines(self, engine_ids: Sequence[str]) -> None:
        """Stop these engines for good, after their sidecars, which take them from the scheduler."""
        sidecars = {f"sidecar-{engine_id}" for engine_id in engine_ids}
        await self._tree.stop([child for child in self._tree.children if child.name in sidecars])
        await self._tree.stop([self.engine(engine_id).child for engine_id in engine_ids])
        self.engines = [engine for engine in self.engines if engine.engine_id not in engine_ids]
        self._starting -= {*engine_ids, *sidecars}

    async def _start_engines(self) -> None:
        plan = self.plan.engines
        if plan.count == 0:
            return
        with self.board.part("model"):
            self.model_path = await engines.prepare_model(self._tree, plan)
        if self._tree.engine_forks is not None:
            with self.board.part("SGLang, imported once for all engines"):
                try:
                    await asyncio.to_thread(self._tree.engine_forks.wait_until_ready)
                except ChildProcessError:
                    # An engine that is started by its command shows the reason.
                    self._tree.engine_forks = None
        self.engines = engines.start_engines(self._tree, plan, self.model_path, self.kv)
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(self._until_healthy(engine))

    async def _until_healthy(self, engine: Engine) -> None:
        pinned = f" (core {', '.join(map(str, engine.cores))}, one thread)" if engine.cores else ""
        with self.board.part(f"{engine.engine_id}{pinned}"):
            await engines.until_healthy(engine)

    def _plan_control(self) -> None:
        where = choose_addresses(
            self._tree.ports, self.plan.base_port, self.plan.engines.engine_ids
        )
        self.where = where if self.plan.takes_resource_plans else replace(where, resources="")
        folder = self.plan.folder / f"control-{self._generation}"
        self._control = ControlPlane(
            self._tree,
            self.where,
            folder,
            certificates=self.certificates,
            engine_key=self.plan.engines.key,
        )

    async def _start_control(self) -> None:
        with self.board.part("NATS and services"):
            await self._control.start(together=self.plan.together)

    async def _start_sidecars(self) -> None:
        alive = [engine for engine in self.engines if not engine.child.exited.is_set()]
        if not alive:
            return
        with self.board.part("sidecars"):
            sidecars = [await self._start_sidecar(engine) for engine in alive]
            await self._until_registered({engine.engine_id for engine in alive}, sidecars)

    async def _start_sidecar(self, engine: Engine) -> Child:
        settings = {
            "TREADLE_SIDECAR_SLOTS": str(engine.kind.slots),
            "TREADLE_SIDECAR_KV_STORAGE_DIR": str(self.kv.folder),
            "TREADLE_SIDECAR_ENGINE_URL": engine.url,
            **({} if self.plan.probes else {"TREADLE_SIDECAR_PROBE_S": "0"}),
        }
        return await self._control.start_sidecar(engine.engine_id, settings)

    async def _start_gateway(self) -> None:
        with self.board.part("gateway"):
            self.front_door = await self._control.start_gateway(self.model_path)

    async def _until_registered(self, engine_ids: set[str], sidecars: list[Child]) -> None:
        """Return once the scheduler has a lease of each engine."""

        async def are_registered() -> bool | None:
            return (
                engine_ids <= {engine.info.engine_id for engine in await self.list_engines()}
                or None
            )

        for sidecar in sidecars:
            await sidecar.until(
                are_registered, "registration with the scheduler", REGISTRATION_TIMEOUT_S
            )


class LocalEngines:
    """The engines of a `Mesh`, as `resources.apply` changes them. units: the machine's cores or
    accelerators."""

    def __init__(self, mesh: Mesh, units: tuple[str, ...]) -> None:
        self._mesh = mesh
        self._units = units
        self.accelerators = len(units)
        self.accelerator = "gpu" if checks.has_gpu() else "cpu"

    async def running(self) -> dict[str, EngineClass]:
        return {
            each.engine_id: each.kind
            for each in self._mesh.engines
            if not each.child.exited.is_set()
        }

    async def check(self, plan: ResourcePlan) -> None:
        count = self._mesh.plan.engines.count
        require(
            count or not plan,
            "plan",
            "needs a mesh that began with an engine: treadle up --engines 1",
        )
        require_room(plan, self.accelerator, self.accelerators)

    async def stop(self, engine_ids: Sequence[str]) -> None:
        await self._mesh.stop_engines(engine_ids)

    async def start(self, kind: EngineClass) -> str:
        taken = {
            unit
            for each in self._mesh.engines
            if not each.child.exited.is_set()
            for unit in each.units
        }
        free = [unit for unit in self._units if unit not in taken]
        return self._mesh.start_engine(kind, tuple(free[: kind.degree]))

    async def until_up(self, engine_id: str) -> None:
        try:
            await self._mesh.until_up(engine_id)
        except ProcessError as error:
            raise EngineFailed(engine_id, str(error)) from error

    async def look_for_failure(self, engine_id: str) -> None:
        child = self._mesh.engine(engine_id).child
        if child.exited.is_set():
            raise EngineFailed(engine_id, str(ProcessError(child, describe_exit(child.returncode))))

    async def describe(self, engine_id: str) -> str:
        return self._mesh.engine(engine_id).child.tail()


async def run_up(
    plan: MeshPlan,
    logs: Path,
    console: Console,
    hurry: asyncio.Event,
    announce: Callable[[Mapping[str, object]], None] | None = None,
) -> int:
    """Start the mesh, print its addresses, and wait for a signal or a ProcessError.

    logs: the folder of the children's logs. The plan's folder, the state of the mesh, is removed at
    the end. announce: called with all addresses by name when all serves.
    """
    try:
        async with open_tree(logs, hurry, plan.engines) as tree:
            with StartBoard(console) as board:
                mesh = await Mesh.start(
                    replace(plan, takes_resource_plans=True, front_door=True), tree, board
                )
            mesh.board = Board(console)
            local = LocalEngines(mesh, checks.list_units())
            own, scheduler = mesh.own_certificates, mesh.where.scheduler
            async with serve_resources(
                mesh.where.resources, local, scheduler, mesh.board.note, own
            ):
                access = mesh.access(await mesh.start_console())
                engines = {each.engine_id: _describe(each) for each in mesh.engines}
                console.print(mesh.where.table(access, engines))
                clients = [] if mesh.certificates is None else [describe_clients(mesh.certificates)]
                logged = f"Logs: {logs}. Ctrl-C stops everything."
                for line in (*clients, *access.lines(), logged):
                    console.print(line, highlight=False, soft_wrap=True, markup=False)
                if announce is not None:
                    announce(mesh.where.named(access))
                await mesh.until_broken()
    finally:
        shutil.rmtree(plan.folder, ignore_errors=True)
    return 0


def _describe(engine: Engine) -> str:
    cores = f", core {', '.join(map(str, engine.cores))}" if engine.cores else ""
    return f"SGLang at {engine.url}{cores}"
