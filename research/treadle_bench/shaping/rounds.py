"""One rollout of a training step on simulated engines: groups of samples, until enough groups have
settled.

Engines are those of every other figure (`engine.SimEngine`): slots, KV, prefills and decodes. There
is no controller: samples go to engines in turns and run first come, first served, as with the
frameworks that are compared. A group's rule (`treadle_core.rollouts.group`) says when it has
settled; then its running samples are aborted. Once as many groups have settled as the step trains,
the rest is aborted too.

A sample's turns follow each other with its environment between them. Without barriers each sample
goes on by itself; with them the next turns begin when every sample's environment has answered, as
batch-level interaction does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treadle_core.rollouts.group import Candidate, Rule
from treadle_sim.batch import EngineStep
from treadle_sim.cluster import Timeline
from treadle_sim.engine import SimEngine
from treadle_sim.engine_model import EngineModel
from treadle_sim.workloads.workload import Step, TrajectoryWork


@dataclass(frozen=True, slots=True)
class GroupWork:
    """The samples of one prompt and what is trained of them. arrived: samples that came in earlier
    rounds, their keys indexes of `samples`. done: tokens that others have from there, by index;
    only of samples of one turn."""

    prompt_id: str
    samples: tuple[TrajectoryWork, ...]
    rule: Rule
    arrived: tuple[Candidate, ...] = ()
    done: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class GroupResult:
    """How a group ended. candidates: samples that came, in order. finished_s: when, in the same
    order. trained: keys, which are indexes of samples as text; empty where the group did not
    settle. running_tokens: of the samples that were aborted, what they had sampled, by index.
    settled_s: -1 where it did not."""

    candidates: list[Candidate] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    trained: tuple[str, ...] = ()
    running_tokens: dict[int, int] = field(default_factory=dict)
    settled_s: float = -1.0


@dataclass(frozen=True, slots=True)
class RoundResult:
    """seconds: until enough groups had settled. groups: in the order given. sampled_tokens: in this
    round. busy_s: of each engine."""

    seconds: float
    groups: tuple[GroupResult, ...]
    sampled_tokens: int
    busy_s: tuple[float, ...]


class Round:
    """Plays one round. needed: groups that must settle. barrier: turns wait for each other."""

    def __init__(
        self,
        model: EngineModel,
        engines: int,
        groups: Sequence[GroupWork],
        needed: int,
        *,
        barrier: bool = False,
    ) -> None:
        self._timeline = Timeline()
        self._engines = [
            SimEngine(f"e{at}", model, self._timeline, self, preempt=False, paced=False)
            for at in range(engines)
        ]
        self._groups = groups
        self._results = [GroupResult() for _ in groups]
        self._needed = min(needed, len(groups))
        self._barrier = barrier
        # samples whose environment has answered, at a barrier
        self._waiting: list[tuple[int, int, int]] = []
        self._in_turn = 0  # samples that decode or whose environment works
        self._contexts: dict[tuple[int, int], int] = {}
        self._turns: dict[tuple[int, int], int] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._places: list[tuple[int, int]] = []
        self._sampled_tokens = 0

    def run(self) -> RoundResult:
        """Play it. Raises RuntimeError where not enough groups can settle."""
        for at, group in enumerate(self._groups):
            self._results[at].candidates.extend(group.arrived)
            self._results[at].finished_s.extend(0.0 for _ in group.arrived)
            there = {int(each.key) for each in group.arrived}
            for index, work in enumerate(group.samples):
                if index in there:
                    continue
                self._numbers[at, index] = len(self._places)
                self._contexts[at, index] = work.prompt_tokens
                self._places.append((at, index))
        for place in self._places:
            self._begin_turn(*place, 0)
        self._timeline.run(lambda: self._needed > 0)
        if self._needed:
            raise RuntimeError(f"{self._needed} groups never settled")
        seconds = self._timeline.now
        for at, result in enumerate(self._results):
            self._abort(at, result)
        busy_s = tuple(engine.busy_s for engine in self._engines)
        return RoundResult(seconds, tuple(self._results), self._sampled_tokens, busy_s)

    def prefill_started(self, step: EngineStep) -> None:
        """Ignore the event, which nothing here needs."""

    def step_preempted(self, step: EngineStep) -> None:
        """As `StepListener` has it: nothing evicts here."""

    def step_finished(self, step: EngineStep) -> None:
        """As `StepListener` has it."""
        at, index = self._places[step.index]
        work, turn = self._groups[at].samples[index], self._turns[at, index]
        done = self._groups[at].done.get(index, 0) if turn == 0 else 0
        self._sampled_tokens += step.gen_tokens - done
        made = work.steps[turn]
        self._contexts[at, index] += made.gen_tokens + made.obs_tokens
        self._timeline.after(made.tool_s, self._end_turn, at, index, turn)

    def _begin_turn(self, at: int, index: int, turn: int) -> None:
        if self._results[at].settled_s >= 0.0:
            return
        work, number = self._groups[at].samples[index], self._numbers[at, index]
        self._in_turn += 1
        self._turns[at, index] = turn
        step = EngineStep(
            self._step_id(at, index, turn),
            number,
            work.prompt_id,
            work.prompt_tokens,
            self._contexts[at, index],
            work.steps[turn].gen_tokens,
            self._timeline.now,
            done=self._groups[at].done.get(index, 0) if turn == 0 else 0,
        )
        self._engines[number % len(self._engines)].submit(step, 0.0)

    def _end_turn(self, at: int, index: int, turn: int) -> None:
        if self._results[at].settled_s >= 0.0:
            return
        self._in_turn -= 1
        work = self._groups[at].samples[index]
        if turn + 1 == len(work.steps):
            self._arrive(at, index, work)
        elif self._barrier:
            self._waiting.append((at, index, turn + 1))
        else:
            self._begin_turn(at, index, turn + 1)
        if not self._in_turn and self._waiting:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                self._begin_turn(*each)

    def _arrive(self, at: int, index: int, work: TrajectoryWork) -> None:
        group, result = self._groups[at], self._results[at]
        result.candidates.append(
            Candidate(str(index), work.gen_tokens, work.reward, truncated=work.censored)
        )
        result.finished_s.append(self._timeline.now)
        if group.rule.settled(result.candidates, len(group.samples)):
            result.settled_s = self._timeline.now
            result.trained = group.rule.choose(result.candidates)
            self._needed -= 1
            self._abort(at, result)

    def _abort(self, at: int, result: GroupResult) -> None:
        """Stop what still runs of a group."""
        arrived = {int(each.key) for each in result.candidates}
        for index, work in enumerate(self._groups[at].samples):
            if index in arrived or index in result.running_tokens:
                continue
            turn = self._turns[at, index]
            engine = self._engines[self._numbers[at, index] % len(self._engines)]
            stopped = engine.cancel([self._step_id(at, index, turn)])
            # None stopped: its environment works, so the turn's tokens are all there.
            sampled = stopped[0].done if stopped else work.steps[turn].gen_tokens
            if stopped:
                self._sampled_tokens += sampled - (
                    self._groups[at].done.get(index, 0) if turn == 0 else 0
                )
            result.running_tokens[index] = (
                sum(step.gen_tokens for step in work.steps[:turn]) + sampled
            )
            self._in_turn -= (at, index, turn + 1) not in self._waiting

    @staticmethod
    def _step_id(at: int, index: int, turn: int) -> str:
        return f"{at}.{index}.{turn}"


def single_turn(
    prompt_id: str, sample: int, prompt_tokens: int, gen_tokens: int, reward: float, truncated: bool
) -> TrajectoryWork:
    """A sample without an environment."""
    return TrajectoryWork(
        prompt_id, sample, prompt_tokens, (Step(gen_tokens, 0, 0.0),), reward, truncated
    )
