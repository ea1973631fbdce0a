"""Share GPUs among services: a service gets them for a round, and rounds of other services come in
between.

A round is one action of the scheduler. Requests to a service join its round, up to what its server
takes at once, so that the server has batches; more requests begin another round, on other GPUs
where some are free. A round that others wait for accepts no request after `turn_s`. Invariant: GPUs
are given back once no request uses them.

Before a round the server's memory is brought onto the GPUs, and that of others off them. SGLang
leaves two things to its caller: a release while anything runs, or a resume of what is not released,
ends the server's scheduler (an assertion, a KeyError). So the cache is flushed first, which is
refused while anything runs; and the `Ledger` keeps the state, which no endpoint reports. A server
that was started anew is known by the time that its start took.
"""

import asyncio
import enum
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats.errors
import structlog
from nats.js.kv import KeyValue
from pydantic import TypeAdapter
from treadle_core.tools.action import GPUS, Action, Amdahl, Fixed, UnitSet
from treadle_core.tools.arrangement import Chunk
from treadle_core.tools.grants import SERVED, End, Ended, Service
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import kv_key
from treadle_runtime.errors import TreadleError, Unavailable
from treadle_runtime.http.sglang import (
    EngineClient,
    EngineLost,
    EngineRefused,
    Limits,
    open_session,
)

from treadle_tools.actions import ActionScheduler, Background, RunningAction
from treadle_tools.remote import Declarations, GpuService, Server
from treadle_tools.resources import UNORDERED, RecentMeans

BUCKET = "treadle-tools-gpus"

IDLE_WAIT_S = 20.0  # for the last requests to end before a release
# 140 GB over PCIe take seconds, a busy host some more.
LIMITS = Limits(connect_s=2.0, load_s=120.0)
RETRY_S = 1.0

log = structlog.get_logger()


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
    residents: "Residents"
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


class Residents:
    """Changes which servers hold GPU memory. Owns a lock for each server.

    Invariants: from `bring` until the next call for the same GPUs, no further memory of them is
    taken; a server is resumed only where it is known to be released since its last start; one whose
    last change was cut short is left alone until it is started anew.
    """

    def __init__(self, servers: Sequence[Server], memory: "EngineMemory", ledger: "Ledger") -> None:
        self._servers = servers
        self._memory = memory
        self._ledger = ledger
        self._locks = {server.url: asyncio.Lock() for server in servers}
        # Servers whose entry in the ledger is from before a restart of this service or a failure.
        self._doubted = {server.url for server in servers}
        self._wanted: set[str] = set()  # servers that serve, or are about to

    async def bring(self, server: Server, evict: Sequence[Server]) -> None:
        """Bring `server` into memory, and return once it takes requests.

        evict: servers on its GPUs that have to release their memory for it.

        Raises EngineAway, EngineTrouble, nats.errors.Error.
        """
        self._wanted.add(server.url)
        # Servers of its GPUs that may hold memory unknown to the scheduler release theirs too.
        unknown = [
            one
            for one in self._servers
            if one.gpus & server.gpus and one.url in self._doubted - self._wanted
        ]
        going = {one.url: one for one in (*evict, *unknown)}.values()
        ended = await asyncio.gather(
            *(self._change(one, State.RELEASED) for one in going), return_exceptions=True
        )
        for problem in ended:
            if problem is not None:
                raise problem
        await self._change(server, State.HELD)

    def leave(self, server: Server, *, failed: bool) -> None:
        """Note that nobody uses a server any more. failed: whether it did not answer as it
        should."""
        self._wanted.discard(server.url)
        if failed:
            self._doubted.add(server.url)

    async def watch(self, period_s: float) -> None:
        """Release servers that come up while nobody wants them, for ever: others could not use
        their GPUs."""
        while True:
            for server in self._servers:
                try:
                    if server.url not in self._wanted and await self._may_hold_memory(server.url):
                        await self._change(server, State.RELEASED)
                except (Unavailable, nats.errors.Error) as error:
                    log.warning("a GPU server is not released", server=server.url, why=str(error))
            await asyncio.sleep(period_s)

    async def _may_hold_memory(self, url: str) -> bool:
        """Return whether a server's state is in doubt, as that of a released server is once it is
        started anew."""
        entry = self._ledger.get(url)
        if url not in self._doubted and entry is not None and entry.state is State.RELEASED:
            try:
                is_same = await self._memory.identity(url) == entry.identity
            except EngineAway:
                is_same = False  # its next start will take memory
            if not is_same:
                self._doubted.add(url)
        return url in self._doubted

    async def _change(self, server: Server, wanted: "State") -> None:
        """Make the change to its end, also where the caller is cancelled: a change that is cut
        short leaves the state unknown."""
        change = asyncio.ensure_future(self._bring_into(server.url, wanted))
        cancelled: asyncio.CancelledError | None = None
        while not change.done():
            try:
                await asyncio.wait((change,))
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            change.exception()
            raise cancelled
        change.result()

    async def _bring_into(self, url: str, wanted: "State") -> None:
        async with self._locks[url]:
            if wanted is State.RELEASED and url in self._wanted:
                return  # a round has requested it in between
            entry = self._ledger.get(url)
            if url not in self._doubted and entry is not None and entry.state is wanted:
                return
            try:
                identity = await self._memory.identity(url)
            except EngineAway:
                self._doubted.add(url)
                if wanted is State.RELEASED:
                    return  # what does not run holds nothing
                raise
            if entry is None or entry.identity != identity:
                entry = Entry(identity, State.HELD)  # a server that starts takes its memory
            if entry.state is State.CHANGING:
                why = f"{url} was cut short as it released or resumed its memory: start it anew"
                raise EngineTrouble("ENGINE_UNSURE", why)
            if entry.state is not wanted:
                await self._ledger.put(url, Entry(identity, State.CHANGING))
                change = self._memory.resume if wanted is State.HELD else self._memory.release
                await change(url)
            await self._ledger.put(url, Entry(identity, wanted))
            self._doubted.discard(url)


class State(enum.StrEnum):
    """State of a server's GPU memory. The values are stored."""

    HELD = "held"
    RELEASED = "released"
    CHANGING = "changing"


@dataclass(frozen=True)
class Entry:
    """State of one server's GPU memory as the ledger stores it.

    identity: of the start of the server in which it has this state.

    The fields are stored: names are only added.
    """

    identity: str
    state: State


STORED = TypeAdapter(Entry)


class Ledger:
    """Keeps each server's state in a JetStream bucket across restarts of this service, one key a
    server.

    `changing` is written before a change, the new state after it: a restart that finds `changing`
    knows neither.
    """

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket
        self._entries: dict[str, Entry] = {}

    async def load(self) -> None:
        """Read the entries that were written before a restart."""
        for entry in await entries_of(self._bucket):
            self._entries[entry.key] = STORED.validate_json(entry.value or b"")

    def get(self, url: str) -> Entry | None:
        """Return the entry of a server; None where it was never seen."""
        return self._entries.get(kv_key(url))

    async def put(self, url: str, entry: Entry) -> None:
        """Store a server's entry, and return once it is on disk. Raises nats.errors.Error."""
        key = kv_key(url)
        if self._entries.get(key) != entry:
            await self._bucket.put(key, STORED.dump_json(entry))
            self._entries[key] = entry


class EngineAway(Unavailable):
    """No server answers at this address."""


class EngineTrouble(Unavailable):
    """The server answers, and does not do as it should; the message gives the remedy."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message, retry_after_s=RETRY_S)


class EngineMemory:
    """Has SGLang servers release their GPU memory to the host and resume it.

    Owns the connections.
    """

    def __init__(self) -> None:
        self._session = open_session()

    async def close(self) -> None:
        """Break off requests under way."""
        await self._session.close()

    async def identity(self, url: str) -> str:
        """Return a text that differs after each start of the server.

        Raises EngineAway; EngineTrouble for a server that would lose its weights.
        """
        async with self._calling(url) as server:
            info = await server.server_info()
        saves = bool(info.get("enable_memory_saver"))
        if saves and not info.get("enable_weights_cpu_backup"):
            why = (
                f"{url} would resume without its weights: start it with --enable-weights-cpu-backup"
            )
            raise EngineTrouble("ENGINE_LOSES_WEIGHTS", why)
        start = [info.get("startup_time"), info.get("random_seed"), saves]
        return hashlib.blake2b(
            json.dumps(start, sort_keys=True).encode(), digest_size=8
        ).hexdigest()

    async def release(self, url: str) -> None:
        """Release a server's GPU memory, and return once it is free.

        Raises EngineAway, EngineTrouble where it does not become idle.
        """
        async with self._calling(url) as server:
            await server.flush_cache(IDLE_WAIT_S)
            await server.release_memory()

    async def resume(self, url: str) -> None:
        """Resume a server's GPU memory, and return once it takes requests.

        The memory must have been released. Raises EngineAway, EngineTrouble.
        """
        async with self._calling(url) as server:
            await server.resume_memory()

    @asynccontextmanager
    async def _calling(self, url: str) -> AsyncIterator[EngineClient]:
        try:
            yield EngineClient(url, self._session, LIMITS)
        except EngineLost as error:
            if error.loss == "silent":
                raise EngineTrouble("ENGINE_SILENT", str(error)) from error
            if error.loss == "garbled":
                raise EngineTrouble("ENGINE_REFUSED", str(error)) from error
            raise EngineAway("ENGINE_AWAY", str(error), retry_after_s=RETRY_S) from error
        except EngineRefused as error:
            why = f"the engine at {url} refused (HTTP {error.status}): {error}"
            raise EngineTrouble("ENGINE_REFUSED", why) from error
