"""What is tried again, and when."""

import asyncio
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle.connection import RetryPolicy, finish
from treadle.errors import TreadleError

CODE = grpc.StatusCode


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_wait_lies_between_half_and_the_whole_of_its_step_and_never_above_the_longest(
    attempt: int, draw: float
) -> None:
    policy = RetryPolicy(first_delay_s=0.05, growth=2.0, max_delay_s=2.0)
    delay_s = policy.delay_s(attempt, draw, None)
    whole = min(0.05 * 2.0 ** min(attempt, 32), 2.0)
    assert whole / 2 <= delay_s <= whole


def test_the_servers_wish_is_a_lower_bound_of_the_wait() -> None:
    assert RetryPolicy().delay_s(0, 0.0, 7.0) == 7.0
    assert RetryPolicy(first_delay_s=1.0).delay_s(0, 0.0, 0.1) == 0.5


@pytest.mark.parametrize(
    ("code", "message", "details", "again"),
    [
        (CODE.UNAVAILABLE, "connection refused", None, True),
        (CODE.UNAVAILABLE, "", {"reason": "NO_ENGINE"}, True),
        (CODE.RESOURCE_EXHAUSTED, "", {"reason": "QUEUE_FULL", "retry_after_s": 0.1}, True),
        (CODE.RESOURCE_EXHAUSTED, "Received message larger than max", None, False),
        (CODE.INTERNAL, "Received RST_STREAM with error code 2", None, True),
        (CODE.INTERNAL, "RST_STREAM", {"reason": "INTERNAL"}, False),
        (CODE.INTERNAL, "Exception deserializing response!", None, False),
        (CODE.UNKNOWN, "Stream removed", None, True),
        (CODE.UNKNOWN, "Unexpected <class 'KeyError'>", None, False),
        (CODE.CANCELLED, "", None, True),
        (CODE.DEADLINE_EXCEEDED, "Deadline Exceeded", None, False),
        (CODE.INVALID_ARGUMENT, "", None, False),
        (CODE.FAILED_PRECONDITION, "", None, False),
        (CODE.NOT_FOUND, "", None, False),
        (CODE.ABORTED, "", None, False),
    ],
)
def test_what_is_tried_again(
    code: grpc.StatusCode, message: str, details: dict[str, Any] | None, again: bool
) -> None:
    assert TreadleError(code, message, **(details or {})).retryable is again


async def test_cleaning_up_goes_on_through_two_cancellations_and_passes_them_on() -> None:
    release, finished = asyncio.Event(), asyncio.Event()

    async def clean() -> None:
        await release.wait()
        finished.set()

    running = asyncio.ensure_future(finish(clean()))
    for _ in range(2):
        await asyncio.sleep(0)
        running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert finished.is_set()
