"""Asynchronous training on simulated engines: the rollout never stops, and groups that are too old
are aborted.

Engines always hold the same number of groups. A complete group waits in a buffer; the trainer takes
`groups` of them as they came, trains them while the rollout goes on, and publishes new weights.
Engines then compute the KV of what runs anew. A group is aborted, running or buffered, and another
prompt started in its place, once the weights are more than `bound` versions newer than those that
it began with (RollArt §5.3). RollArt bounds each trajectory; here the samples of a group begin
together, so that it is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from treadle_core.rollouts.group import is_stale
from treadle_sim.batch import EngineStep
from treadle_sim.cluster import Timeline
from treadle_sim.engine import SimEngine
from treadle_sim.engine_model import EngineModel

Draw = Callable[[], npt.NDArray[np.int64]]  # the lengths of a group's samples, in tokens


@dataclass(frozen=True, slots=True)
class AsyncSetting:
    """in_flight: groups that engines hold. prompt_tokens: of every sample. update_s: engines stop
    for new weights."""

    model: EngineModel
    engines: int
    groups: int
    in_flight: int
    bound: int
    train_token_s: float
    prompt_tokens: int = 250
    update_s: float = 2.0


@dataclass(frozen=True, slots=True)
class AsyncResult:
    """step_s: mean seconds from one batch to the next. aborted_share: of tokens, in groups that
    were aborted. staleness: versions that a trained group was behind, on average."""

    step_s: float
    aborted_share: float
    staleness: float


@dataclass
class _Group:
    version: int
    engine: int
    lengths: npt.NDArray[np.int64]
    steps: dict[str, EngineStep] = field(default_factory=dict)


class Asynchronous:
    """Plays `steps` batches after `warm_up` others. draw: makes the lengths of the next group."""

    def __init__(self, setting: AsyncSetting, draw: Draw, steps: int, warm_up: int) -> None:
        self._setting, self._draw = setting, draw
        self._left, self._warm_up = steps + warm_up, warm_up
        self._timeline = Timeline()
        self._engines = [
            SimEngine(f"e{at}", setting.model, self._timeline, self, preempt=False, paced=False)
            for at in range(setting.engines)
        ]
        self._running: dict[int, _Group] = {}
        self._buffer: list[_Group] = []
        self._started = self._version = 0
        self._training = False
        self._taken_s: list[float] = []
        self._tokens = self._aborted = 0
        self._behind: list[int] = []

    def run(self) -> AsyncResult:
        """Play it. Raises RuntimeError where engines hold fewer groups than a batch needs."""
        for _ in range(self._setting.in_flight):
            self._start()
        self._timeline.run(lambda: self._left > 0)
        if self._left:
            raise RuntimeError(f"{self._left} batches never came together")
        counted = self._taken_s[self._warm_up :]
        return AsyncResult(
            float(np.mean(np.diff([*self._taken_s[self._warm_up - 1 : self._warm_up], *counted]))),
            self._aborted / max(self._tokens + self._aborted, 1),
            float(np.mean(self._behind)),
        )

    def prefill_started(self, step: EngineStep) -> None:
        """Ignore the event, which nothing here needs."""

    def step_preempted(self, step: EngineStep) -> None:
        """As `StepListener` has it: nothing evicts here."""

    def step_finished(self, step: EngineStep) -> None:
        """As `StepListener` has it."""
        group = self._running[step.index]
        del group.steps[step.step_id]
        if not group.steps:
            del self._running[step.index]
            self._buffer.append(group)
            self._timeline.after(0.0, self._start)
            self._timeline.after(0.0, self._take)

    def _start(self) -> None:
        """Start a group on the engine that holds the fewest."""
        held = [0] * len(self._engines)
        for group in self._running.values():
            held[group.engine] += 1
        number, self._started = self._started, self._started + 1
        started = _Group(self._version, int(np.argmin(held)), self._draw())
        self._running[number] = started
        for at, length in enumerate(started.lengths.tolist()):
            context = self._setting.prompt_tokens
            of = (
                f"{number}.{at}",
                number,
                str(number),
                context,
                context,
                length,
                self._timeline.now,
            )
            started.steps[of[0]] = EngineStep(*of)
        for step in list(started.steps.values()):
            self._engines[started.engine].submit(step, 0.0)

    def _take(self) -> None:
        """Begin to train a batch, if there is one and the trainer is free."""
        if self._training or len(self._buffer) < self._setting.groups:
            return
        batch, self._buffer = (
            self._buffer[: self._setting.groups],
            self._buffer[self._setting.groups :],
        )
        self._training = True
        self._left -= 1
        self._taken_s.append(self._timeline.now)
        tokens = sum(int(group.lengths.sum()) for group in batch)
        self._tokens += tokens
        self._behind += [self._version - group.version for group in batch]
        self._timeline.after(tokens * self._setting.train_token_s, self._publish)

    def _publish(self) -> None:
        """New weights: engines stop for them, and what is too old is aborted."""
        self._training = False
        self._version += 1
        bound = self._setting.bound
        old = [group for group in self._buffer if is_stale(group.version, self._version, bound)]
        self._buffer = [
            group for group in self._buffer if not is_stale(group.version, self._version, bound)
        ]
        self._aborted += sum(int(group.lengths.sum()) for group in old)
        numbers = [
            n for n, group in self._running.items() if is_stale(group.version, self._version, bound)
        ]
        for number in numbers:
            group = self._running.pop(number)
            whole = int(group.lengths.sum()) - sum(step.gen_tokens for step in group.steps.values())
            stopped = self._engines[group.engine].cancel(group.steps)
            self._aborted += whole + sum(step.done for step in stopped)
        for engine in self._engines:
            engine.pause(self._setting.update_s)
        for _ in numbers:
            self._start()
        self._take()
