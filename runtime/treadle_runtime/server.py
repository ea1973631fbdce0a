"""One service, one process: signals, event loop, exit code.

SIGTERM and SIGINT begin a drain and lead to exit code 0; a second signal ends the process at once. The handlers stand
on the event loop: a plain `finally` in a coroutine never runs on SIGTERM. A service that cannot start says so in one
line.
"""

import asyncio
import os
import signal
import sys

import structlog
import uvloop
from opentelemetry import trace

from treadle_runtime.config import Settings
from treadle_runtime.errors import StartError
from treadle_runtime.lifecycle import Runtime, Serving, Wire, Wiring, serving
from treadle_runtime.telemetry import configure_logging, configure_tracing

__all__ = ["Runtime", "Serving", "Wire", "Wiring", "run", "serving"]

log = structlog.get_logger()

START_FAILED_EXIT_CODE = 1
TASK_FAILED_EXIT_CODE = 3
KILLED_EXIT_CODE = 128  # plus the signal's number, as shells say it
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(settings: Settings, wire: Wire) -> None:
    """Serve until a signal, drain, return (exit code 0). Raises SystemExit where the service cannot start or go on."""
    configure_logging(settings)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_main(settings, wire))
    except ExceptionGroup as group:
        log.exception("a background task failed", exc_info=group)
        raise SystemExit(TASK_FAILED_EXIT_CODE) from None
    except StartError as error:
        sys.stderr.write(f"treadle_{settings.service}: {error}\n")
        raise SystemExit(START_FAILED_EXIT_CODE) from None


async def _main(settings: Settings, wire: Wire) -> None:
    stop, started = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(KILLED_EXIT_CODE + number)
        log.info("signal", signal=signal.Signals(number).name)
        stop.set()
        if not started.is_set():
            main.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    tracing = configure_tracing(settings)
    if tracing.provider is not None:
        trace.set_tracer_provider(tracing.provider)
    try:
        async with serving(settings, wire, tracing=tracing):
            started.set()
            await stop.wait()
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        log.info("stopped before it was up")
