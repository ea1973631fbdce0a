"""A client process of `bench fleet`: one rollout, with a record of its calls to the scheduler.

`python -m treadle_bench.fleet.load SCHEDULER JOB PROMPTS SAMPLES TOOL_SHARE RECORDS` runs the job's
rollout and, started again after a kill, goes on with it. All trajectories are opened before the
first step. Tools are waits of this process, of TOOL_SHARE times TOOL_S. RECORDS gets a line of JSON
a second: the calls that have ended (`Call`).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import uvloop
from treadle import Client, Prompt, RolloutEvent, Sampling, Trajectory
from treadle.scheduler.v1.scheduler_pb2 import OpenTrajectoryRequest, ScheduleStepRequest

PROMPT_TOKENS = 256
TURNS, GEN_TOKENS, OBSERVED_TOKENS = (6, 10), (48, 144), (16, 48)
TOOL_S = (9.0, 27.0)  # with these 6,400 trajectories would take 300 steps a second and more
START_S = (
    40.0  # over which first steps are spread, as the sidecars of all engines share these cores
)
TOKEN_INTERVAL_S = 2.0
RECORD_S = 1.0
LEAST_TOKEN, MOST_TOKEN = 3, 90_000
OPENING = -1


class Call(NamedTuple):
    """One attempt to open a trajectory (turn OPENING) or to get a ticket. Times are Unix times.
    lost: it names a ticket whose stream broke."""

    trajectory_id: str
    turn: int
    begun_s: float
    ended_s: float
    answered: bool
    lost: bool


class Turn(NamedTuple):
    """Tokens that are generated, and the tool's seconds and answer after them."""

    gen_tokens: int
    tool_s: float
    observed: list[int]


def prompt_of(job: str, number: int) -> Prompt:
    """A prompt of a job."""
    name = f"{job}-{number}"
    rng = random.Random(name)
    return Prompt(
        id=name, tokens=[rng.randrange(LEAST_TOKEN, MOST_TOKEN) for _ in range(PROMPT_TOKENS)]
    )


def turns_of(prompt_id: str, sample: int) -> list[Turn]:
    """What a trajectory does; the tool of the last turn is not called."""
    rng = random.Random(f"{prompt_id}/{sample}")
    return [
        Turn(
            rng.randint(*GEN_TOKENS),
            rng.uniform(*TOOL_S),
            [rng.randrange(LEAST_TOKEN, MOST_TOKEN) for _ in range(rng.randint(*OBSERVED_TOKENS))],
        )
        for _ in range(rng.randint(*TURNS))
    ]


async def act(trajectory: Trajectory, prompt: Prompt, tool_share: float) -> float:
    """Play a trajectory to its end; returns its reward."""
    turns = turns_of(prompt.id, trajectory.sample)
    for number, turn in enumerate(turns, start=1):
        async for _ in trajectory.generate(
            Sampling(max_new_tokens=turn.gen_tokens, ignore_eos=True)
        ):
            pass
        if number < len(turns):
            await asyncio.sleep(tool_share * turn.tool_s)
            trajectory.observe(turn.observed)
    return 1.0


class Recorder(grpc.aio.UnaryUnaryClientInterceptor):
    """Keeps the calls that are recorded until they are written."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        """Note when a call begins and ends."""
        if not isinstance(request, OpenTrajectoryRequest | ScheduleStepRequest):
            return await continuation(details, request)
        begun_s, answered = time.time(), False
        try:
            call = await continuation(details, request)
            answered = await call.code() is grpc.StatusCode.OK
            return call
        finally:
            turn, lost = OPENING, False
            if isinstance(request, ScheduleStepRequest):
                turn, lost = request.turn, bool(request.replaces_ticket_id)
            self.calls.append(
                Call(request.trajectory_id, turn, begun_s, time.time(), answered, lost)
            )


async def run(
    scheduler: str, job: str, prompts: int, samples: int, tool_share: float, records: Path
) -> None:
    """Run or go on with the rollout of a job. Raises TreadleError."""
    recorder, all_open, rng = Recorder(), asyncio.Event(), random.Random(job)
    opened = 0

    def note(event: RolloutEvent) -> None:
        nonlocal opened
        opened += event.kind == "opened"

    async def write() -> None:
        if await asyncio.to_thread(records.exists):  # this goes on with work that had begun
            all_open.set()
        while True:
            await asyncio.sleep(RECORD_S)
            if opened == prompts * samples:
                all_open.set()
            calls, recorder.calls = recorder.calls, []
            with records.open("a") as file:
                # the line before may be cut off by a kill
                file.write("\n" + json.dumps({"calls": calls}) + "\n")

    async def agent(trajectory: Trajectory, prompt: Prompt) -> float:
        await all_open.wait()
        await asyncio.sleep(tool_share * rng.uniform(0.0, START_S))
        return await act(trajectory, prompt, tool_share)

    client = Client(
        scheduler, interceptors=[recorder], job=job, resume=True, token_interval_s=TOKEN_INTERVAL_S
    )
    async with client:
        writing = asyncio.create_task(write())
        result = await client.rollout(
            [prompt_of(job, n) for n in range(prompts)], agent, samples, on_event=note
        )
        await asyncio.sleep(2 * RECORD_S)
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
    errors = [each.error for each in result.trajectories if each.error]
    with records.open("a") as file:
        file.write(json.dumps({"rollout_id": result.rollout_id, "errors": errors}) + "\n")


if __name__ == "__main__":
    address, job_name, *numbers, path = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            run(address, job_name, int(numbers[0]), int(numbers[1]), float(numbers[2]), Path(path))
        )
