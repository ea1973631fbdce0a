"""Estimate how long a batch waits for its longest samples, where lengths are log-normal, and what
ends that wait sooner.

Lengths of mean 1 and coefficient of variation c have s = sqrt(ln(1 + c²)) on the log scale. A
public lesson on long-tail rollouts has the formula of the longest of K, and two of its patches: a
cap on lengths, and more samples a prompt than are trained, of which the last are aborted.
`play_tail` plays one rollout on one engine that decodes all samples at once, by DARTS' cost of a
decode (eq. 4, `redundancy.LatencyCurve`).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from treadle_core.compiled import Flags, Floats
from treadle_core.rollouts.bias import KeptFraction, judge_kept
from treadle_core.rollouts.redundancy import LatencyCurve

LAST_TENTH = (
    0.9  # the straggler tax is the time from here on: after nine tenths of the samples have ended
)


def log_sigma(c: float) -> float:
    """Return the standard deviation of the log of a log-normal length with coefficient of variation
    `c`."""
    return math.sqrt(math.log1p(c * c))


def lengths_of(normal: Floats, c: float) -> Floats:
    """Return log-normal lengths of mean 1 from standard normal values, of the same shape."""
    s = log_sigma(c)
    return np.asarray(np.exp(s * np.asarray(normal) - 0.5 * s * s))


def longest_by_formula(k: int, c: float) -> float:
    """Return the lesson's approximation of the longest of `k`, in means: exp(s sqrt(2 ln k) -
    s²/2)."""
    return float(lengths_of(np.asarray(math.sqrt(2.0 * math.log(k))), c))


def expected_longest(k: int, c: float) -> float:
    """Return the mean longest of `k`, in means: the integral of exp(s z - s²/2) over the density of
    the maximum of k normals."""
    # outside, the integrand is below 1e-12 for every k and c in use
    z = np.linspace(-9.0, 14.0, 4_601)
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2.0)) for each in z.tolist()])
    density = k * below ** (k - 1) * np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return float(np.trapezoid(lengths_of(z, c) * density, z))


@dataclass(frozen=True, slots=True)
class TailQuestion:
    """Question about a rollout of `prompts` prompts. started: samples of each that begin. trained:
    how many of each, the first that end; the others are then aborted. mean_tokens, variation: of
    the lengths. cap_percentile: of all lengths, where samples are cut; 1 for no cap. curve: of the
    engine."""

    prompts: int
    started: int
    trained: int
    mean_tokens: float
    variation: float
    cap_percentile: float
    curve: LatencyCurve

    def __post_init__(self) -> None:
        """Raise ValueError that names the field that is wrong."""
        if self.prompts < 1:
            raise ValueError(f"prompts must be at least 1, is {self.prompts}")
        if not 1 <= self.trained <= self.started:
            raise ValueError(f"trained must be 1 to started ({self.started}), is {self.trained}")
        for name in ("mean_tokens", "variation"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, is {getattr(self, name)}")
        if not 0.0 < self.cap_percentile <= 1.0:
            raise ValueError(
                f"cap_percentile must be above 0 and at most 1, is {self.cap_percentile}"
            )

    @property
    def cap_tokens(self) -> float:
        """Return the length at which samples are cut; infinite for no cap."""
        if self.cap_percentile == 1.0:
            return math.inf
        z = np.asarray(NormalDist().inv_cdf(self.cap_percentile))
        return float(self.mean_tokens * lengths_of(z, self.variation))


@dataclass(frozen=True, slots=True)
class Tail:
    """Outcome of one rollout. ends_s, tokens: of each sample, the first to end first. aborted, cut:
    of each, whether it was. makespan_s: until the last ends. tax: the longest end over the mean
    end, less 1 (the lesson's). last_tenth: share of the makespan after nine tenths of the samples
    have ended. utilization: share of the places in the batch that decode."""

    ends_s: Floats
    tokens: Floats
    aborted: Flags
    cut: Flags
    makespan_s: float
    tax: float
    last_tenth: float
    utilization: float
    kept: KeptFraction


def play_tail(question: TailQuestion, normals: Floats) -> Tail:
    """Return the rollout for these standard normal values, of the shape (prompts, started)."""
    shape = (question.prompts, question.started)
    if normals.shape != shape:
        raise ValueError(f"normals must have the shape {shape}, has {normals.shape}")
    drawn = question.mean_tokens * lengths_of(normals, question.variation)
    capped = np.minimum(drawn, question.cap_tokens)
    # All decode at the same pace, so a prompt settles when its `trained`-th shortest sample ends.
    order = np.argsort(capped, axis=1, kind="stable")
    trained = np.zeros(shape, bool)
    np.put_along_axis(trained, order[:, : question.trained], True, axis=1)
    settled = np.max(np.where(trained, capped, 0.0), axis=1, keepdims=True)
    tokens = np.where(trained, capped, settled).ravel()
    at = np.argsort(tokens, kind="stable")
    ascending = tokens[at]
    alive = np.arange(ascending.size, 0, -1, dtype=np.float64)
    ends_s = np.cumsum(question.curve.latency_s(alive) * np.diff(ascending, prepend=0.0))
    makespan_s, mean_s = float(ends_s[-1]), float(ends_s.mean())
    nine_tenths = float(ends_s[math.ceil(LAST_TENTH * ends_s.size) - 1])
    return Tail(
        ends_s=ends_s,
        tokens=ascending,
        aborted=~trained.ravel()[at],
        cut=(trained & (drawn > question.cap_tokens)).ravel()[at],
        makespan_s=makespan_s,
        tax=makespan_s / mean_s - 1.0,
        last_tenth=1.0 - nine_tenths / makespan_s,
        utilization=mean_s / makespan_s,
        kept=judge_kept(question.prompts * question.trained, question.prompts * question.started),
    )
