"""Questions on their way to a model that is slow, fails, or is not there: nobody waits beyond the
deadline."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import numpy as np
import pytest
from support.conditions import until
from treadle_core.model import Estimate
from treadle_core.ranking.estimator import Forecast, Progress, Source
from treadle_learned.moments import FEATURES
from treadle_predictor.model import LearnedModel
from treadle_predictor.question import Question
from treadle_predictor.worker import Worker

LONG_S = 20.0


def asked(name: str, turn: int = 0) -> Question:
    return Question(Progress(name, "p", turn), np.zeros(len(FEATURES), np.float32), "", ())


class FakeModel:
    """Answers with the turn asked about, once it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.fails = False
        self.gains_together = True
        self.batches: list[list[tuple[str, int]]] = []
        self.forgotten: list[str] = []
        self.left_ahead = 0
        self.readings = self
        self.begun = threading.Event()

    def answer(self, questions: list[Question]) -> list[Forecast | None]:
        self._work_on([(each.progress.trajectory_id, each.progress.turn) for each in questions])
        return [
            Forecast(Estimate(turn, turn, turn), Estimate(0, 0, 0), Source.MODEL, "v")
            for turn in (each.progress.turn for each in questions)
        ]

    def begin(self, trajectory_id: str, prompt: str) -> None:
        self.batches.append([(f"{prompt} of {trajectory_id}", 0)])

    def read_ahead(self) -> bool:
        if not self.left_ahead:
            return False
        self.left_ahead -= 1
        self._work_on([("ahead", self.left_ahead)])
        return True

    def forget(self, trajectory_id: str) -> None:
        self.forgotten.append(trajectory_id)

    def _work_on(self, batch: list[tuple[str, int]]) -> None:
        self.batches.append(batch)
        self.begun.set()
        assert self.may_answer.wait(LONG_S)
        if self.fails:
            raise RuntimeError("out of memory")


@asynccontextmanager
async def working(model: FakeModel | None, deadline_s: float = LONG_S) -> AsyncIterator[Worker]:
    worker = Worker(deadline_s, gather_s=0.0, most_batch=3)
    worker.model = cast("LearnedModel | None", model)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
async def worker(model: FakeModel) -> AsyncIterator[Worker]:
    async with working(model) as worker:
        yield worker


async def begun(model: FakeModel) -> None:
    assert await asyncio.to_thread(model.begun.wait, LONG_S)
    model.begun.clear()


def said(forecast: Forecast | None) -> float | None:
    return forecast.remaining_tokens.p50 if forecast is not None else None


async def test_what_comes_while_the_model_is_busy_is_answered_together(
    model: FakeModel, worker: Worker
) -> None:
    model.may_answer.clear()
    first = asyncio.create_task(worker.ask(asked("a", 1)))
    await begun(model)
    others = [asyncio.create_task(worker.ask(asked(name, 2))) for name in "bcde"]
    await asyncio.sleep(0)
    model.may_answer.set()
    assert [said(each) for each in await asyncio.gather(first, *others)] == [1, 2, 2, 2, 2]
    assert [[name for name, _ in batch] for batch in model.batches] == [
        ["a"],
        ["b", "c", "d"],
        ["e"],
    ]
    assert worker.counts.answered == 5


async def test_where_nothing_is_gained_together_nobody_waits_for_others(
    model: FakeModel, worker: Worker
) -> None:
    model.gains_together = False
    model.may_answer.clear()
    several = [asyncio.create_task(worker.ask(asked(name, 1))) for name in "abc"]
    await begun(model)
    model.may_answer.set()
    assert [said(each) for each in await asyncio.gather(*several)] == [1, 1, 1]
    assert model.batches == [[("a", 1)], [("b", 1)], [("c", 1)]]


async def test_what_will_be_asked_is_read_while_nobody_asks_and_a_question_goes_first(
    model: FakeModel, worker: Worker
) -> None:
    await worker.ask(asked("a"))
    await begun(model)
    model.may_answer.clear()
    first = asyncio.create_task(worker.ask(asked("b")))
    await begun(model)
    model.left_ahead = (
        3  # not before: the worker may still be about to look, after the first answer
    )
    second = asyncio.create_task(worker.ask(asked("c")))
    await asyncio.sleep(0)
    model.may_answer.set()
    await asyncio.gather(first, second)
    await until(lambda: not model.left_ahead)
    assert model.batches == [
        [("a", 0)],
        [("b", 0)],
        [("c", 0)],
        [("ahead", 2)],
        [("ahead", 1)],
        [("ahead", 0)],
    ]


async def test_a_question_waits_for_one_piece_that_is_read_ahead_and_no_more(
    model: FakeModel, worker: Worker
) -> None:
    model.may_answer.clear()
    model.left_ahead = 3
    worker.begin("a", "prompt")
    await begun(model)
    waiting = asyncio.create_task(worker.ask(asked("b", 1)))
    await asyncio.sleep(0)
    model.may_answer.set()
    assert said(await waiting) == 1
    await until(lambda: not model.left_ahead)
    names = [name for batch in model.batches for name, _ in batch]
    assert names == ["prompt of a", "ahead", "b", "ahead", "ahead"]


async def test_all_that_have_begun_are_told_to_a_model_that_has_no_room_to_read_ahead(
    model: FakeModel, worker: Worker
) -> None:
    for name in "abc":
        worker.begin(name, "prompt")
    await until(lambda: len(model.batches) == 3)


async def test_a_prompt_is_begun_before_anybody_asks_unless_it_has_ended(
    model: FakeModel, worker: Worker
) -> None:
    worker.begin("a", "prompt")
    worker.begin("b", "prompt")
    worker.forget("b")
    await until(lambda: model.forgotten == ["b"])
    await until(lambda: bool(model.batches))
    assert model.batches == [[("prompt of a", 0)]]


async def test_a_model_that_fails_to_read_ahead_is_asked_all_the_same(
    model: FakeModel, worker: Worker
) -> None:
    model.left_ahead = 1
    await worker.ask(asked("a"))
    await until(lambda: not model.left_ahead)
    model.left_ahead, model.fails = 1, True
    assert said(await worker.ask(asked("a", 1))) is None
    await until(lambda: not model.left_ahead)
    model.fails = False
    assert said(await worker.ask(asked("a", 2))) == 2


async def test_the_newest_question_of_a_trajectory_takes_the_place_of_its_older_one(
    model: FakeModel, worker: Worker
) -> None:
    model.may_answer.clear()
    busy = asyncio.create_task(worker.ask(asked("a")))
    await begun(model)
    older = asyncio.create_task(worker.ask(asked("b", 1)))
    await asyncio.sleep(0)
    newer = asyncio.create_task(worker.ask(asked("b", 2)))
    assert said(await older) is None, "given back at once, while the model is busy"
    model.may_answer.set()
    assert said(await newer) == 2
    await busy
    assert model.batches[1:] == [[("b", 2)]]
    assert worker.counts.replaced == 1


async def test_a_late_model_is_not_waited_for_and_goes_on() -> None:
    model = FakeModel()
    async with working(model, deadline_s=0.05) as worker:
        model.may_answer.clear()
        assert said(await worker.ask(asked("a", 3))) is None
        assert worker.counts.late == 1
        model.may_answer.set()
    async with working(model) as worker:
        assert said(await worker.ask(asked("a", 4))) == 4


async def test_a_model_that_fails_answers_nothing_and_the_next_question_is_asked_again(
    model: FakeModel, worker: Worker
) -> None:
    model.fails = True
    assert said(await worker.ask(asked("a", 1))) is None
    model.fails = False
    assert said(await worker.ask(asked("a", 1))) == 1


async def test_without_a_model_nobody_waits() -> None:
    async with working(None) as worker:
        assert said(await worker.ask(asked("a"))) is None


async def test_what_ended_is_forgotten_and_its_question_given_back(
    model: FakeModel, worker: Worker
) -> None:
    await worker.ask(asked("a"))
    worker.forget("a")
    await until(lambda: model.forgotten == ["a"])
    model.begun.clear()
    model.may_answer.clear()
    busy = asyncio.create_task(worker.ask(asked("b")))
    await begun(model)
    waiting = asyncio.create_task(worker.ask(asked("c")))
    await asyncio.sleep(0)
    worker.forget("c")
    assert said(await waiting) is None
    model.may_answer.set()
    await busy
    assert [batch for batch in model.batches if batch] == [[("a", 0)], [("b", 0)]]
