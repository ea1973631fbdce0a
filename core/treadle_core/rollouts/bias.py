"""Measure how shaping changes the distribution that is trained on: trained samples beside all
sampled ones, and alarms.

Every rule that chooses samples, aborts long ones or drops groups trains on another distribution
than the policy's. The guard counts both, by length, reward and difficulty (success rate of the
prompt), with the reasons of drops and the staleness of each trained token. Counts are in fixed
bins, so that they can be stored, added and compared. An aborted sample counts as sampled with the
tokens that it had, a lower bound of its length.

The kept fraction and its three regimes are a public lesson's on long-tail rollouts.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Floats
from treadle_core.rollouts.group import Candidate

# Upper edges of bins. Lengths: eight a doubling, so a quantile is within 5%; up to a million tokens
# and more.
LENGTH_EDGES = tuple(float(round(2.0 ** (at / 8.0), 6)) for at in range(1, 161))
REWARD_EDGES = tuple(round(-1.0 + 0.05 * at, 2) for at in range(1, 41))
RATE_EDGES = tuple(round(0.05 * at, 2) for at in range(1, 21))

# Kept fraction: from here on nothing much is dropped, below this more is thrown away than trained.
HARDLY_DROPPED, MOSTLY_DROPPED = 0.95, 0.5
LONG_QUANTILE = 0.9  # samples above it are the long ones
HARD_RATE = 0.25  # prompts that succeed at most this often are the hard ones
STARVED = (
    0.5  # of what is sampled: long or hard samples that are trained less than this are starved
)
LEAST_SAMPLES = 100  # below, shares differ by chance


@dataclass
class Histogram:
    """Counts in bins; `edges` are the upper ones, and the last bin takes all above too."""

    edges: tuple[float, ...]
    counts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin empty. Raises ValueError for counts of other bins."""
        self.counts = self.counts or [0.0] * len(self.edges)
        if len(self.counts) != len(self.edges):
            raise ValueError(f"a histogram of {len(self.edges)} bins has {len(self.counts)} counts")

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count a value."""
        self.counts[min(bisect_left(self.edges, value), len(self.edges) - 1)] += weight

    @property
    def total(self) -> float:
        return sum(self.counts)

    def shares(self) -> Floats:
        """Return the share of all values at or below each edge; zeros where nothing was counted."""
        running = np.cumsum(self.counts)
        return np.asarray(running / running[-1] if running[-1] > 0.0 else running)

    def quantile(self, fraction: float) -> float:
        """Return the upper edge of the bin in which this fraction is reached; 0 where nothing was
        counted."""
        if self.total <= 0.0:
            return 0.0
        return self.edges[int(np.searchsorted(self.shares(), fraction - 1e-12))]

    def share_above(self, value: float) -> float:
        """Return the share of what was counted in bins above the one of `value`."""
        at = bisect_left(self.edges, value)
        return float(1.0 - self.shares()[at]) if at < len(self.edges) and self.total > 0.0 else 0.0


def distance(one: Histogram, other: Histogram) -> float:
    """Return the largest difference of two histograms' shares at or below a value (Kolmogorov and
    Smirnov): 0 where they are alike, 1 where they are apart."""
    return float(np.abs(one.shares() - other.shares()).max()) if one.total and other.total else 0.0


@dataclass
class Pair:
    """One quantity of all sampled trajectories and of the trained ones."""

    sampled: Histogram
    trained: Histogram

    @property
    def distance(self) -> float:
        """Return the distance between the sampled and the trained values; see `distance`."""
        return distance(self.sampled, self.trained)

    def quantiles(self, fractions: Sequence[float] = (0.1, 0.5, 0.9)) -> dict[str, list[float]]:
        """Return quantiles of the sampled and of the trained values."""
        return {
            name: [getattr(self, name).quantile(each) for each in fractions]
            for name in ("sampled", "trained")
        }


class KeptFraction(NamedTuple):
    """Trained samples over samples that decoded, and a verdict on that."""

    value: float
    regime: str  # "all", "working" or "wasteful"
    verdict: str


def judge_kept(trained: float, decoded: float) -> KeptFraction:
    """Return the kept fraction and its regime; it is 1 where nothing was decoded."""
    value = trained / decoded if decoded > 0.0 else 1.0
    if value >= HARDLY_DROPPED:
        return KeptFraction(
            value,
            "all",
            "nearly every sample is trained; groups without advantage are paid for too",
        )
    if value >= MOSTLY_DROPPED:
        return KeptFraction(value, "working", "dropped samples buy shorter steps")
    verdict = (
        "more samples are dropped than trained: start fewer a prompt, or choose prompts of "
        "a better success rate"
    )
    return KeptFraction(value, "wasteful", verdict)


def _pair(edges: tuple[float, ...]) -> Pair:
    return Pair(Histogram(edges), Histogram(edges))


@dataclass
class BiasGuard:
    """Counts of one rollout, or of a window of steps. All state is in the fields, and plain.

    drops: samples that were not trained, by reason. stale_tokens: trained tokens by how many weight
    versions they were behind. sampled_tokens, trained_tokens: their sums.
    """

    success_at: float = 1.0
    length: Pair = field(default_factory=lambda: _pair(LENGTH_EDGES))
    reward: Pair = field(default_factory=lambda: _pair(REWARD_EDGES))
    rate: Pair = field(default_factory=lambda: _pair(RATE_EDGES))
    drops: dict[str, int] = field(default_factory=dict)
    stale_tokens: dict[int, int] = field(default_factory=dict)
    sampled_tokens: int = 0
    trained_tokens: int = 0

    def observe(
        self,
        candidates: Sequence[Candidate],
        trained: Collection[str],
        *,
        aborted_tokens: Sequence[int] = (),
        reasons: Mapping[str, str] | None = None,
        stale_tokens: Mapping[int, int] | None = None,
    ) -> None:
        """Count a group that has settled.

        candidates: samples that came. trained: keys of those that are trained. aborted_tokens: of
        the samples that were aborted. reasons: why a key was dropped; without one it is
        "not_chosen", or "failed". stale_tokens: trained tokens by versions behind, where they are
        known. Raises ValueError for a trained key that never came.
        """
        chosen = set(trained)
        unknown = chosen - {each.key for each in candidates}
        if unknown:
            raise ValueError(
                f"trained samples must be among the candidates, {min(unknown)!r} is not"
            )
        rewards = [
            each.reward for each in candidates if each.reward is not None and not each.failed
        ]
        rate = (
            sum(reward >= self.success_at for reward in rewards) / len(rewards) if rewards else None
        )
        for each in candidates:
            self._count(
                each.length_tokens, None if each.failed else each.reward, rate, each.key in chosen
            )
            if each.key not in chosen:
                self._drop((reasons or {}).get(each.key, "failed" if each.failed else "not_chosen"))
        for tokens in aborted_tokens:
            self._count(tokens, None, rate, trained=False)
            self._drop("aborted")
        for behind, tokens in (stale_tokens or {}).items():
            self.stale_tokens[behind] = self.stale_tokens.get(behind, 0) + tokens

    def _drop(self, reason: str) -> None:
        self.drops[reason] = self.drops.get(reason, 0) + 1

    def _count(self, tokens: int, reward: float | None, rate: float | None, trained: bool) -> None:
        known = [(self.length, float(tokens))]
        known += [
            (pair, value)
            for pair, value in ((self.reward, reward), (self.rate, rate))
            if value is not None
        ]
        for pair, value in known:
            pair.sampled.add(value)
            if trained:
                pair.trained.add(value)
        self.sampled_tokens += tokens
        self.trained_tokens += tokens * trained

    @property
    def kept(self) -> KeptFraction:
        """Return the kept fraction of the samples that decoded."""
        return judge_kept(self.length.trained.total, self.length.sampled.total)

    @property
    def mean_staleness(self) -> float:
        """Return how many weight versions a trained token is behind on average; 0 where none was
        counted."""
        tokens = sum(self.stale_tokens.values())
        return (
            sum(behind * count for behind, count in self.stale_tokens.items()) / tokens
            if tokens
            else 0.0
        )

    def alarms(self) -> list[str]:
        """Return a sentence for each kind of sample that shaping starves: what, by how much, and
        what to change."""
        if self.length.sampled.total < LEAST_SAMPLES:
            return []
        found = []
        edge = self.length.sampled.quantile(LONG_QUANTILE)
        sampled, trained = (
            self.length.sampled.share_above(edge),
            self.length.trained.share_above(edge),
        )
        if trained < STARVED * sampled:
            found.append(
                f"Long samples are starved: {sampled:.1%} of sampled and {trained:.1%} of trained "
                f"samples have more than {edge:,.0f} tokens. Train more of the longest of a group, "
                f"prune fewer prompts, or raise the cap."
            )
        sampled, trained = (
            float(each.shares()[_HARD_BIN]) for each in (self.rate.sampled, self.rate.trained)
        )
        if trained < STARVED * sampled:
            found.append(
                f"Hard prompts are starved: {sampled:.1%} of sampled and {trained:.1%} of trained "
                f"samples belong to prompts that succeed at most {HARD_RATE:.0%} of the time. "
                f"Start more samples of them, or keep their groups where all samples fail."
            )
        kept = self.kept
        if kept.regime == "wasteful":
            found.append(f"The kept fraction is {kept.value:.2f}: {kept.verdict}.")
        return found


_HARD_BIN = RATE_EDGES.index(HARD_RATE)
