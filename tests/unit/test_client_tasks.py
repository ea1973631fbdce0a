"""Structured concurrency of the client: no task outlives what started it."""

import asyncio

import pytest
from treadle.tasks import Tasks, outcome_of, to_the_end


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        ended.append(name)


async def test_leaving_the_block_waits_for_all() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)

    async with Tasks() as tasks:
        for number in range(3):
            tasks.start(work(number))
    assert sorted(done) == [0, 1, 2]


async def test_one_failure_cancels_the_rest_and_is_raised_after_they_have_ended() -> None:
    ended: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        async with Tasks() as tasks:
            tasks.start(forever(ended, "a"))
            tasks.start(fail())
    assert ended == ["a"]


async def test_a_task_cancelled_on_purpose_is_no_failure() -> None:
    ended: list[str] = []
    async with Tasks() as tasks:
        hanging = tasks.start(forever(ended, "a"))
        await asyncio.sleep(0)
        hanging.cancel()
    assert ended == ["a"]


async def test_cancelling_the_block_ends_its_tasks_first() -> None:
    ended: list[str] = []

    async def block() -> None:
        async with Tasks() as tasks:
            tasks.start(forever(ended, "a"))
            tasks.start(forever(ended, "b"))

    running = asyncio.ensure_future(block())
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == ["a", "b"]


async def test_cleaning_up_goes_on_through_two_cancellations_and_passes_them_on() -> None:
    release, finished = asyncio.Event(), asyncio.Event()

    async def clean() -> None:
        await release.wait()
        finished.set()

    running = asyncio.ensure_future(to_the_end(clean()))
    for _ in range(2):
        await asyncio.sleep(0)
        running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert finished.is_set()


async def test_foreign_code_is_run_to_its_end_whatever_it_raises() -> None:
    async def raises() -> None:
        raise KeyError("theirs")

    task = await outcome_of(raises())
    assert isinstance(task.exception(), KeyError)
