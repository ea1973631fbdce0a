"""Questions on their way to the learned model: gathered for a moment, answered in a thread of their own, together where
that gains time.

Invariants: nobody waits longer than the deadline, whatever the model does; of one trajectory only the newest question
is worth the model's time, and an older one that still waits is given back unanswered; an answer that comes too late is
not wasted, since what was read for it is kept for the next step. While nobody asks, the model reads ahead, a little
at a time, so that a question waits for no more than that.

What the learned model is asked: a trajectory's numbers and texts at the end of a step, as they were in training."""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import structlog
from treadle_core.ranking.estimator import Forecast, Progress
from treadle_core.ranking.evidence import Evidence
from treadle_learned.moments import Vector, features_of
from treadle_learned.transcript import Turn

from treadle_predictor.recordings import Recording


@dataclass(frozen=True)
class Question:
    """turns: finished, with their texts; the tool of the last one still runs. prompt: empty where it is not known."""

    progress: Progress
    features: Vector
    prompt: str
    turns: tuple[Turn, ...]


def question(
    progress: Progress, recording: Recording, forecast: Forecast, evidence: Evidence, prompt: str
) -> Question | None:
    """`forecast`: of the estimators without a model. None where the trajectory's group is not known."""
    vector = features_of(progress, recording.steps, evidence, forecast, recording.weight_version)
    if vector is None:
        return None
    return Question(progress, vector, recording.prompt or prompt, tuple(recording.turns))


log = structlog.get_logger()


class Answerer(Protocol):
    """The learned model, as far as the worker sees it."""

    @property
    def gains_together(self) -> bool:
        """Whether several questions at once take less time than one after the other."""
        ...

    def answer(self, questions: list[Question]) -> list[Forecast | None]:
        """In their order."""
        ...

    def begin(self, trajectory_id: str, prompt: str) -> None:
        """It will be asked about; its prompt is something to read ahead."""
        ...

    def read_ahead(self) -> bool:
        """A little of what will be asked about, a step's worth at the most; False where nothing is left to read."""
        ...

    def forget(self, trajectory_id: str) -> None:
        """It has ended."""
        ...


@dataclass
class Counts:
    """Since the service began."""

    answered: int = 0
    late: int = 0
    replaced: int = 0


class Worker:
    """deadline_s: the longest that a question waits. gather_s: how long the first of a batch waits for others.
    most_batch: questions in one run of the model."""

    def __init__(self, deadline_s: float, gather_s: float, most_batch: int) -> None:
        self.model: Answerer | None = None
        self.counts = Counts()
        self._deadline_s = deadline_s
        self._gather_s = gather_s
        self._most_batch = most_batch
        self._waiting: OrderedDict[str, tuple[Question, asyncio.Future[Forecast | None]]] = OrderedDict()
        self._begun: OrderedDict[str, str] = OrderedDict()  # prompts
        self._ended: list[str] = []
        self._more = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "learned-model")

    async def ask(self, question: Question) -> Forecast | None:
        """The model's forecast; None where it has none in time."""
        name = question.progress.trajectory_id
        older = self._waiting.pop(name, None)
        if older is not None and not older[1].done():
            older[1].set_result(None)
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
        """Its first step runs: the prompt is read ahead."""
        self._begun[trajectory_id] = prompt
        self._more.set()

    def forget(self, trajectory_id: str) -> None:
        """It has ended: what is kept of it goes with the next batch, and nobody waits for its forecast any more."""
        _, future = self._waiting.pop(trajectory_id, (None, None))
        if future is not None and not future.done():
            future.set_result(None)
        self._begun.pop(trajectory_id, None)
        self._ended.append(trajectory_id)
        self._more.set()

    async def run(self) -> None:
        """Answers, for ever."""
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
        if model is None:
            found: list[Forecast | None] = [None] * len(some)
        else:
            try:
                questions = [question for question, _ in some]
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._thread, _answered, model, ended, questions)
            except (RuntimeError, ValueError):  # of torch, out of memory among them; answers that are no numbers
                log.exception("the learned model failed; siblings and history answer")
                found = [None] * len(some)
        for (_, future), forecast in zip(some, found, strict=True):
            if not future.done():
                future.set_result(forecast)


def _answered(model: Answerer, ended: list[str], questions: list[Question]) -> list[Forecast | None]:
    for trajectory_id in ended:
        model.forget(trajectory_id)
    return model.answer(questions) if questions else []


def _read_ahead(model: Answerer, begun: tuple[str, str] | None) -> bool:
    if begun is not None:
        model.begin(*begun)
    return model.read_ahead()
