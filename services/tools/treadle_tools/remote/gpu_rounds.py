"""Share GPUs among services: a service gets them for a round, and rounds of other services come in
between.

A round is one action of the scheduler. Requests to a service join its round, up to what its server
takes at once, so that the server has batches; more requests begin another round, on other GPUs
where some are free. A round that others wait for accepts no request after `turn_s`. Invariant: GPUs
are given back once no request uses them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats.errors
from treadle_core.tools.action import GPUS, Action, Amdahl, Fixed, UnitSet
from treadle_core.tools.arrangement import Chunk
from treadle_core.tools.grants import SERVED, End, Ended, Service
from treadle_runtime.errors import TreadleError, Unavailable

from treadle_tools.background import Background
from treadle_tools.remote.declarations import Declarations, GpuService, Server
from treadle_tools.remote.gpu_servers import Residents
from treadle_tools.scheduling.actions import ActionScheduler, RunningAction
from treadle_tools.scheduling.resources import UNORDERED, RecentMeans

RETRY_S = 1.0


@dataclass(eq=False)
class Round:
    """One action of a service. ready: the server, once it takes requests; or why it takes none."""

    service: GpuService
    ready: "asyncio.Future[Server]"
    asked: int = 0
    began_s: float | None = None
    closed: bool = False
    broken: bool = False
    empty: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Return the address of the round's server, once it is ready."""
        return self.ready.result().url

    def failed(self) -> None:
        """Note that the server did not answer: no further request joins, and the next round looks
        at its state first."""
        self.broken = True
        self.closed = True


@dataclass(eq=False)
class Rounds:
    """All rounds of all GPU services.

    numbers: of actions, each once over all users of the scheduler.
    """

    declared: Declarations
    scheduler: ActionScheduler
    residents: Residents
    background: Background
    numbers: Iterator[int]
    _single_gpu_s: RecentMeans = field(default_factory=RecentMeans, init=False)

    def __post_init__(self) -> None:
        services = self.declared.gpu_service
        self._services = {service.name: service for service in services}
        self._servers = {
            (service.name, one.degree, one.node, one.first): one
            for service in services
            for one in service.servers
        }
        self._rounds: dict[str, list[Round]] = {name: [] for name in self._services}

    @asynccontextmanager
    async def join(self, service: str) -> AsyncIterator[Round]:
        """Hold a place in a round of `service`, for one request.

        Raises Unavailable, ResourceExhausted.
        """
        joined = self._open_round(self._services[service])
        joined.asked += 1
        try:
            await asyncio.shield(joined.ready)
            yield joined
        finally:
            joined.asked -= 1
            if joined.asked == 0:
                joined.closed = True
                joined.empty.set()

    def _open_round(self, service: GpuService) -> Round:
        for one in self._rounds[service.name]:
            if not one.closed and one.asked < service.at_once and not self._is_over(one):
                return one
        begun = Round(service, asyncio.get_running_loop().create_future())
        begun.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._rounds[service.name].append(begun)
        self.background.spawn(self._run(begun))
        return begun

    def _is_over(self, one: Round) -> bool:
        """Return whether the round has lasted long enough, and others wait."""
        lasted_s = 0.0 if one.began_s is None else time.monotonic() - one.began_s
        assert self.declared.gpus is not None  # where there are services
        return (
            lasted_s > self.declared.gpus.turn_s
            and self.scheduler.dispatcher.waiting_for().get(GPUS, 0) > 0
        )

    async def _run(self, one: Round) -> None:
        """Run a round. Never raises: an error is raised in those who wait for the round."""
        try:
            async with self.scheduler.hold(self._action(one.service), "") as running:
                if one.asked:
                    await self._serve(one, running)
                else:
                    running.ended = Ended(End.ABANDONED)
        except (TreadleError, nats.errors.Error) as error:
            _fail(one, error)
        finally:
            one.closed = True
            self._rounds[one.service.name].remove(one)
            if not one.ready.done():
                one.ready.cancel()

    async def _serve(self, one: Round, running: RunningAction) -> None:
        grant = running.started.grant.gpu
        assert grant is not None  # its action requests GPUs
        assert grant.service is not None
        server = self._server_on(grant.service, grant.chunk)
        evicted = [self._server_on(other.service, other.chunk) for other in grant.evicted]
        try:
            await self.residents.bring(server, evicted)
        except (Unavailable, nats.errors.Error) as error:
            running.ended = Ended(End.FAILED)
            self.residents.leave(server, failed=True)
            _fail(one, error)
            return
        one.began_s = time.monotonic()
        one.ready.set_result(server)
        await one.empty.wait()
        failed = one.broken
        self.residents.leave(server, failed=failed)
        running.ended = Ended(End.FAILED) if failed else SERVED
        if not failed:
            lasted_s, degree = max(time.monotonic() - one.began_s, 1e-6), grant.service.degree
            newest_s = lasted_s * Amdahl(one.service.serial_share).efficiency(degree) * degree
            self._single_gpu_s.add(one.service.name, newest_s)

    def _server_on(self, service: Service, chunk: Chunk) -> Server:
        return self._servers[service.name, service.degree, chunk.node_id, chunk.first]

    def _action(self, service: GpuService) -> Action:
        action_id = f"round-{next(self.numbers)}"
        degrees = tuple(sorted(service.bytes_per_gpu))
        return Action(
            action_id,
            action_id,
            UNORDERED,
            {GPUS: Fixed(degrees[0]) if len(degrees) == 1 else UnitSet(degrees)},
            self._single_gpu_s.get(service.name),
            key=GPUS,
            elasticity=Amdahl(service.serial_share),
            service=service.name,
        )


def _fail(one: Round, error: Exception) -> None:
    if one.ready.done():
        return
    if not isinstance(error, TreadleError):
        error = Unavailable(
            "GPU_SERVICE_UNAVAILABLE", f"NATS does not answer: {error!r}", retry_after_s=RETRY_S
        )
    one.ready.set_exception(error)
