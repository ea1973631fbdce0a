"""Watch whether the mesh answers, and hold the client through which requests reach it while it
does.

A Visit is one time for which the mesh was there: its client, its sessions, and the calls that wait
for them. When the scheduler has not answered for `away_after_s`, or no engine is registered, the
visit ends: each waiting call receives `AWAY` at once and continues without the mesh. The client
closes as soon as the scheduler answers, so that its trajectories hold nothing for as long as its
lease would last. The next visit has a new client.

Invariants: whatever uses a visit's client ends with the visit, and nothing that happens to one
visit ends the watch.
"""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import grpc
import structlog
import treadle
from treadle.adapters.sessions import SWEEP_S, Sessions
from treadle.connection import finish
from treadle.scheduler.v1 import scheduler_pb2
from treadle_runtime.errors import contain

from treadle_gateway.order import Ended, Tokens

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

log = structlog.get_logger()

LOOK_S = 0.5  # between two looks at the mesh
COLLECTED_AFTER_S = (0.0, 5.0, 30.0)  # the garbage of a visit that is over
AWAY: Final = "away"  # put into the queues of a visit that has ended


@dataclass(frozen=True)
class NoWeights:
    """Reason why no engine can serve: all have refused the weights that are wanted. since_s: on the
    monotonic clock. is_overdue: so long ago that nobody has to wait any more."""

    reason: str
    since_s: float
    is_overdue: bool


Event = Tokens | Ended | NoWeights | BaseException | str


@dataclass(frozen=True)
class KnownEngine:
    """A registered engine. url: of its HTTP server; empty where its sidecar does not report it.
    address: of its sidecar. context_tokens: of the longest sequence that it takes. ranks: its
    processes in a trainer's process group. slots: steps that decode at once; 0: not known.
    draining: an operator wants it empty."""

    engine_id: str
    url: str
    address: str
    model: str
    weight_version: str
    context_tokens: int
    ranks: int
    slots: int
    draining: bool


class Visit:
    """One time for which the mesh is there. client: open, and closed by `run`."""

    def __init__(self, client: treadle.Client, sessions: Sessions) -> None:
        self.client, self.sessions = client, sessions
        self._over = asyncio.Event()
        self._queues: set[asyncio.Queue[Event]] = set()

    async def run(self, until_answered: Callable[[], Awaitable[object]]) -> None:
        """Close trajectories that will probably have no other turn; once the visit is over and
        `until_answered` returns, or this task is cancelled, close the client."""
        sweeping = asyncio.get_running_loop().create_task(self._sweep())
        try:
            await self._over.wait()
            sweeping.cancel()
            await until_answered()
        finally:
            sweeping.cancel()
            await finish(self._close(sweeping))

    def listen(self) -> asyncio.Queue[Event]:
        """Return a queue that receives AWAY when the visit ends; `leave` it."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._queues.add(queue)
        if self._over.is_set():
            queue.put_nowait(AWAY)
        return queue

    def leave(self, queue: asyncio.Queue[Event]) -> None:
        """Send nothing more to this queue."""
        self._queues.discard(queue)

    def send(self, event: Event) -> None:
        """Put an event into all queues."""
        for queue in self._queues:
            queue.put_nowait(event)

    def end(self) -> None:
        """Send AWAY to all queues."""
        self._over.set()
        self.send(AWAY)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            with contain("idle trajectories are not closed"):
                await self.sessions.sweep()

    async def _close(self, sweeping: "asyncio.Task[None]") -> None:
        """Close the client, which ends the calls of a sweep under way. A scheduler that cannot be
        reached closes its trajectories once its lease has ended."""
        try:
            await self.client.__aexit__(None, None, None)
        except treadle.TreadleError as error:
            log.warning("the client of an earlier visit was not closed in order", error=str(error))
        await asyncio.wait({sweeping})


class MeshLink:
    """Watches the mesh for as long as `watch` runs. visit: the present one, None while the mesh is
    away. engines: those that were registered when it was last there. no_weights: None while some
    engine has the weights that are wanted, or may get them; after `no_weights_s` of it, calls that
    wait are told. failed_pushes: the errors of pushes of a version that will not continue, by
    engine."""

    def __init__(
        self,
        scheduler: "SchedulerServiceAsyncStub",
        make_client: Callable[[], treadle.Client],
        make_sessions: Callable[[treadle.Client], Sessions],
        failed_pushes: Callable[[str], Mapping[str, str]],
        away_after_s: float,
        no_weights_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._make_client, self._make_sessions = make_client, make_sessions
        self._failed_pushes = failed_pushes
        self._away_after_s, self._no_weights_s = away_after_s, no_weights_s
        self.no_weights: NoWeights | None = None
        self._refused = ("", 0.0)  # version that engines have refused, and since when
        self.visit: Visit | None = None
        self.engines: dict[str, KnownEngine] = {}
        self.looked = asyncio.Event()  # once it is known whether the mesh is there
        self._answers = asyncio.Event()  # set while the scheduler answers

    @property
    def context_tokens(self) -> int:
        """Return the tokens of the longest sequence that some engine takes."""
        return max((engine.context_tokens for engine in self.engines.values()), default=0)

    def visits(self) -> int:
        """Return 1 while the mesh is there, else 0."""
        return int(self.visit is not None)

    async def watch(self) -> None:
        """Begin and end visits, as a background task; at its end, end the visit and close all
        clients."""
        seen_s = -self._away_after_s
        async with asyncio.TaskGroup() as visits:
            while True:
                there = False
                with contain("a look at the mesh"):
                    there = await self._look()
                if there:
                    seen_s = time.monotonic()
                    if self.visit is None:
                        self.visit = await self._begin(visits)
                    if self.visit and self.no_weights is not None and self.no_weights.is_overdue:
                        self.visit.send(self.no_weights)
                elif time.monotonic() - seen_s >= self._away_after_s and self.visit is not None:
                    log.warning(
                        "the mesh is away: requests go straight to the engines",
                        engines=len(self.engines),
                    )
                    visit, self.visit = self.visit, None
                    visit.end()
                self.looked.set()
                await asyncio.sleep(LOOK_S)

    async def _look(self) -> bool:
        try:
            answer = await self._scheduler.ListEngines(
                scheduler_pb2.ListEnginesRequest(), timeout=self._away_after_s
            )
        except grpc.aio.AioRpcError as error:
            log.debug("the scheduler does not answer", error=error.details())
            self._answers.clear()
            return False
        self._answers.set()
        found = {
            each.info.engine_id: KnownEngine(
                *(
                    each.info.engine_id,
                    each.info.url,
                    each.info.address,
                    each.info.model,
                    each.info.weight_version,
                ),
                *(each.info.max_context_tokens, max(1, each.info.tensor_parallel)),
                *(each.load.slot_limit, each.draining),
            )
            for each in answer.engines
        }
        if found:
            self.engines = found
            await self._look_at_weights()
        return bool(found)

    async def _look_at_weights(self) -> None:
        """Find out whether all engines have refused the weights that are wanted. An engine that
        tries them again still counts."""
        question = scheduler_pb2.GetWeightsRequest()
        try:
            answer = await self._scheduler.GetWeights(question, timeout=self._away_after_s)
        except grpc.aio.AioRpcError as error:
            log.debug("the scheduler does not say which weights are wanted", error=error.details())
            return
        weights, failed_pushes = answer.weights, self._failed_pushes(answer.weights.weight_version)
        errors = {each.engine_id: each.error for each in weights.engines if each.error}
        errors |= failed_pushes
        behind = {
            each.engine_id
            for each in weights.engines
            if each.state == scheduler_pb2.WEIGHTS_STATE_BEHIND
        }
        serve = {each.engine_id for each in weights.engines} - behind - errors.keys()
        known = self._refused[0] == weights.weight_version
        self.no_weights = None
        if serve or not weights.engines or (not known and behind - failed_pushes.keys()):
            self._refused = ("", 0.0)
            return
        if not errors:  # they try again
            return
        if not known:
            self._refused = (weights.weight_version, time.monotonic())
            log.warning("no engine has the wanted weights", version=weights.weight_version)
        said = "; ".join(f"{engine_id}: {error}" for engine_id, error in sorted(errors.items()))
        reason = (
            f"no engine could load weights {weights.weight_version!r} ({said}); load others, or "
            "these again once they can be read"
        )
        since_s = self._refused[1]
        overdue = time.monotonic() - since_s >= self._no_weights_s
        self.no_weights = NoWeights(reason, since_s, overdue)

    async def _begin(self, visits: asyncio.TaskGroup) -> Visit | None:
        """Begin a visit, which runs in `visits`; return None where no client can be made now, as
        while the files of its certificate are being replaced."""
        try:
            client = self._make_client()
            await client.__aenter__()
        except (ValueError, OSError, treadle.TreadleError) as error:
            log.warning("the mesh is there, but no client for it can be made", error=str(error))
            return None
        visit = Visit(client, self._make_sessions(client))
        visits.create_task(self._run(visit)).add_done_callback(_collect_garbage)
        log.info("the mesh is there", engines=len(self.engines))
        return visit

    async def _run(self, visit: Visit) -> None:
        try:
            with contain("a visit of the mesh"):
                await visit.run(self._answers.wait)
        finally:
            visit.end()
            self.visit = None if self.visit is visit else self.visit


def _collect_garbage(_: "asyncio.Task[None]") -> None:
    """Free the calls of a visit that is over, now and later: some are parts of cycles, each keeps
    its connection open, and a service collects garbage rarely. Requests of the visit that go on
    without the mesh hold some of its calls until they end."""
    for delay_s in COLLECTED_AFTER_S:
        asyncio.get_running_loop().call_later(delay_s, gc.collect)
