"""Run `treadle drain`: empty an engine of a running mesh, so that it can be stopped, and use it
again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import grpc.aio
import typer
from rich.console import Console
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_fixed
from treadle.scheduler.v1 import scheduler_pb2 as pb

from treadle_cli import exits
from treadle_cli.exits import UsageProblem, cell
from treadle_cli.options import DEFAULT_SCHEDULER, AsJson, Scheduler, choose_console, print_json
from treadle_cli.resources.plan import is_away

if TYPE_CHECKING:
    from rich.status import Status
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

CALL_S = 10.0
AWAY_S = 60.0  # how long to wait for a scheduler that restarts
LOOK_S = 0.5  # between two looks at how many trajectories are left
CORRECTABLE = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
)

Answer = TypeVar("Answer")


def drain(
    engine: Annotated[
        str, typer.Argument(help="Id of a registered engine, as `treadle top` shows it.")
    ],
    scheduler: Scheduler = DEFAULT_SCHEDULER,
    undo: Annotated[bool, typer.Option("--undo", help="Use the engine again.")] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Do not wait until the engine is empty.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send an engine no more steps and move its trajectories to others, then wait until it is
    empty. Its running steps end there. Ctrl-C ends the wait and not the drain, which holds until
    --undo."""
    console = choose_console(as_json)
    exits.run(lambda _: run_drain(engine, scheduler, undo, not no_wait, as_json, console))


async def run_drain(
    engine: str, scheduler: str, undo: bool, waits: bool, as_json: bool, out: Console
) -> int:
    """Drain, or end a drain, and print how many trajectories are left. Raises UsageProblem,
    TreadleError."""
    from treadle.errors import TreadleError

    from treadle_cli.mesh.scheduler import reach_scheduler

    request = pb.DrainEngineRequest(request_id=uuid.uuid4().hex, engine_id=engine, undo=undo)
    try:
        async with reach_scheduler(scheduler) as stub:
            with out.status(f"{engine}: waiting") as status:
                left = (
                    await _answer(lambda: stub.DrainEngine(request, timeout=CALL_S), engine, status)
                ).trajectories
                if left and waits and not undo:
                    await _until_empty(stub, engine, status)
                    left = 0
    except TreadleError as error:
        raise (UsageProblem(error.message) if error.code in CORRECTABLE else error) from None
    if as_json:
        print_json({"engine": engine, "draining": not undo, "trajectories": left})
    elif undo:
        out.print(f"{engine} takes steps again", highlight=False, markup=False)
    else:
        state = (
            f"{left} trajectories are still there"
            if left
            else "it is empty: stop it, or use it again with --undo"
        )
        out.print(f"{engine} gets no more steps; {state}", highlight=False, markup=False)
    return 0


async def _until_empty(stub: SchedulerServiceAsyncStub, engine: str, status: Status) -> None:
    """Return once no trajectory is there, or the engine is gone. Raises UsageProblem where somebody
    ends the drain, and AioRpcError as `_answer` does."""
    while True:
        listed = await _answer(
            lambda: stub.ListEngines(pb.ListEnginesRequest(), timeout=CALL_S), engine, status
        )
        found = next((each for each in listed.engines if each.info.engine_id == engine), None)
        if found is None:
            return
        if not found.draining:
            raise UsageProblem(f"the drain of {engine} was ended meanwhile: it takes steps again")
        if not found.trajectories:
            return
        steps = found.load.running_steps + found.load.waiting_steps
        status.update(
            cell(
                f"{engine}: {found.trajectories} trajectories are left, {steps} of their steps "
                "run or wait"
            )
        )
        await asyncio.sleep(LOOK_S)


async def _answer(call: Callable[[], Awaitable[Answer]], engine: str, status: Status) -> Answer:
    """Return the scheduler's answer; repeat the call while it restarts. Raises AioRpcError where it
    refuses, or is away for AWAY_S."""

    def show_wait(_: RetryCallState) -> None:
        status.update(f"{engine}: waiting for the scheduler, which does not answer")

    retrying = AsyncRetrying(
        retry=retry_if_exception(is_away),
        stop=stop_after_delay(AWAY_S),
        wait=wait_fixed(LOOK_S),
        before_sleep=show_wait,
        reraise=True,
    )

    async def attempt() -> Answer:  # tenacity does not await what a lambda returns
        return await call()

    return await retrying(attempt)
