"""Evidence for estimators: running and ended trajectories by group, by prompt and altogether, and
curves of lengths.

A group is the samples of one prompt in one rollout (siblings); a prompt's history is its
trajectories of earlier rollouts. Events that repeat change nothing, and the same events in the same
order give the same state. Memory is bounded by the constants below, oldest out first. There is no
lock: one event loop owns it.

Lengths are survival curves S(t) = P(total > t) of tokens or turns on fixed knots, from complete and
right-censored totals, shrunk to a base curve where there are few: the Bayes estimator under a
Dirichlet-process prior with right censoring (Susarla and Van Ryzin, 1976), which is Kaplan-Meier's
with the base curve counting as `weight` observations.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from treadle_core.compiled import Floats, Indexes

# 48 knots an octave are 1.5% apart, finer than any prediction; 2^24 tokens are beyond any context.
TOKEN_KNOTS: Floats = np.concatenate([[0.0], np.geomspace(1.0, 2.0**24, 24 * 48 + 1)])
# Whole turns up to 64, then as with tokens.
TURN_KNOTS: Floats = np.concatenate([np.arange(64.0), np.geomspace(64.0, 2.0**14, 8 * 48 + 1)])

QUANTILES = (0.1, 0.5, 0.9)
LEAST_AT_RISK = 1e-300  # observations; keeps a division from zero


def lognormal(knots: Floats, median: float, sigma: float) -> Floats:
    """Return the curve of a log-normal total: `median` in the knots' unit, `sigma` of the natural
    log, both > 0."""
    scale = sigma * math.sqrt(2.0)
    return np.array(
        [0.5 * math.erfc(math.log(t / median) / scale) if t > 0.0 else 1.0 for t in knots.tolist()]
    )


def log_moments(seen: Observed) -> tuple[int, float, float]:
    """Return the number of totals that ended, and the mean and variance of their natural logs;
    totals below 1 count as 1."""
    count = int(seen.ended.sum())
    if count == 0:
        return 0, 0.0, 0.0
    logs, shares = np.log(np.maximum(seen.values, 1.0)), seen.ended / count
    mean = float(shares @ logs)
    return count, mean, float(shares @ (logs - mean) ** 2)


@dataclass(frozen=True)
class Observed:
    """Observed totals: distinct `values`, ascending; for each, how many ended there (`ended`), and
    how many were cut there or still run (`censored`: their total is larger)."""

    values: Floats
    ended: Indexes
    censored: Indexes


def count_totals(ended: Sequence[float], censored: Sequence[float]) -> Observed:
    """Count totals given in any order."""
    values, index = np.unique(np.array([*ended, *censored], np.float64), return_inverse=True)
    counts = np.zeros((2, len(values)), np.int64)
    np.add.at(counts, (np.repeat([0, 1], [len(ended), len(censored)]), index), 1)
    return Observed(values, counts[0], counts[1])


class Tally:
    """Counts of many totals on knots: adding or removing one takes O(log knots)."""

    def __init__(self, knots: Floats) -> None:
        self._knots = knots.tolist()
        self.observed = Observed(
            knots, np.zeros(len(knots), np.int64), np.zeros(len(knots), np.int64)
        )

    def add(self, total: float, *, own_end: bool, times: int = 1) -> None:
        """Count a total at the knot at or below it; `times` -1 removes it again."""
        at = max(0, bisect.bisect_right(self._knots, total) - 1)
        (self.observed.ended if own_end else self.observed.censored)[at] += times


def posterior(knots: Floats, base: Floats, weight: float, seen: Observed) -> Floats:
    """Return the survival curve after observing totals; the base counts as `weight` > 0
    observations."""
    counts = seen.ended + seen.censored
    count = int(counts.sum())
    if count == 0:
        return base
    longer = count - np.cumsum(counts)  # observations beyond each value
    # Where nothing, not even the base, goes beyond a cut, the curve is 0 there anyway.
    at_risk = np.maximum(weight * np.interp(seen.values, knots, base) + longer, LEAST_AT_RISK)
    lifts = np.cumsum(np.log1p(seen.censored / at_risk))
    passed = np.searchsorted(seen.values, knots, side="right")
    beyond = np.concatenate([[count], longer])[passed]
    lift = np.concatenate([[0.0], lifts])[passed]
    curve = (weight * base + beyond) / (weight + count) * np.exp(lift)
    return np.minimum.accumulate(np.clip(curve, 0.0, 1.0))


def remaining_quantiles(knots: Floats, curve: Floats, done: float) -> tuple[float, float, float]:
    """Return p10, p50 and p90 of total - done, given total > done; 0 beyond the last knot."""
    if done >= knots[-1]:
        return (0.0, 0.0, 0.0)
    alive = float(np.interp(done, knots, curve))
    found = []
    for quantile in QUANTILES:
        level = alive * (1.0 - quantile)
        at = int(np.searchsorted(-curve, -level, side="left"))
        if at >= len(knots):
            total = float(knots[-1])
        elif at == 0 or curve[at - 1] <= curve[at]:
            total = float(knots[at])
        else:
            share = (curve[at - 1] - level) / (curve[at - 1] - curve[at])
            total = float(knots[at - 1] + share * (knots[at] - knots[at - 1]))
        found.append(max(0.0, total - done))
    return (found[0], found[1], found[2])


MOST_RUNNING = 65_536  # ten times the largest batch of the papers (6,400)
MOST_GROUPS = 16_384  # 1 kB each with 16 samples
MOST_IN_GROUP = 256  # samples of one prompt in one rollout
MOST_PROMPTS = 16_384  # prompts with a history
MOST_OF_PROMPT = 32  # newest ended ones; older ones are of an older policy
MOST_OF_ALL = 2_048  # newest ended trajectories of all prompts


@dataclass(frozen=True, slots=True)
class Running:
    """Open trajectory. `turns` are finished steps, `gen_tokens` are the tokens sampled in them."""

    turns: int = 0
    gen_tokens: int = 0
    last_step_tokens: int = 0  # of gen_tokens, sampled in the last finished step

    def after_step(self, turn: int, output_tokens: int) -> Running:
        """Return the trajectory after a step, whose output counts once, also where the step resumed
        on another engine."""
        if turn + 1 < self.turns:
            return self
        before = self.gen_tokens - (self.last_step_tokens if turn + 1 == self.turns else 0)
        step = (
            max(output_tokens, self.last_step_tokens) if turn + 1 == self.turns else output_tokens
        )
        return replace(self, turns=turn + 1, gen_tokens=before + step, last_step_tokens=step)


@dataclass(frozen=True, slots=True)
class Ended:
    """Closed trajectory. own_end: it finished by itself; otherwise it was cut (by a cap, a failure,
    a cancellation) and is censored. weight_version: the version of the policy that sampled it; None
    where it is not known. observed_tokens: of its tools' answers; tool_s: of all its tool calls."""

    trajectory_id: str
    rollout_id: str
    prompt_id: str
    gen_tokens: int
    turns: int
    own_end: bool
    weight_version: int | None = None
    observed_tokens: int = 0
    tool_s: float = 0.0


@dataclass(slots=True)
class Group:
    """Siblings of one group, by trajectory id."""

    running: dict[str, Running] = field(default_factory=dict)
    ended: dict[str, Ended] = field(default_factory=dict)


class Versions:
    """Mean weight version of the ended trajectories that have one."""

    def __init__(self, ended: Iterable[Ended] = ()) -> None:
        self._sum = self._count = 0
        for each in ended:
            self.add(each)

    def add(self, ended: Ended, times: int = 1) -> None:
        if ended.weight_version is not None:
            self._sum += times * ended.weight_version
            self._count += times

    @property
    def mean(self) -> float | None:
        return self._sum / self._count if self._count else None


@dataclass(slots=True)
class ToolUse:
    """Sums over trajectories: turns, seconds of tools, tokens of their answers."""

    turns: float = 0.0
    tool_s: float = 0.0
    observed_tokens: float = 0.0

    def add(self, ended: Ended, times: int = 1) -> None:
        self.turns += times * ended.turns
        self.tool_s += times * ended.tool_s
        self.observed_tokens += times * ended.observed_tokens


GroupKey = tuple[str, str]


class Evidence:
    """Evidence from openings, steps and closings; callers must not change what it returns."""

    def __init__(self) -> None:
        self._key_of: OrderedDict[str, GroupKey] = OrderedDict()  # running trajectory -> its group
        self._groups: OrderedDict[GroupKey, Group] = OrderedDict()
        self._newest_group: dict[str, GroupKey] = {}  # of each prompt
        self._prompts: OrderedDict[str, OrderedDict[str, Ended]] = OrderedDict()
        self._all: OrderedDict[str, Ended] = OrderedDict()
        # Of the newest ended ones. Running ones are left out: rollouts start together, so those
        # that are far in tokens sample much in a turn, and counted as censored they would make all
        # estimates too long.
        self.tokens = Tally(TOKEN_KNOTS)
        self.turns = Tally(TURN_KNOTS)
        self._versions = Versions()  # also of the newest ended ones
        self.tool_use = ToolUse()  # of these too
        self.closed_total = 0
        self.revision = 0  # grows with every change

    def open_trajectory(self, trajectory_id: str, rollout_id: str, prompt_id: str) -> None:
        """Add a running trajectory, unless it is here already, running or ended."""
        if trajectory_id in self._key_of or self._has_ended(trajectory_id, rollout_id, prompt_id):
            return
        key = (rollout_id, prompt_id)
        group = self._group(key)
        group.running[trajectory_id] = Running()
        self.revision += 1
        self._key_of[trajectory_id] = key
        while len(self._key_of) > MOST_RUNNING or len(group.running) > MOST_IN_GROUP:
            in_group = len(group.running) > MOST_IN_GROUP
            self._drop_running(next(iter(group.running)) if in_group else next(iter(self._key_of)))

    def add_step(self, trajectory_id: str, turn: int, output_tokens: int) -> None:
        """Count a finished step (turn 0 for the first) and its whole output; ignored for an unknown
        trajectory."""
        key = self._key_of.get(trajectory_id)
        if key is None:
            return
        group = self._groups[key]
        before = group.running[trajectory_id]
        after = before.after_step(turn, output_tokens)
        if after != before:
            group.running[trajectory_id] = after
            self.revision += 1
            self._key_of.move_to_end(trajectory_id)
            self._groups.move_to_end(key)

    def close_trajectory(self, ended: Ended) -> bool:
        """Add an ended trajectory, known or not. Returns False where it has ended before."""
        if self._has_ended(ended.trajectory_id, ended.rollout_id, ended.prompt_id):
            return False
        self._drop_running(ended.trajectory_id)
        group = self._group((ended.rollout_id, ended.prompt_id))
        keep(group.ended, ended, MOST_IN_GROUP)
        history = self._prompts.setdefault(ended.prompt_id, OrderedDict())
        self._prompts.move_to_end(ended.prompt_id)
        keep(history, ended, MOST_OF_PROMPT)
        dropped = keep(self._all, ended, MOST_OF_ALL)
        if dropped is not None:
            self._count(dropped, -1)
        self._count(ended, 1)
        self.closed_total += 1
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)
        return True

    def group_of(self, trajectory_id: str, prompt_id: str) -> tuple[GroupKey, Group] | None:
        """Return the group of a trajectory; for an unknown one, the newest group of its prompt."""
        key = self._key_of.get(trajectory_id) or self._newest_group.get(prompt_id)
        return None if key is None else (key, self._groups[key])

    def ended_of_prompt(self, prompt_id: str) -> Collection[Ended]:
        """Return the newest ended trajectories of a prompt in all rollouts, oldest first."""
        return self._prompts.get(prompt_id, OrderedDict[str, Ended]()).values()

    def mean_version(self, trajectory_id: str, prompt_id: str) -> float | None:
        """Return the mean weight version of a trajectory's ended siblings, else of its prompt, else
        of all; None where these have none."""
        found = self.group_of(trajectory_id, prompt_id)
        siblings = found[1].ended.values() if found is not None else ()
        own = siblings or self.ended_of_prompt(prompt_id)
        return Versions(own).mean if own else self._versions.mean

    @property
    def ended_kept(self) -> int:
        """Return the number of ended trajectories in `tokens` and `turns`."""
        return len(self._all)

    @property
    def known_prompts(self) -> int:
        """Return the number of prompts with an ended trajectory."""
        return len(self._prompts)

    def _group(self, key: GroupKey) -> Group:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group()
            self._newest_group[key[1]] = key
            if len(self._groups) > MOST_GROUPS:
                self._drop_group()
        else:
            self._groups.move_to_end(key)
        return group

    def _drop_group(self) -> None:
        key, group = self._groups.popitem(last=False)
        for trajectory_id in group.running:
            del self._key_of[trajectory_id]
        if self._newest_group.get(key[1]) == key:
            del self._newest_group[key[1]]

    def _drop_running(self, trajectory_id: str) -> None:
        key = self._key_of.pop(trajectory_id, None)
        if key is not None:
            del self._groups[key].running[trajectory_id]
            self.revision += 1

    def _count(self, ended: Ended, times: int) -> None:
        self.tokens.add(ended.gen_tokens, own_end=ended.own_end, times=times)
        self.turns.add(ended.turns, own_end=ended.own_end, times=times)
        self._versions.add(ended, times)
        self.tool_use.add(ended, times)
        self.revision += 1

    def _has_ended(self, trajectory_id: str, rollout_id: str, prompt_id: str) -> bool:
        group = self._groups.get((rollout_id, prompt_id))
        return (
            (group is not None and trajectory_id in group.ended)
            or trajectory_id in self._prompts.get(prompt_id, ())
            or trajectory_id in self._all
        )


def keep(into: dict[str, Ended], ended: Ended, most: int) -> Ended | None:
    """Add an ended trajectory. Returns the oldest, which it removes, where there are more than
    `most`."""
    into[ended.trajectory_id] = ended
    return into.pop(next(iter(into))) if len(into) > most else None
