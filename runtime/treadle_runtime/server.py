"""Run a service, or several in one process: start, serve, drain, exit code.

A service's `wire` gets a `Runtime` and returns what is to be served (`Wiring`). Order of a drain:
health NOT_SERVING, calls in flight finish (drain_grace_s at most), other servers end (the same),
background tasks end, accepted facts reach NATS, `close`, channels close, spans and metrics are
sent.

SIGTERM and SIGINT begin a drain and lead to exit code 0; a second signal ends the process at once.
A background task that fails begins one too. Each step of a drain has a time limit, and so has the
whole, so that a process which has begun to end does end. The handlers are on the event loop: a
plain `finally` in a coroutine never runs on SIGTERM.
"""

import asyncio
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import nats.errors
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from opentelemetry import trace
from treadle.certificates import Certificates

from treadle_runtime import probe
from treadle_runtime.bus import Bus, bus_name, open_bus, run_beside
from treadle_runtime.calls import CallTimes, Channels, Interceptor
from treadle_runtime.config import Settings, hide_passwords, read_settings
from treadle_runtime.errors import ErrorTable, StartError
from treadle_runtime.idempotency import RequestRecords
from treadle_runtime.identity import TenantLimits, server_credentials
from treadle_runtime.telemetry import Metrics, Tracing, configure_logging, configure_tracing

log = structlog.get_logger()

# gRPC refuses a message longer than its receive limit without naming field or limit. Its limit is
# this much higher, so that the interceptor can answer clearly.
RECEIVE_LIMIT_FACTOR = 4
LOWEST_RECEIVE_LIMIT_BYTES = 64 * 1024 * 1024
LAST_WORDS_S = (
    0.2  # once our calls are done only watches of health are left, and they never end by themselves
)
STEP_S = 10.0  # longest time of one step of a drain, beyond the grace of calls or facts
CLOSE_S = 30.0  # the same of a service's `close`, which may remove containers
WHOLE_DRAIN_S = 60.0  # the same of all steps together
START_FAILED_EXIT_CODE = 1
TASK_FAILED_EXIT_CODE = 3
DRAIN_OVERDUE_EXIT_CODE = 4
# the service name under which health is SERVING while the process runs, also where it stands by
ALIVE = "alive"
# Calls that may wait until Python takes them. By default gRPC cancels calls above a thousand, and
# thousands of clients open their trajectories at once, or repeat their calls at once after a
# restart.
WAITING_CALLS = ("grpc.server.max_pending_requests", "grpc.server.max_pending_requests_hard_limit")
MOST_CALLS = 1_000_000
SHORTEST_PING_MS = 1_000  # clients that follow the serving one of several processes ping each 2 s
OF_ALL = "runtime"  # in the names of gauges that each service has
KILLED_EXIT_CODE = 128  # plus the signal's number, as shells report it
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# For gc.set_threshold: so many objects are made and not freed before the youngest generation is
# collected, and so many collections of one generation come before one of the next older.
COLLECTIONS = (10_000, 10, 100)


@dataclass(frozen=True)
class Runtime:
    """Connections, settings and tools that the runtime gives to a service.

    nats: None for a service that does not use it (`Settings.uses_nats`). stopping: set when the
    drain begins. channel: returns the channel to an address (host:port) and the service there: one
    per address, closed at drain; deadline and trace are sent with each call. follow: the same for a
    service of several processes, of which one serves at a time. listening: resolves to the address
    at which the server listens. certificates: None in plaintext.
    """

    settings: Settings
    nats: Bus | None
    stopping: asyncio.Event
    channel: Callable[[str, str], grpc.aio.Channel]
    follow: Callable[[str, str], grpc.aio.Channel]
    tracing: Tracing
    metrics: Metrics
    listening: asyncio.Future[str]
    certificates: Certificates | None

    @property
    def bus(self) -> Bus:
        """Return the connection to NATS of a service that uses it."""
        assert self.nats is not None, "its settings say that it does not use NATS"
        return self.nats

    async def open_records(self) -> RequestRecords:
        """Open the records of this service's answers. Raises StartError."""
        try:
            return await RequestRecords.open(self.bus, self.settings.service)
        except nats.errors.Error as error:
            where = hide_passwords(self.settings.nats_url)
            raise StartError(f"JetStream at {where} does not hold records: {error!r}") from error


class Turn:
    """State of a process of a service of which one process serves and the others stand by.

    decided: set once this process serves, or knows that another one does. serves: whether its
    health is SERVING; false before `serve` and after `pause`. admit: awaited before each call; what
    it raises is the answer.
    """

    def __init__(self, admit: Callable[[], Awaitable[None]]) -> None:
        self.admit = admit
        self.decided, self.changed = asyncio.Event(), asyncio.Event()
        self.serves = False

    def serve(self) -> None:
        """Begin to serve, or go on after a pause."""
        self.serves = True
        self.decided.set()
        self.changed.set()

    def pause(self) -> None:
        """Stop serving for a while: callers go to another process, if one serves."""
        self.serves = False
        self.changed.set()


@dataclass(frozen=True)
class Wiring:
    """Servicers and tasks of a service, for the runtime to run.

    services: full service name → adds its servicer to the server. tasks: run beside the server,
    cancelled at drain; one that fails ends the process, so that one which works on many items
    contains the errors of each (`errors.contain`). servers: tasks that serve callers otherwise, and
    end once the drain has begun; `tasks` run until then. close: called after NATS is drained.
    errors: the service's core exceptions. turn: None where every process serves.
    """

    services: Mapping[str, Callable[[grpc.aio.Server], None]]
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    servers: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    close: Callable[[], Coroutine[Any, Any, None]] | None = None
    errors: ErrorTable = field(default_factory=dict)
    turn: Turn | None = None


Wire = Callable[[Runtime], Awaitable[Wiring]]


@dataclass(frozen=True)
class Serving:
    """Server that listens at `address` (host:port)."""

    address: str
    runtime: Runtime


@dataclass(frozen=True)
class Service:
    """Service as its package offers it to be run: the class of its settings, and its `wire`."""

    settings: type[Settings]
    wire: Wire


def run(*services: Service) -> None:
    """Read the settings, serve until a signal, drain, and return (exit code 0).

    Several services share this process and its event loop; each has its own port, settings and
    connections. Raises SystemExit where one of them cannot start or go on: the others drain.
    """
    hosted = [(read_settings(service.settings), service.wire) for service in services]
    configure_logging(hosted[0][0])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_signal(hosted))
    except ExceptionGroup as group:
        not_started, failed = group.split(StartError)
        if failed is not None:
            log.exception("a background task failed", exc_info=failed)
            raise SystemExit(TASK_FAILED_EXIT_CODE) from None
        for error in leaves(not_started):
            sys.stderr.write(f"{error}\n")
        raise SystemExit(START_FAILED_EXIT_CODE) from None


def leaves(group: BaseException | None) -> Iterator[BaseException]:
    """Yield the exceptions of a group and of the groups in it."""
    if isinstance(group, BaseExceptionGroup):
        for each in group.exceptions:
            yield from leaves(each)
    elif group is not None:
        yield group


class _Overdue:
    """Limit to the time that the end of this process takes, whatever hangs: a task, the event loop,
    or a thread that is waited for. limit_s: seconds from `start`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timer: threading.Timer | None = None

    def start(self, exit_code: int) -> None:
        """End the process with this code once the time is over; only the first call counts."""
        if self._timer is None:
            self._timer = threading.Timer(self._limit_s, self._end, (exit_code,))
            self._timer.daemon = True
            self._timer.start()

    def _end(self, exit_code: int) -> None:
        log.error("the drain takes too long: the process ends now", limit_s=self._limit_s)
        faulthandler.dump_traceback()
        os._exit(exit_code)


async def _serve_until_signal(hosted: Sequence[tuple[Settings, Wire]]) -> None:
    stop = asyncio.Event()
    overdue = _Overdue(max(3 * settings.drain_grace_s for settings, _ in hosted) + WHOLE_DRAIN_S)
    starting = {settings.service for settings, _ in hosted}
    loop = asyncio.get_running_loop()

    async def serve(settings: Settings, wire: Wire) -> None:
        structlog.contextvars.bind_contextvars(service=settings.service)
        tracing = configure_tracing(settings)
        if tracing.provider is not None:
            # of several services here, the provider of the first stays
            trace.set_tracer_provider(tracing.provider)
        try:
            # Without a signal before, the drain begins because a background task has failed.
            failed = partial(overdue.start, TASK_FAILED_EXIT_CODE)
            async with serving(settings, wire, tracing=tracing, on_drain=failed):
                starting.discard(settings.service)
                if not starting:
                    _tune_garbage_collection()
                await stop.wait()
        except StartError as error:
            raise StartError(f"treadle_{settings.service}: {error}") from error

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(KILLED_EXIT_CODE + number)
        log.info("signal", signal=signal.Signals(number).name)
        overdue.start(DRAIN_OVERDUE_EXIT_CODE)
        stop.set()
        for settings, _ in hosted:
            if settings.service in starting:
                log.info("stopped before it was up", service=settings.service)
                tasks[settings.service].cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    async with asyncio.TaskGroup() as group:
        tasks = {
            settings.service: group.create_task(serve(settings, wire)) for settings, wire in hosted
        }


def _tune_garbage_collection() -> None:
    """Leave the objects that exist now, most of them of imported modules, out of garbage
    collections, and make these rare. A full collection with them stops the loop of the tools
    service for 130 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


@asynccontextmanager
async def serving(
    settings: Settings,
    wire: Wire,
    *,
    tracing: Tracing | None = None,
    on_drain: Callable[[], object] = int,
) -> AsyncIterator[Serving]:
    """Serve for the time of the block, then drain: like `run`, without signals and process, e.g.
    for tests. on_drain: called when the drain begins, and again in its course.

    Raises StartError, and whatever a background task raises (in an ExceptionGroup).
    """
    certificates = _certificates(settings)
    tracing = tracing or configure_tracing(settings)
    metrics = Metrics(settings)
    stopping = asyncio.Event()
    times = [CallTimes(metrics)] if settings.otlp_endpoint else []
    channels = Channels(
        receive_limit_bytes(settings), [*tracing.client_interceptors(), *times], certificates
    )
    try:
        async with _connected(settings, tracing, certificates) as bus:
            listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            runtime = Runtime(
                settings,
                bus,
                stopping,
                channels.get,
                channels.follow,
                tracing,
                metrics,
                listening,
                certificates,
            )
            wiring = await wire(runtime)
            try:
                _measure(bus, metrics)
                async with (
                    run_beside([*wiring.tasks, metrics.watch]),
                    run_beside(wiring.servers),
                    _listening(runtime, wiring, on_drain) as address,
                ):
                    yield Serving(address, runtime)
            finally:
                on_drain()
                stopping.set()
                if bus is not None:
                    grace_s = settings.drain_grace_s
                    await _finish("the bus", bus.drain(grace_s), grace_s + STEP_S)
                if wiring.close is not None:
                    await _finish("the service", wiring.close(), CLOSE_S)
    finally:
        await _finish("channels", channels.close())
        await _finish("metrics", metrics.shutdown())
        await _finish("spans", tracing.shutdown())


async def _finish(what: str, work: Coroutine[Any, Any, None], limit_s: float = STEP_S) -> None:
    """Await a step of the drain for no longer than its limit, and raise what it raises. A step may
    refuse its cancellation, and is then left behind."""
    step = asyncio.get_running_loop().create_task(work)
    done, _ = await asyncio.wait({step}, timeout=limit_s)
    if done:
        await step
    else:
        log.error("a step of the drain did not end in time", step=what, limit_s=limit_s)
        step.cancel()


@asynccontextmanager
async def _connected(
    settings: Settings, tracing: Tracing, certificates: Certificates | None
) -> AsyncIterator[Bus | None]:
    if not settings.uses_nats:
        yield None
        return
    async with open_bus(
        settings.nats_url,
        bus_name(settings.service),
        timeout_s=settings.startup_timeout_s,
        tracer=tracing.tracer,
        facts_bytes=settings.facts_bytes,
        replicas=settings.nats_replicas,
        certificates=certificates,
    ) as bus:
        yield bus


def _measure(bus: Bus | None, metrics: Metrics) -> None:
    """Make the gauges of all services; alerts and dashboards know a service by them, also one that
    does not use NATS."""
    facts, answers = "Facts that NATS has not acknowledged", "1 while NATS answers, else 0"

    def connected() -> int:
        return int(bus is None or bus.connected)

    def outbox() -> int:
        return 0 if bus is None else bus.unacknowledged

    metrics.gauge("outbox", "fact", facts, outbox, of=OF_ALL)
    metrics.gauge("connected", "connection", answers, connected, of=OF_ALL)


@asynccontextmanager
async def _listening(
    runtime: Runtime, wiring: Wiring, on_drain: Callable[[], object]
) -> AsyncIterator[str]:
    settings, turn = runtime.settings, wiring.turn
    interceptor = Interceptor(
        domain=f"{settings.service}.treadle",
        errors=wiring.errors,
        max_message_bytes=settings.max_message_bytes,
        stopping=runtime.stopping,
        metrics=runtime.metrics,
        tracing=runtime.tracing.server_interceptor(),
        admit=None if turn is None else turn.admit,
        tenants=TenantLimits(settings.tenant_calls_per_s, settings.tenant_calls)
        if runtime.certificates
        else None,
    )
    server = grpc.aio.server(
        interceptors=[interceptor],
        options=[
            ("grpc.max_receive_message_length", receive_limit_bytes(settings)),
            # else gRPC closes connections that ping more often
            ("grpc.http2.min_ping_interval_without_data_ms", SHORTEST_PING_MS),
            # else a second server on the same port takes half of the calls, silently
            ("grpc.so_reuseport", 0),
            *((name, MOST_CALLS) for name in WAITING_CALLS),
        ],
    )
    for add in wiring.services.values():
        add(server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    # Only a server needs it, and it compiles its messages when it is imported: a tenth of a second.
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection(
        [*wiring.services, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    address = bind(server, settings.listen, runtime.certificates)
    await server.start()
    names = ("", *wiring.services)
    statuses: dict[str, str] = {}

    async def set_health(name: str, status: str) -> None:
        statuses[name] = status
        await healthy.set(name, health_pb2.HealthCheckResponse.ServingStatus.Value(status))

    async def report() -> None:
        for name in names:
            await set_health(
                name, probe.SERVING if turn is None or turn.serves else probe.NOT_SERVING
            )

    async def report_turn() -> None:
        """Report whether this process serves, at each change; a background task."""
        while turn is not None:
            await turn.changed.wait()
            turn.changed.clear()
            await report()

    async def report_nats() -> None:
        """Report whether NATS and its JetStream answer, at each change; a background task."""
        while (bus := runtime.nats) is not None:
            bus.changed.clear()
            await set_health(probe.NATS, probe.SERVING if bus.connected else probe.NOT_SERVING)
            await bus.changed.wait()

    await set_health(ALIVE, probe.SERVING)
    ready = Path(settings.ready_file) if settings.ready_file else None
    try:
        async with (
            probe.saying_health(
                settings.health_socket, lambda name: statuses.get(name, probe.UNKNOWN)
            ),
            run_beside([report_turn, report_nats]),
        ):
            runtime.listening.set_result(address)
            if turn is not None:
                await report()
                await turn.decided.wait()
            await report()
            if ready is not None:
                unfinished = ready.with_name(f"{ready.name}.{os.getpid()}")
                unfinished.write_text(json.dumps({"address": address, "pid": os.getpid()}) + "\n")
                unfinished.replace(ready)
            log.info("serving" if turn is None or turn.serves else "standing by", address=address)
            yield address
    finally:
        on_drain()
        log.info("draining", grace_s=settings.drain_grace_s)
        await healthy.enter_graceful_shutdown()
        runtime.stopping.set()
        grace_s = settings.drain_grace_s
        await _finish("calls", _stop(server, interceptor, grace_s), grace_s + STEP_S)
        if ready is not None:
            ready.unlink(missing_ok=True)


async def _stop(server: grpc.aio.Server, interceptor: Interceptor, grace_s: float) -> None:
    """Refuse new calls and let those in flight finish. Watches of health are not waited for."""
    async with asyncio.TaskGroup() as group:
        stop = group.create_task(server.stop(grace_s))
        idle = group.create_task(interceptor.idle.wait())
        await asyncio.wait((stop, idle), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((stop,), timeout=LAST_WORDS_S)
        if not stop.done():
            await server.stop(0)
        # A call cut at the end of the grace still runs its `finally` blocks.
        await idle


def receive_limit_bytes(settings: Settings) -> int:
    """Return gRPC's own limit for a message in either direction."""
    return max(RECEIVE_LIMIT_FACTOR * settings.max_message_bytes, LOWEST_RECEIVE_LIMIT_BYTES)


def _certificates(settings: Settings) -> Certificates | None:
    try:
        return Certificates(settings.tls_folder) if settings.tls_folder else None
    except ValueError as error:
        raise StartError(f"TREADLE_TLS_FOLDER: {error}") from None


def bind(server: grpc.aio.Server, listen: str, certificates: Certificates | None) -> str:
    """Have the server listen at host:port, in plaintext without certificates; return its address.
    Raises StartError."""
    try:
        if certificates is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, server_credentials(certificates))
    except RuntimeError as error:
        raise StartError(f"cannot listen on {listen}: {error}") from None
    if port == 0:
        raise StartError(f"cannot listen on {listen}: is the port taken?")
    return f"{listen.rpartition(':')[0]}:{port}"
