"""Rounds: a service holds GPUs for as long as it is asked, and other services' turns come in between.

A round is one action of the scheduler. What is asked of a service while it has a round joins it, up to what its server
takes at once, so that the server has batches; more begins another round, on other GPUs where some are free. A round
that others wait for takes nobody in after `turn_s`. Owns: the rounds. Invariant: GPUs are given back once nobody asks.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import nats.errors
from treadle_core.tools.action import GPUS, Action, Amdahl, Duration, Fixed, Knowledge, UnitSet
from treadle_core.tools.grants import SERVED, End, Ended, GpuGrant
from treadle_runtime.errors import TreadleError, Unavailable

from treadle_tools.background import Background
from treadle_tools.gpu.residents import Residents
from treadle_tools.gpu.servers import Gpus, GpuService, Server
from treadle_tools.scheduling.turns import Turn, Turns

RECENT_SHARE = 0.2  # of the newest round in the learned duration
RETRY_S = 2.0


@dataclass(eq=False)
class Round:
    """One action of a service. ready: the server, once it can be asked; or why it cannot."""

    service: GpuService
    ready: "asyncio.Future[Server]"
    asked: int = 0
    began_s: float | None = None
    closed: bool = False
    failed: bool = False
    empty: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class RoundSeat:
    """See judges.endpoints.Seat."""

    url: str
    round: Round

    def failed(self) -> None:
        """It did not answer: whoever comes next is not sent there unseen."""
        self.round.failed = self.round.closed = True


class Rounds:
    """See the module. numbers: of actions, ascending over all that share the turns."""

    def __init__(
        self, gpus: Gpus, turns: Turns, residents: Residents, background: Background, numbers: Iterator[int]
    ) -> None:
        self._gpus = gpus
        self._services = {service.name: service for service in gpus.services}
        self._servers = {(one.service, one.degree, one.node, one.first): one for one in gpus.servers}
        self._turns = turns
        self._residents = residents
        self._background = background
        self._numbers = numbers
        self._rounds: dict[str, list[Round]] = {name: [] for name in self._services}
        self._single_gpu_s: dict[str, float] = {}

    @asynccontextmanager
    async def seat(self, service: str) -> AsyncIterator[RoundSeat]:
        """A place to ask `service`, for one request. Raises Unavailable, ResourceExhausted."""
        joined = self._joined(self._services[service])
        joined.asked += 1
        try:
            server = await asyncio.shield(joined.ready)
            yield RoundSeat(server.url, joined)
        finally:
            joined.asked -= 1
            if joined.asked == 0:
                joined.closed = True
                joined.empty.set()

    def _joined(self, service: GpuService) -> Round:
        for one in self._rounds[service.name]:
            if not one.closed and one.asked < service.at_once and not self._is_over(one):
                return one
        begun = Round(service, asyncio.get_running_loop().create_future())
        begun.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._rounds[service.name].append(begun)
        self._background.spawn(self._run(begun))
        return begun

    def _is_over(self, one: Round) -> bool:
        """Whether it has lasted long enough, and others wait."""
        lasted_s = 0.0 if one.began_s is None else time.monotonic() - one.began_s
        return lasted_s > self._gpus.turn_s and self._turns.dispatcher.waiting_for().get(GPUS, 0) > 0

    async def _run(self, one: Round) -> None:
        """Never raises: what goes wrong is said to those who wait for it."""
        try:
            async with self._turns.hold(self._action(one.service)) as turn:
                if one.asked:
                    await self._serve(one, turn)
                else:
                    turn.ended = Ended(End.ABANDONED)
        except (TreadleError, nats.errors.Error) as error:
            self._say(one, error)
        finally:
            one.closed = True
            self._rounds[one.service.name].remove(one)
            if not one.ready.done():
                one.ready.cancel()

    async def _serve(self, one: Round, turn: Turn) -> None:
        grant = turn.started.grant.gpu
        assert grant is not None  # its action asks for GPUs
        assert grant.service is not None
        server = self._servers[one.service.name, grant.service.degree, grant.chunk.node_id, grant.chunk.first]
        try:
            await self._residents.bring(server, self._evicted(grant))
        except (Unavailable, nats.errors.Error) as error:
            turn.ended = Ended(End.FAILED)
            self._residents.left(server, failed=True)
            self._say(one, error)
            return
        one.began_s = time.monotonic()
        one.ready.set_result(server)
        await one.empty.wait()
        self._residents.left(server, failed=one.failed)
        turn.ended = Ended(End.FAILED) if one.failed else SERVED
        if not one.failed:
            self._learn(one, grant.service.degree)

    def _evicted(self, grant: GpuGrant) -> list[Server]:
        return [
            self._servers[resident.service.name, resident.service.degree, resident.chunk.node_id, resident.chunk.first]
            for resident in grant.evicted
        ]

    def _action(self, service: GpuService) -> Action:
        number = next(self._numbers)
        degrees = tuple(sorted(service.bytes_per_gpu))
        known_s = self._single_gpu_s.get(service.name)
        return Action(
            f"round-{number}",
            f"round-{number}",
            number,
            {GPUS: Fixed(degrees[0]) if len(degrees) == 1 else UnitSet(degrees)},
            Duration(Knowledge.UNKNOWN) if known_s is None else Duration(Knowledge.LEARNED, known_s),
            key=GPUS,
            elasticity=Amdahl(service.serial_share),
            service=service.name,
        )

    def _learn(self, one: Round, degree: int) -> None:
        assert one.began_s is not None
        speedup = Amdahl(one.service.serial_share).efficiency(degree) * degree
        newest_s = max(time.monotonic() - one.began_s, 1e-6) * speedup
        known_s = self._single_gpu_s.setdefault(one.service.name, newest_s)
        self._single_gpu_s[one.service.name] = known_s + RECENT_SHARE * (newest_s - known_s)

    @staticmethod
    def _say(one: Round, error: Exception) -> None:
        if one.ready.done():
            return
        if not isinstance(error, TreadleError):
            error = Unavailable("GPU_SERVICE_UNAVAILABLE", f"NATS does not answer: {error!r}", retry_after_s=RETRY_S)
        one.ready.set_exception(error)


class ServiceEndpoints:
    """A judge's endpoint that is a GPU service; see judges.endpoints.Endpoints."""

    def __init__(self, rounds: Rounds, service: str) -> None:
        self._rounds = rounds
        self._service = service

    def seat(self) -> AbstractAsyncContextManager[RoundSeat]:
        """See Endpoints."""
        return self._rounds.seat(self._service)
