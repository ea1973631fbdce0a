"""Which openings are tried again, how often, and when no longer."""

import time
from dataclasses import replace

import pytest
from treadle_runtime.errors import Unavailable
from treadle_tools.builtin import FROZEN_LAKE
from treadle_tools.sessions import Opening, open_with_retries
from treadle_tools.tool import Result, Status

OPENING = Opening(FROZEN_LAKE, {}, FROZEN_LAKE.limits, "t", "r", "j")
OK = Result(Status.OK, output="here")
CRASHED = Result(Status.CRASHED, error="killed by SIGKILL", alive=False)
TIMED_OUT = Result(Status.TIMED_OUT, error="stopped after 10 s", alive=False)
NOT_READY = Unavailable("TOOL_NOT_READY", "no worker", retry_after_s=1.0)


class Attempts:
    """Outcomes in their order."""

    def __init__(self, *outcomes: Result | Unavailable) -> None:
        self._outcomes = list(outcomes)
        self.made = 0

    async def __call__(self) -> Result:
        self.made += 1
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Unavailable):
            raise outcome
        return outcome


@pytest.mark.parametrize("lost", [CRASHED, TIMED_OUT, NOT_READY])
async def test_an_environment_that_is_lost_is_opened_again(lost: Result | Unavailable) -> None:
    attempts = Attempts(lost, lost, OK)
    assert await open_with_retries(OPENING, attempts, (0.0, 0.0)) == OK
    assert attempts.made == 3


@pytest.mark.parametrize(
    "refusal",
    [
        Result(Status.TOOL_ERROR, error="ValueError", alive=False),
        Result(Status.TOOL_ERROR, invalid=("task", "unknown"), alive=False),
        Result(Status.OUT_OF_MEMORY, alive=False),
        Result(Status.OK, done=True, alive=False),
    ],
)
async def test_one_that_refuses_is_not(refusal: Result) -> None:
    attempts = Attempts(refusal)
    assert await open_with_retries(OPENING, attempts, (0.0, 0.0)) == refusal
    assert attempts.made == 1


async def test_the_last_try_is_the_answer() -> None:
    attempts = Attempts(CRASHED, NOT_READY, TIMED_OUT)
    assert await open_with_retries(OPENING, attempts, (0.0, 0.0)) == TIMED_OUT
    attempts = Attempts(CRASHED, CRASHED, NOT_READY)
    with pytest.raises(Unavailable):
        await open_with_retries(OPENING, attempts, (0.0, 0.0))


async def test_nothing_is_tried_after_the_callers_time() -> None:
    short = replace(OPENING, ends_at=time.monotonic() + 1.0)
    attempts = Attempts(CRASHED)
    assert await open_with_retries(short, attempts, (60.0,)) == CRASHED
    with pytest.raises(Unavailable):
        await open_with_retries(short, Attempts(NOT_READY), (60.0,))
