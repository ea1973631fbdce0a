"""Predictors for simulated rollouts, from one that knows the truth to one that knows nothing; and
measures of how good they are.

Answers are quantiles in order, never negative, and never beyond what the workload's cap leaves.
Every predictor but `Siblings` gives the same answer to the same question, whatever the earlier
questions, so that two policies get the same errors. `Siblings` learns only from what a predictor
service would have received by then.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from treadle_core.model import Estimate
from treadle_core.ranking.estimator import (
    Estimator,
    Prior,
    Progress,
    correlation,
    recall_of_longest,
)
from treadle_core.ranking.evidence import Ended, Evidence
from treadle_core.ranking.priorities import P90_Z
from treadle_core.tuning import Tuning

from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload, groups

Floats = npt.NDArray[np.float64]


class Answer(NamedTuple):
    """Prediction of what is left: tokens to sample, turns, seconds of tools, tokens of their
    answers; None: not predicted."""

    tokens: Estimate
    turns: Estimate | None = None
    tool_s: Estimate | None = None
    observed_tokens: Estimate | None = None


# Of `Noisy`, chosen so that before the first step it ranks trajectories about as well as
# `PromptMean`, and better with each step, as in Heddle §7.2 and Figure 13. Their recall and
# correlation: research/results/workloads.md.
SIGMA0 = 0.60  # of ln(predicted / true remaining tokens) before the first step
DECAY = 0.85  # what each finished step leaves of it
FRESH_SIGMA = 0.10  # added, drawn anew for each answer
SHARED = 0.5  # of the variance of the lasting error, common to all samples of a prompt

FEWEST = 8  # trajectories from which `Noisy` learns what is usual at a turn

# A trajectory that is longer than its prompt's mean is assumed to go on for this share of what it
# has done; without it every straggler would rank last.
OVERRUN = 0.25
# Of ln tokens, around a prompt's mean, where its own earlier samples do not show it (a third of
# 0.65² is 0.38²).
SPREAD_SIGMA = 0.4

BEFORE, NOW = "before", "now"  # rollouts of the estimator's evidence


class Predictor:
    """Predictor of what is left of a trajectory, called when it opens (turn 0) and after each of
    its steps.

    index: of the trajectory in `workload.trajectories`; turn: its finished steps; gen_tokens: all
    that it has sampled.
    """

    def __init__(self, workload: Workload) -> None:
        self._tokens = [work.gen_tokens for work in workload.trajectories]
        self._turns = [len(work.steps) for work in workload.trajectories]
        self._cap = workload.max_total_tokens
        self._tool_s = [
            _left([step.tool_s for step in work.steps]) for work in workload.trajectories
        ]
        self._observed = [
            _left([step.obs_tokens for step in work.steps[:-1]]) for work in workload.trajectories
        ]

    def predict(self, index: int, turn: int, gen_tokens: int) -> Answer:
        """Return the prediction of what is left after `turn` steps."""
        raise NotImplementedError

    def _rest_left(self, index: int, turn: int) -> tuple[float, float]:
        tools, observed = self._tool_s[index], self._observed[index]
        return tools[min(turn, len(tools) - 1)], observed[min(turn, len(observed) - 1)]

    def finish(self, index: int) -> None:
        """Note that the trajectory has ended. Only `Siblings` learns from it."""

    def _tokens_left(self, index: int, gen_tokens: int) -> float:
        return float(max(0, self._tokens[index] - gen_tokens))

    def _turns_left(self, index: int, turn: int) -> float:
        return float(max(0, self._turns[index] - turn))

    def room(self, gen_tokens: int) -> float:
        """Return the tokens that the cap leaves; infinite without one."""
        return float(max(0, self._cap - gen_tokens)) if self._cap else math.inf


class Oracle(Predictor):
    """Predictor that knows the truth: what is left of the workload's own steps."""

    def predict(self, index: int, turn: int, gen_tokens: int) -> Answer:
        left = (
            self._tokens_left(index, gen_tokens),
            self._turns_left(index, turn),
            *self._rest_left(index, turn),
        )
        return Answer(*map(_certain, left))


class Blind(Predictor):
    """Predictor that returns for every trajectory the controller's own assumption without a
    prediction."""

    def predict(self, index: int, turn: int, gen_tokens: int) -> Answer:
        return Answer(_certain(min(Tuning().default_remaining_tokens, self.room(gen_tokens))))


class Noisy(Predictor):
    """Trained predictor: it sees the truth with an error, and has learned how far to trust its
    view.

    Its view: ln(tokens left) + lasting[index] * SIGMA0 * DECAY**turn + FRESH_SIGMA * z(index,
    turn); SHARED of the variance of `lasting` is common to the samples of a prompt. Its answer: the
    quantiles of what is left given its view, where ln(tokens left) is normal over the trajectories
    that reach the turn (`_priors`). So its error is that of a regression on a noisy feature, and
    its quantiles are calibrated: unlike the truth with noise added, it does not believe its own
    outliers. Turns and tools err by the same factor: a trajectory that is predicted long is
    predicted to take more turns.
    """

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        super().__init__(workload)
        self._priors = _priors(workload.trajectories)
        rng = np.random.default_rng([seed, 1])
        prompts = {prompt_id: at for at, prompt_id in enumerate(groups(workload.trajectories))}
        of_prompts = rng.standard_normal(len(prompts))
        at = [prompts[work.prompt_id] for work in workload.trajectories]
        own = rng.standard_normal(len(at))
        self._lasting = (
            math.sqrt(SHARED) * of_prompts[at] + math.sqrt(1.0 - SHARED) * own
        ).tolist()
        # opening, and after each step
        asked = [len(work.steps) + 1 for work in workload.trajectories]
        self._first = (np.cumsum(asked) - asked).tolist()
        self._fresh = rng.standard_normal(sum(asked)).tolist()

    def predict(self, index: int, turn: int, gen_tokens: int) -> Answer:
        left = self._tokens_left(index, gen_tokens)
        rest = (self._turns_left(index, turn), *self._rest_left(index, turn))
        if left <= 0.0:
            return Answer(_certain(0.0), *map(_certain, rest))
        lasting_sigma = SIGMA0 * DECAY**turn
        seen = math.log(left) + self._lasting[index] * lasting_sigma
        seen += FRESH_SIGMA * self._fresh[self._first[index] + turn]
        mean, sigma = self._priors[min(turn, len(self._priors) - 1)]
        variance = lasting_sigma**2 + FRESH_SIGMA**2
        trust = sigma**2 / (sigma**2 + variance)
        tokens = math.exp(mean + trust * (seen - mean))
        spread = math.exp(P90_Z * math.sqrt(trust * variance))
        scaled = (_spread_around(each * tokens / left, spread, math.inf) for each in rest)
        return Answer(_spread_around(tokens, spread, self.room(gen_tokens)), *scaled)


class PromptMean(Predictor):
    """Predictor from history, which Heddle §4.1 calls static: each prompt's means in `earlier`.

    A prompt that is not among `earlier` gets the mean over all. Raises ValueError without earlier
    trajectories.
    """

    def __init__(self, workload: Workload, earlier: Sequence[TrajectoryWork]) -> None:
        if not earlier:
            raise ValueError("earlier must hold at least one trajectory")
        super().__init__(workload)
        means = {prompt_id: _means(works) for prompt_id, works in groups(earlier).items()}
        others = _means(earlier)
        self._means = [means.get(work.prompt_id, others) for work in workload.trajectories]

    def predict(self, index: int, turn: int, gen_tokens: int) -> Answer:
        mean_tokens, mean_turns, *of_tools = self._means[index]
        tokens = max(mean_tokens - gen_tokens, OVERRUN * gen_tokens)
        turns = max(mean_turns - turn, OVERRUN * turn)
        rest = (turns, *(each * turns / mean_turns for each in of_tools))
        spread = math.exp(P90_Z * SPREAD_SIGMA)
        scaled = (_spread_around(each, spread, math.inf) for each in rest)
        return Answer(_spread_around(tokens, spread, self.room(gen_tokens)), *scaled)


class Siblings(Predictor):
    """Predictor with the product's own estimator (`treadle_core.ranking.estimator`) and the
    evidence that its service would have: how far each trajectory ran, and which have ended.
    `earlier`: of earlier epochs, known before the first opening."""

    def __init__(self, workload: Workload, earlier: Sequence[TrajectoryWork] = ()) -> None:
        super().__init__(workload)
        self._workload = workload
        self._evidence = Evidence()
        self._estimator = Estimator(self._evidence, Prior())
        # turns and tokens that the evidence has of an open trajectory
        self._seen: dict[int, tuple[int, int]] = {}
        for number, work in enumerate(earlier):
            self._evidence.close_trajectory(_ended(f"{BEFORE}-{number}", BEFORE, work))

    def predict(self, index: int, turn: int, gen_tokens: int) -> Answer:
        work = self._workload.trajectories[index]
        name = f"{NOW}-{index}"
        if index not in self._seen:
            self._evidence.open_trajectory(name, NOW, work.prompt_id)
        turns, tokens = self._seen.get(index, (0, 0))
        if turn > turns:
            self._evidence.add_step(name, turn - 1, gen_tokens - tokens)
        self._seen[index] = (turn, gen_tokens)
        tool_s, observed = _tool_use(work.steps[:turn])
        context, prompt = work.prompt_tokens + gen_tokens + observed, work.prompt_tokens
        known = Progress(name, work.prompt_id, turn, gen_tokens, context, prompt, self._cap, tool_s)
        forecast = self._estimator.estimate(known)
        return Answer(
            *(forecast.remaining_tokens, forecast.remaining_turns),
            *(forecast.remaining_tool_s, forecast.remaining_observed_tokens),
        )

    def finish(self, index: int) -> None:
        self._evidence.close_trajectory(
            _ended(f"{NOW}-{index}", NOW, self._workload.trajectories[index])
        )
        self._seen.pop(index, None)


MAKERS: Mapping[str, Callable[[Workload, int, Sequence[TrajectoryWork]], Predictor]] = {
    "oracle": lambda workload, seed, earlier: Oracle(workload),
    "noisy": lambda workload, seed, earlier: Noisy(workload, seed),
    "prompt-mean": lambda workload, seed, earlier: PromptMean(workload, earlier),
    "siblings": lambda workload, seed, earlier: Siblings(workload, earlier),
    "blind": lambda workload, seed, earlier: Blind(workload),
}
NAMES = tuple(MAKERS)


def make_predictor(
    name: str, workload: Workload, seed: int = 0, earlier: Sequence[TrajectoryWork] = ()
) -> Predictor:
    """Return the predictor of a name. `earlier`: samples of the same prompts from another epoch,
    which "prompt-mean" needs and "siblings" can use. Raises ValueError for an unknown name."""
    if name not in MAKERS:
        raise ValueError(f"no predictor {name!r}, only {', '.join(NAMES)}")
    return MAKERS[name](workload, seed, earlier)


def _left(values: Sequence[float]) -> list[float]:
    """Return the amount that is left after each number of steps."""
    return [*np.cumsum(list(values)[::-1])[::-1].tolist(), 0.0]


def _certain(value: float) -> Estimate:
    return Estimate(value, value, value)


def _spread_around(median: float, spread: float, most: float) -> Estimate:
    """Return the median with p10 and p90 a factor of `spread` >= 1 from it, nothing above
    `most`."""
    return Estimate(min(median / spread, most), min(median, most), min(median * spread, most))


def _priors(works: Sequence[TrajectoryWork]) -> list[tuple[float, float]]:
    """Return by turn the mean and standard deviation of ln(tokens left) over the trajectories that
    reach it; where fewer than FEWEST do, those of the turn before."""
    logs: list[list[float]] = [[] for _ in range(max(len(work.steps) for work in works))]
    for work in works:
        left = work.gen_tokens
        for turn, step in enumerate(work.steps):
            logs[turn].append(math.log(max(1, left)))
            left -= step.gen_tokens
    priors = [
        (float(np.mean(values)), float(np.std(values))) for values in logs if len(values) >= FEWEST
    ]
    return priors or [(float(np.mean(logs[0])), float(np.std(logs[0])))]


def _means(works: Sequence[TrajectoryWork]) -> tuple[float, ...]:
    """Return the means of tokens, turns, seconds of tools, and tokens of their answers."""
    amounts = [(work.gen_tokens, len(work.steps), *_tool_use(work.steps)) for work in works]
    return tuple(np.mean(amounts, axis=0).tolist())


def _tool_use(steps: Sequence[Step]) -> tuple[float, int]:
    """Return the seconds of tools after these steps, and tokens of their answers."""
    return sum(step.tool_s for step in steps), sum(step.obs_tokens for step in steps)


def _ended(name: str, rollout_id: str, work: TrajectoryWork) -> Ended:
    tool_s, observed = _tool_use(work.steps)
    counts = (work.gen_tokens, len(work.steps), not work.censored)
    return Ended(name, rollout_id, work.prompt_id, *counts, observed_tokens=observed, tool_s=tool_s)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy of a predictor after `turn` steps, in the terms of Heddle §7.2. recall: of the
    longest tenth, the share among the tenth that was predicted longest. pearson: of predicted and
    true total tokens; pearson_log: of their logarithms. bias: median of predicted over true."""

    turn: int
    trajectories: int
    recall: float
    pearson: float
    pearson_log: float
    bias: float


def measure_accuracy(
    workload: Workload, predictor: Predictor, turns: int = 2
) -> tuple[Accuracy, ...]:
    """Measure the accuracy after 0 to `turns` steps, of the trajectories that take more steps than
    that. Raises ValueError for none.

    All trajectories run side by side at one speed, a token at a time and without tools, so that a
    predictor learns by each step what it would learn in an undisturbed rollout.
    """
    compared = [
        index for index, work in enumerate(workload.trajectories) if len(work.steps) > turns
    ]
    if not compared:
        raise ValueError(f"no trajectory takes more than {turns} steps")
    total = np.array([workload.trajectories[index].gen_tokens for index in compared], np.float64)
    predicted = np.full((len(workload.trajectories), turns + 1), np.nan)
    for gen_tokens, index, turn in sorted(_moments(workload)):
        if turn == len(workload.trajectories[index].steps):
            predictor.finish(index)
            continue
        remaining = predictor.predict(index, turn, gen_tokens).tokens
        if turn <= turns:
            predicted[index, turn] = gen_tokens + remaining.p50
    found = []
    for turn, told in enumerate(predicted[compared].T):
        recall, pearson = recall_of_longest(total, told), correlation(total, told)
        pearson_log = correlation(np.log(total), np.log(np.maximum(told, 1.0)))
        found.append(
            Accuracy(turn, len(total), recall, pearson, pearson_log, float(np.median(told / total)))
        )
    return tuple(found)


def _moments(workload: Workload) -> Iterator[tuple[int, int, int]]:
    """Yield (tokens sampled by then, trajectory, steps finished) at the opening and after each
    step."""
    for index, work in enumerate(workload.trajectories):
        sampled = itertools.accumulate((step.gen_tokens for step in work.steps), initial=0)
        yield from ((gen_tokens, index, turn) for turn, gen_tokens in enumerate(sampled))
