"""Pass questions to the learned model in a thread of its own, within a deadline.

Questions are gathered for a moment, and answered together where that gains time. Invariants: no
question waits longer than the deadline, whatever the model does; of one trajectory only the newest
question is answered, and an older one that still waits is returned unanswered; an answer that comes
too late is not wasted, since what was read for it is kept for the next step. While there are no
questions the model reads ahead, a little at a time, so that a question waits for no more than that.
"""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from treadle_core.ranking.estimator import Forecast

from treadle_predictor.question import Question

if TYPE_CHECKING:  # it needs torch
    from treadle_predictor.model import LearnedModel

log = structlog.get_logger()


@dataclass
class Counts:
    """Numbers of questions since the service began."""

    answered: int = 0
    late: int = 0
    replaced: int = 0


class Worker:
    """Queue of questions to the learned model, and its thread. deadline_s: the longest that a
    question waits. gather_s: how long the first question of a batch waits for others. most_batch:
    questions in one run of the model."""

    def __init__(self, deadline_s: float, gather_s: float, most_batch: int) -> None:
        self.model: LearnedModel | None = None
        self.counts = Counts()
        self._deadline_s = deadline_s
        self._gather_s = gather_s
        self._most_batch = most_batch
        self._waiting: OrderedDict[str, tuple[Question, asyncio.Future[Forecast | None]]] = (
            OrderedDict()
        )
        self._begun: OrderedDict[str, str] = OrderedDict()  # prompts by trajectory
        self._ended: list[str] = []
        self._more = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "learned-model")

    async def ask(self, question: Question) -> Forecast | None:
        """Return the model's forecast; None where it has none in time."""
        name = question.progress.trajectory_id
        if self._give_back(name):
            self.counts.replaced += 1
        future: asyncio.Future[Forecast | None] = asyncio.get_running_loop().create_future()
        self._waiting[name] = (question, future)
        self._more.set()
        try:
            async with asyncio.timeout(self._deadline_s):
                forecast = await asyncio.shield(future)
        except TimeoutError:
            self.counts.late += 1
            return None
        if forecast is not None:
            self.counts.answered += 1
        return forecast

    def begin(self, trajectory_id: str, prompt: str) -> None:
        """Have the prompt read ahead: the trajectory's first step runs."""
        self._begun[trajectory_id] = prompt
        self._more.set()

    def forget(self, trajectory_id: str) -> None:
        """Drop a trajectory that has ended; its kept state is dropped with the next batch."""
        self._give_back(trajectory_id)
        self._begun.pop(trajectory_id, None)
        self._ended.append(trajectory_id)
        self._more.set()

    async def run(self) -> None:
        """Answer questions, for ever."""
        try:
            while True:
                await self._more.wait()
                await asyncio.sleep(self._gather_s)
                self._more.clear()
                while self._waiting or self._ended:
                    await self._answer_some()
                while not self._more.is_set() and await self._read_ahead():
                    pass
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _give_back(self, name: str) -> bool:
        """Return a trajectory's waiting question unanswered, and return whether there was one."""
        _, future = self._waiting.pop(name, (None, None))
        if future is None or future.done():
            return False
        future.set_result(None)
        return True

    async def _read_ahead(self) -> bool:
        if self.model is None:
            return False
        begun = self._begun.popitem(last=False) if self._begun else None
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._thread, _read_ahead, self.model, begun)
            return found or bool(self._begun)
        except (RuntimeError, ValueError):
            log.exception("the learned model failed to read ahead; it reads when it is asked")
            return False

    async def _answer_some(self) -> None:
        model, ended, self._ended = self.model, self._ended, []
        most = self._most_batch if model is None or model.gains_together else 1
        some = [self._waiting.popitem(last=False)[1] for _ in range(min(most, len(self._waiting)))]
        found: list[Forecast | None] = [None] * len(some)
        if model is not None:
            try:
                questions = [question for question, _ in some]
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._thread, _answer, model, ended, questions)
            except (
                RuntimeError,
                ValueError,
            ):  # errors of torch, e.g. out of memory; quantiles that are no numbers
                log.exception("the learned model failed; siblings and history answer")
        for (_, future), forecast in zip(some, found, strict=True):
            if not future.done():
                future.set_result(forecast)


def _answer(
    model: "LearnedModel", ended: list[str], questions: list[Question]
) -> list[Forecast | None]:
    if model.readings is not None:
        for trajectory_id in ended:
            model.readings.forget(trajectory_id)
    return model.answer(questions) if questions else []


def _read_ahead(model: "LearnedModel", begun: tuple[str, str] | None) -> bool:
    if model.readings is None:
        return False
    if begun is not None:
        model.readings.begin(*begun)
    return model.readings.read_ahead()
