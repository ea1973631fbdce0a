"""Choose how many samples of each prompt are started: DARTS' cost model, budget and allocation
(§4.2, appendices A to C).

More samples than are trained give a rule of `group.py` something to choose from, and cost time.
`LatencyCurve` and `rollout_cost_s` compute how much time (eq. 4), `find_budget` how many samples
are worth it (eq. 6 to 9), and `allocate` shares them out among the prompts of a batch by the
variance of their lengths (Alg. 1). `LengthStatistics` remembers those variances.

Nothing here changes anything by itself: a caller decides whether to start what `allocate`
returns.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np

from treadle_core.compiled import Floats, Indexes
from treadle_core.engine_queue.pace import non_negative_least_squares

PIECES = 3  # straight lines that describe per-token latency well (DARTS, appendix A)


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Seconds of a decode step by the sequences in it: straight lines between points, the last one
    goes on.

    batch_sizes: ascending, at least 1. step_s: positive, as many, and never falling.
    """

    batch_sizes: tuple[float, ...]
    step_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for points that are no such curve."""
        if not self.batch_sizes or len(self.batch_sizes) != len(self.step_s):
            raise ValueError("batch_sizes and step_s need as many points, at least one")
        if self.batch_sizes[0] < 1 or any(low >= high for low, high in pairwise(self.batch_sizes)):
            raise ValueError("batch_sizes must ascend from at least 1")
        if self.step_s[0] <= 0 or any(low > high for low, high in pairwise(self.step_s)):
            raise ValueError("step_s must be positive and must not fall with the batch")

    def latency_s(self, batch: Floats) -> Floats:
        """Return the seconds of a step for each batch size, in the same shape; 0 for no
        sequences."""
        sizes, times = self.batch_sizes, self.step_s
        steps = np.interp(batch, sizes, times)
        if len(sizes) > 1:
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            steps = steps + slope * np.maximum(batch - sizes[-1], 0.0)
        return np.asarray(np.where(batch > 0, steps, 0.0))


def fit_latency(batch_sizes: Sequence[float], step_s: Sequence[float]) -> LatencyCurve:
    """Return the curve of PIECES straight lines with the least relative error for measured steps
    (DARTS, appendix A).

    Its ends are the smallest and the largest measured batch, its bends two batch sizes between them
    that were measured, or fewer where there are fewer. No larger batch is ever predicted to be
    faster. Raises ValueError for no steps, a step that took no time, or a batch below 1.
    """
    sizes, times = np.asarray(batch_sizes, np.float64), np.asarray(step_s, np.float64)
    if sizes.size == 0 or sizes.shape != times.shape:
        raise ValueError("batch_sizes and step_s need as many measured steps, at least one")
    if not (
        np.isfinite(sizes).all()
        and np.isfinite(times).all()
        and sizes.min() >= 1
        and times.min() > 0
    ):
        raise ValueError("each measured step needs a batch of at least 1 and seconds above 0")
    measured = np.unique(sizes).tolist()
    inner, ends = measured[1:-1], sorted({measured[0], measured[-1]})
    best: tuple[float, LatencyCurve] | None = None
    for bends in combinations(inner, min(PIECES - 1, len(inner))):
        knots = sorted({*ends, *bends})
        rises = [np.clip((sizes - low) / (high - low), 0.0, 1.0) for low, high in pairwise(knots)]
        matrix = np.column_stack([np.ones_like(sizes), *rises]) / times[:, None]
        terms = non_negative_least_squares(matrix, np.ones_like(times))
        error = float(np.sum((matrix @ terms - 1.0) ** 2))
        if best is None or error < best[0]:
            best = error, LatencyCurve(tuple(knots), tuple(np.cumsum(terms).tolist()))
    assert best is not None  # there is a combination even of no bends
    return best[1]


def rollout_cost_s(
    curve: LatencyCurve, engines: Iterable[Sequence[int]], copies: float = 1.0
) -> float:
    """Return the seconds until the slowest engine has decoded its samples (DARTS eq. 4 and its data
    parallelism).

    engines: for each the lengths in tokens that it decodes at once, from the first step on. copies:
    how often each length counts. Sorted ascending, the tokens from one length to the next are
    decoded by all that are longer: the sum over i of latency(n - i + 1) (l_i - l_(i-1)). 0 for no
    lengths.
    """
    return max((_decode_s(curve, lengths, copies) for lengths in engines), default=0.0)


def _decode_s(curve: LatencyCurve, lengths: Sequence[int], copies: float) -> float:
    ascending = np.sort(np.asarray(lengths, np.float64))
    alive = np.asarray(np.arange(ascending.size, 0, -1) * copies, np.float64)
    return float(curve.latency_s(alive) @ np.diff(ascending, prepend=0.0))


def sample_cost_s(
    curve: LatencyCurve, engines: Sequence[Sequence[int]], most_copies: float = 2.0
) -> float:
    """Return the seconds that one more sample adds to a rollout of such lengths: the slope of eq.
    6.

    It is the mean slope of eq. 4 from these samples to `most_copies` of each, where the longest
    stays as long. Raises ValueError for no lengths, or no more copies.
    """
    count = sum(len(lengths) for lengths in engines)
    if count == 0 or most_copies <= 1.0:
        raise ValueError("the cost of a sample needs the lengths of one, and most_copies above 1")
    more_s = rollout_cost_s(curve, engines, most_copies) - rollout_cost_s(curve, engines)
    return more_s / (count * (most_copies - 1.0))


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """Bounds on how many samples a batch may start, in multiples of the samples that it trains.

    trade_off_per_s: utility that a second costs (lambda of appendix B); larger is more careful.
    least, most: the clamps of eq. 9, which bound each prompt too. The published text does not print
    their values: 1 and 2 are ours.
    """

    trade_off_per_s: float
    least: float = 1.0
    most: float = 2.0

    def __post_init__(self) -> None:
        """Raise ValueError for a policy that names no budget."""
        if not self.trade_off_per_s > 0.0:
            raise ValueError(f"trade_off_per_s must be positive, is {self.trade_off_per_s}")
        if not 1.0 <= self.least <= self.most:
            raise ValueError(
                f"least and most must be 1 <= least <= most, are {self.least} and {self.most}"
            )


def find_budget(policy: BudgetPolicy, variation: float, cost_s: float, trained: int) -> int:
    """Return how many samples all prompts of a batch start together (DARTS eq. 6 to 9).

    The utility variation * ln(B) - trade_off * (cost_s * B + constant) is largest at B = variation
    / (trade_off * cost_s), which is then clamped. variation: standard deviation over mean of the
    lengths, see `LengthStatistics.variation`. cost_s: of one more sample, see `sample_cost_s`; at 0
    the budget is the most. trained: samples that the batch trains.
    """
    least, most = math.ceil(policy.least * trained), math.floor(policy.most * trained)
    if cost_s <= 0.0:
        return most
    return int(min(max(variation / (policy.trade_off_per_s * cost_s), least), most))


def allocate(variances: Sequence[float] | Floats, budget: int, least: int, most: int) -> Indexes:
    """Return how many samples each prompt starts: `least` to `most`, together at most `budget`
    (DARTS eq. 5 and 10, Alg. 1).

    A prompt of variance v that starts r samples is w / r from its aim, where w is v min-max
    normalised over the batch (1 for all where all are alike). Greedy: each further sample goes
    where it lessens the sum of distances most, and of equal prompts to the earlier one. That is the
    optimum, since the gains of a prompt only fall: they are w / (r (r + 1)), so the largest of all
    of them are taken at once. A sample that gains nothing is not started.

    Raises ValueError for bounds that fit no allocation, or a variance that is negative or not
    finite.
    """
    of = np.asarray(variances, np.float64)
    if not 1 <= least <= most:
        raise ValueError(f"least and most must be 1 <= least <= most, are {least} and {most}")
    if budget < least * of.size:
        raise ValueError(
            f"budget must be at least {least} for each of {of.size} prompts, is {budget}"
        )
    if of.size and not (np.isfinite(of).all() and of.min() >= 0.0):
        raise ValueError("variances must be finite and not negative")
    counts = np.full(of.size, least, np.int64)
    if not of.size:
        return counts
    spread = float(of.max() - of.min())
    weights = (of - of.min()) / spread if spread > 0.0 else np.ones(of.size)
    at = np.arange(least, most, dtype=np.float64)
    gains = (weights[:, None] / (at * (at + 1.0))).ravel()
    extra = min(budget - least * of.size, int(np.count_nonzero(gains)))
    best = np.argsort(-gains, kind="stable")[:extra]
    np.add.at(counts, best // max(at.size, 1), 1)
    return counts


@dataclass
class Moments:
    """Moving averages of lengths and of their squares. seen: groups."""

    mean: float = 0.0
    square: float = 0.0
    seen: int = 0

    @property
    def variance(self) -> float:
        """Return the variance of the lengths, in tokens squared."""
        return max(self.square - self.mean * self.mean, 0.0)

    def observe(self, lengths: Floats, weight: float) -> None:
        """Count a group. The first groups are averaged, so that none of them counts more than
        others."""
        self.seen += 1
        share = max(weight, 1.0 / self.seen)
        self.mean += share * (float(lengths.mean()) - self.mean)
        self.square += share * (float((lengths * lengths).mean()) - self.square)


@dataclass
class LengthStatistics:
    """Moving averages of lengths in tokens, of each prompt and of all (DARTS §4.2.2, appendices B
    and C).

    The whole state is in these fields, so that a service can store them. prompt_weight, all_weight:
    of the newest group of a prompt, and of any group. within: mean variance within a group, which a
    prompt that was never seen is taken to have. A sample that was aborted counts with the tokens
    that it had.
    """

    prompts: dict[str, Moments] = field(default_factory=dict)
    all: Moments = field(default_factory=Moments)
    within: float = 0.0
    prompt_weight: float = 0.5
    all_weight: float = 0.002

    def observe(self, prompt_id: str, lengths: Sequence[int]) -> None:
        """Count a group. Raises ValueError for a length below 0; no lengths change nothing."""
        of = np.asarray(lengths, np.float64)
        if not of.size:
            return
        if of.min() < 0.0:
            raise ValueError(f"lengths of prompt {prompt_id!r} must not be negative")
        self.all.observe(of, self.all_weight)
        self.within += max(self.all_weight, 1.0 / self.all.seen) * (float(of.var()) - self.within)
        self.prompts.setdefault(prompt_id, Moments()).observe(of, self.prompt_weight)

    def variance(self, prompt_id: str) -> float:
        """Return the variance of the lengths of a prompt, in tokens squared."""
        known = self.prompts.get(prompt_id)
        return known.variance if known is not None else self.within

    @property
    def variation(self) -> float:
        """Return the standard deviation over the mean of all lengths; 0 before the first group."""
        return math.sqrt(self.all.variance) / self.all.mean if self.all.mean > 0.0 else 0.0
