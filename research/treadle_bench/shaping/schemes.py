"""Many training steps of one scheme: which prompts and samples a step rolls out, what it trains,
and how long it takes.

A step rolls out groups (`rounds.Round`), then trains `groups` of them with `keep` samples each, on
GPUs of its own (disaggregated, as in DARTS §5.1). Then the policy learns (`population.Policy`), and
engines have the new weights at once. All schemes of a setting meet the same prompts in the same
order, and the answers of a prompt's n-th visit come from the same draws.

What schemes have that others do not is off by default, so that each part can be added alone:
- `started`: more samples of a prompt than are kept, of which the first count (RollArt's redundant
  rollouts).
- `dual_end`, `budget`: DARTS' selection, and its adaptive budget and allocation with pruning.
- `oversampled` with `leftovers`: more prompts are started than trained. DEFER is tail batching
  (RollPacker): prompts
  that have not settled run again from the start, once a step's worth of them waits, in a step that
  waits for all.
  RESUME is partial rollout (APRIL): they go on in the next step, with the tokens that they have.
- `mixed`: dynamic K. `cap`: a length cap.
- `streaming`: what of a sample's forward pass runs while others still decode.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt
from treadle_core.rollouts.bias import BiasGuard
from treadle_core.rollouts.group import Candidate, DualEnd, FirstK, FirstMixed, Rule, darts_rule
from treadle_core.rollouts.length_cap import CapPolicy, CapState
from treadle_core.rollouts.redundancy import (
    BudgetPolicy,
    LengthStatistics,
    allocate,
    find_budget,
    fit_latency,
    sample_cost_s,
)
from treadle_sim.engine_model import EngineModel
from treadle_sim.workloads.workload import TrajectoryWork

from treadle_bench.shaping.population import PROMPT_TOKENS, Answers, Policy, Prompts
from treadle_bench.shaping.rounds import GroupResult, GroupWork, Round, RoundResult, single_turn

Floats = npt.NDArray[np.float64]

MOST_SAMPLES = 32  # of one prompt in one step, drawn whether or not they are started
# of a sample's training: a backward pass computes twice what a forward pass does
FORWARD_SHARE = 1.0 / 3.0
# at which the cost model knows an engine's steps
BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)


class Leftovers(Enum):
    """What becomes of prompts that have not settled when a step ends."""

    NONE = "none"
    DEFER = "defer"
    RESUME = "resume"


class Streaming(Enum):
    """What forward passes wait for."""

    NONE = "none"  # the whole rollout
    SAMPLES = "samples"  # their sample
    TOKENS = "tokens"  # a chunk of tokens


@dataclass(frozen=True, slots=True)
class Scheme:
    """See the module. started: samples a prompt, 0 for as many as are kept. dual_end: the longest
    that are kept of a group, -1 for no such selection. budget: adaptive, instead of `started`."""

    name: str
    started: int = 0
    dual_end: int = -1
    budget: BudgetPolicy | None = None
    mixed: bool = False
    oversampled: float = 1.0
    leftovers: Leftovers = Leftovers.NONE
    streaming: Streaming = Streaming.NONE
    cap: CapPolicy | None = None


@dataclass(frozen=True)
class Setting:
    """What schemes have in common. train_token_s: seconds of the trainer for each token, forward
    and backward. rate, imitation, generalise: of learning."""

    model: EngineModel
    engines: int
    prompts: Prompts
    groups: int
    keep: int
    steps: int
    seed: int
    train_token_s: float = 0.0
    rate: float = 0.0
    imitation: float = 0.0
    generalise: float = 0.5


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step. mean_log_length: of the trained prompts before any training, which shows the order
    in which they come. started: samples. stale_tokens: trained tokens from before the step. pruned:
    groups that only keep short samples."""

    rollout_s: float
    train_s: float
    started: int
    trained: int
    sampled_tokens: int
    trained_tokens: int
    mean_tokens: float
    longest_tokens: int
    success: float
    mean_log_length: float
    stale_tokens: int
    pruned: int
    deferred: bool

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.train_s


@dataclass(frozen=True)
class Played:
    """All steps of a scheme, and what it did to the distribution that is trained on."""

    rows: tuple[StepRow, ...]
    guard: BiasGuard

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return float(np.mean([row.seconds for row in self.rows]))


@dataclass
class _Group:
    """A prompt on its way to training. answers: of all that were started."""

    prompt: int
    answers: Answers
    rule: Rule
    started: int
    samples: tuple[TrajectoryWork, ...] = ()
    arrived: tuple[Candidate, ...] = ()
    done: dict[int, int] = field(default_factory=dict)


class Training:
    """Plays the steps of one scheme."""

    def __init__(self, setting: Setting, scheme: Scheme) -> None:
        self._setting, self._scheme = setting, scheme
        rate = setting.rate
        self.policy = Policy(
            setting.prompts, rate, imitation=setting.imitation, generalise=setting.generalise
        )
        self.guard = BiasGuard()
        self._statistics = LengthStatistics()
        self._latency = fit_latency(
            BATCHES, [setting.model.curve.decode_s(batch) for batch in BATCHES]
        )
        self._cap = CapState(scheme.cap) if scheme.cap is not None else None
        self._order = self._prompt_order()
        self._visits: dict[int, int] = {}
        self._deferred: list[int] = []
        self._resumed: list[_Group] = []
        self._lengths: list[list[int]] = []  # of the last round, by engine

    def run(self) -> Played:
        """Play all steps."""
        return Played(tuple(self._step() for _ in range(self._setting.steps)), self.guard)

    def _prompt_order(self) -> Iterator[int]:
        rng = np.random.default_rng([self._setting.seed, 1])
        while True:
            yield from rng.permutation(len(self._setting.prompts)).tolist()

    def _step(self) -> StepRow:
        setting, scheme = self._setting, self._scheme
        deferred = scheme.leftovers is Leftovers.DEFER and len(self._deferred) >= setting.groups
        if deferred:
            prompts, self._deferred = (
                self._deferred[: setting.groups],
                self._deferred[setting.groups :],
            )
        else:
            count = math.ceil(scheme.oversampled * setting.groups) - len(self._resumed)
            prompts = [next(self._order) for _ in range(max(count, 0))]
        groups = [*self._resumed, *self._start(prompts)]
        self._resumed = []
        works = [
            GroupWork(str(group.prompt), group.samples, group.rule, group.arrived, group.done)
            for group in groups
        ]
        played = Round(setting.model, setting.engines, works, setting.groups).run()
        trained = [
            (group, result)
            for group, result in zip(groups, played.groups, strict=True)
            if result.settled_s >= 0.0
        ]
        for group, result in zip(groups, played.groups, strict=True):
            if result.settled_s < 0.0:
                self._leave(group, result)
        return self._train(trained, played, sum(group.started for group in groups), deferred)

    def _start(self, prompts: list[int]) -> list[_Group]:
        """Groups of fresh samples."""
        setting, scheme = self._setting, self._scheme
        counts = [scheme.started or setting.keep] * len(prompts)
        most = setting.keep
        if scheme.budget is not None and prompts:
            kept = setting.keep * len(prompts)
            cost_s = sample_cost_s(self._latency, self._lengths) if self._lengths else 0.0
            budget = (
                find_budget(scheme.budget, self._statistics.variation, cost_s, kept)
                if cost_s
                else kept
            )
            most = math.floor(scheme.budget.most * setting.keep)
            variances = [self._statistics.variance(str(prompt)) for prompt in prompts]
            counts = allocate(variances, budget, setting.keep, most).tolist()
        return [
            self._sample(prompt, count, most) for prompt, count in zip(prompts, counts, strict=True)
        ]

    def _sample(self, prompt: int, count: int, most: int) -> _Group:
        setting, scheme = self._setting, self._scheme
        visit = self._visits[prompt] = self._visits.get(prompt, -1) + 1
        rng = np.random.default_rng([setting.seed, 2, prompt, visit])
        normal, uniform = (
            rng.standard_normal(MOST_SAMPLES)[:count],
            rng.random(MOST_SAMPLES)[:count],
        )
        answers = self.policy.sample(
            prompt, normal, uniform, self._cap.limit_tokens if self._cap else 0
        )
        rule: Rule = FirstK(setting.keep)
        if scheme.budget is not None:
            rule = darts_rule(count, most, setting.keep, scheme.dual_end)
        elif scheme.dual_end >= 0:
            rule = DualEnd(setting.keep, scheme.dual_end)
        elif scheme.mixed:
            rule = FirstMixed(setting.keep)
        samples = tuple(
            single_turn(str(prompt), at, PROMPT_TOKENS, tokens, reward, cut)
            for at, (tokens, reward, cut) in enumerate(
                zip(
                    answers.tokens.tolist(),
                    answers.rewards.tolist(),
                    answers.truncated.tolist(),
                    strict=True,
                )
            )
        )
        return _Group(prompt, answers, rule, count, samples)

    def _leave(self, group: _Group, result: GroupResult) -> None:
        """Put off a prompt that has not settled."""
        if self._scheme.leftovers is Leftovers.RESUME:
            group.arrived = tuple(result.candidates)
            group.done = dict(result.running_tokens)
            self._resumed.append(group)
        elif self._scheme.leftovers is Leftovers.DEFER:
            self._deferred.append(group.prompt)

    def _train(
        self,
        trained: list[tuple[_Group, GroupResult]],
        played: RoundResult,
        started: int,
        deferred: bool,
    ) -> StepRow:
        setting = self._setting
        lessons, tokens, stale, arrived = [], 0, 0, []
        for group, result in trained:
            keys = [int(key) for key in result.trained]
            lessons.append((group.prompt, group.answers.normal[keys], group.answers.rewards[keys]))
            tokens += int(group.answers.tokens[keys].sum())
            stale += sum(group.done.get(key, 0) for key in keys)
            stale += sum(each.length_tokens for each in group.arrived if int(each.key) in keys)
            running = list(result.running_tokens.values())
            self.guard.observe(result.candidates, result.trained, aborted_tokens=running)
            self._statistics.observe(
                str(group.prompt), [*(each.length_tokens for each in result.candidates), *running]
            )
            arrived += result.candidates
        if self._cap is not None:
            self._cap.update(arrived)
        lengths = np.concatenate([group.answers.tokens for group, _ in trained])
        self._lengths = [lengths[at :: setting.engines].tolist() for at in range(setting.engines)]
        row = StepRow(
            rollout_s=played.seconds,
            train_s=self._train_s(trained, played, tokens),
            started=started,
            trained=sum(len(result.trained) for _, result in trained),
            sampled_tokens=played.sampled_tokens,
            trained_tokens=tokens,
            mean_tokens=float(lengths.mean()),
            longest_tokens=int(lengths.max()),
            success=float(np.mean(np.concatenate([group.answers.rewards for group, _ in trained]))),
            mean_log_length=float(
                np.mean(setting.prompts.log_mean[[group.prompt for group, _ in trained]])
            ),
            stale_tokens=stale,
            pruned=sum(
                not isinstance(group.rule, DualEnd | FirstK | FirstMixed) for group, _ in trained
            ),
            deferred=deferred,
        )
        self.policy.learn(lessons)
        return row

    def _train_s(
        self, trained: list[tuple[_Group, GroupResult]], played: RoundResult, tokens: int
    ) -> float:
        """Seconds from the end of the rollout to the end of the step."""
        token_s = self._setting.train_token_s
        samples = sum(len(result.trained) for _, result in trained)
        all_s = token_s * (tokens + samples * PROMPT_TOKENS)
        forward_s = FORWARD_SHARE * all_s
        left_s = forward_s
        if self._scheme.streaming is Streaming.TOKENS:
            # Nobody knows yet which samples will be trained, so all are computed; what does not fit
            # runs after.
            every_s = FORWARD_SHARE * token_s * played.sampled_tokens
            left_s = min(max(every_s - played.seconds, 0.0), forward_s)
        elif self._scheme.streaming is Streaming.SAMPLES:
            ends = sorted(
                (finished_s, each.length_tokens + PROMPT_TOKENS)
                for _, result in trained
                for finished_s, each in zip(result.finished_s, result.candidates, strict=True)
            )
            ready_s = 0.0
            for finished_s, length in ends:
                ready_s = max(ready_s, finished_s) + FORWARD_SHARE * token_s * length
            left_s = min(max(ready_s - played.seconds, 0.0), forward_s)
        return left_s + all_s - forward_s


def with_training(setting: Setting, rollout_share: float) -> float:
    """Seconds of training for each token, such that a rollout that waits for all samples is this
    share of its step."""
    rows = (
        Training(replace(setting, steps=5, rate=0.0, train_token_s=0.0), Scheme("verl")).run().rows
    )
    tokens = sum(row.trained_tokens + row.trained * PROMPT_TOKENS for row in rows)
    return sum(row.rollout_s for row in rows) * (1.0 / rollout_share - 1.0) / tokens
