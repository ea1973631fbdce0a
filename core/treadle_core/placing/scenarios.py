"""What could come of the predictions: a few samples of everybody's lengths at once, and when a placement would be done
in each.

Beyond the papers, which plan on one number a trajectory. A plan made of medians puts hundreds that are guessed short on
one engine, and one of them is long after all and decodes beside the hundreds: with the errors that predictors have,
such a plan ends later than plain balance. The mean makespan over the samples says so before it happens.

Invariants: the same arguments give the same samples, so that two placements are compared under the same fates, and the
same row fares alike at each plan (row r takes row r of the draws). A length is its median times exp(log_sigma * z),
never more than what the trajectory's cap leaves; without any deviation there is one sample, the medians.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from treadle_core.compiled import compiled, inlined
from treadle_core.placing.balance import finish_s

Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Samples of one plan: enough that their mean says more than chance (32), and few enough that thousands of
# trajectories, whose number evens chance out, take no longer than a sort of them.
MOST_SAMPLES = 32
LEAST_SAMPLES = 8
CELLS = 1 << 16  # samples times trajectories, about
LANES = 8  # samples come in multiples of what a processor takes at once

# z comes from this many equally probable strata of the normal distribution; a row's samples are of different ones.
LEVELS = 64
ROWS = 4_099  # a prime: rows that come again do so out of step with anything in the workload
# exp(log_sigma * z) is tabulated for deviations in these steps.
SIGMA_STEPS = 128
SIGMA_STEP = 1.0 / 48.0
# Times that are equal but for the order of sums differ by less than this part.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Samples:
    """lengths[i, s]: tokens of trajectory i in sample s. contexts: tokens in KV now, or mean ones. tool_s: seconds of
    tools left. prefill: tokens that whichever engine runs it must prefill first."""

    lengths: Floats
    contexts: Floats
    tool_s: Floats
    prefill: Floats


@cache
def draws() -> tuple[npt.NDArray[np.uint8], Floats]:
    """strata[ROWS, MOST_SAMPLES]: a stratum each; factors[SIGMA_STEPS, LEVELS]: what it makes of a length."""
    rng = np.random.default_rng(0)
    every = LEVELS // MOST_SAMPLES
    strata = np.tile(np.arange(MOST_SAMPLES) * every, (ROWS, 1))
    strata = rng.permuted(strata, axis=1) + rng.integers(0, every, strata.shape)
    z = np.array([NormalDist().inv_cdf((level + 0.5) / LEVELS) for level in range(LEVELS)])
    factors = np.exp(np.arange(SIGMA_STEPS)[:, None] * SIGMA_STEP * z[None, :])
    return strata.astype(np.uint8), factors


def sample_count(trajectories: int) -> int:
    """How many samples of a plan for at least one trajectory."""
    return min(MOST_SAMPLES, max(LEAST_SAMPLES, CELLS // trajectories // LANES * LANES))


def sampled(
    rows: Indexes,
    lengths: Floats,
    contexts: Floats,
    tool_s: Floats,
    log_sigma: Floats,
    room_tokens: Floats,
    prefill: Floats | None = None,
) -> Samples:
    """Samples of n trajectories. lengths: medians in tokens; log_sigma: standard deviation of ln(length); room_tokens:
    what each cap leaves, inf without one."""
    n = len(lengths)
    prefill = np.zeros(n) if prefill is None else prefill
    if n == 0 or not log_sigma.any():
        return Samples(np.minimum(lengths, room_tokens)[:, None].copy(), contexts, tool_s, prefill)
    strata, factors = draws()
    return Samples(
        draw(rows, lengths, log_sigma, room_tokens, strata, factors, sample_count(n)), contexts, tool_s, prefill
    )


@dataclass(frozen=True)
class Fate:
    """What samples make of a placement.

    critical: of each engine whether it is the last in one of them; a placement under which nothing leaves a critical
    engine is done no sooner in any sample. least: whether no placement whatever is, as what is last in each has an
    engine to itself already, and none would be faster.
    """

    mean_makespan_s: float
    critical: Flags
    least: bool


def makespans(engines: Floats, samples: Samples, placement: Indexes) -> Floats:
    """Seconds until the last engine is done, in each sample. engines: rows of base_s, per_sequence_s, per_kv_token_s,
    slots, KV tokens (inf where unknown), and seconds a prefilled token (0 where unknown); placement: an engine's row a
    trajectory, -1 for none."""
    return _finished(engines, samples, placement)[0]


def mean_makespan(engines: Floats, samples: Samples, placement: Indexes) -> float:
    """The mean of `makespans`; 0 for nothing."""
    return float(makespans(engines, samples, placement).mean())


def fate(engines: Floats, samples: Samples, placement: Indexes) -> Fate:
    """The mean of `makespans`, and what it is due to."""
    times_s, last = _finished(engines, samples, placement)
    critical = np.zeros(len(engines), np.bool_)
    if not len(engines):  # the last one has left since the plan was asked for
        return Fate(0.0, critical, False)
    critical[last] = True
    runs = np.flatnonzero(critical[placement] & (placement >= 0))
    least = len(runs) == np.count_nonzero(critical)
    if least:
        alone = np.zeros(len(engines), np.int64)
        alone[placement[runs]] = runs
        index, sample = alone[last], np.arange(len(last))
        of_index = samples.contexts[index], samples.tool_s[index], samples.prefill[index]
        least_s = least_alone_s(engines, samples.lengths[index, sample], *of_index)
        least = bool((least_s >= times_s * (1.0 - ROUNDING)).all())
    return Fate(float(times_s.mean()), critical, least)


def least_alone_s(engines: Floats, lengths: Floats, contexts: Floats, tool_s: Floats, prefill: Floats) -> Floats:
    """Seconds that each of these trajectories takes at the least, alone on whichever engine is fastest for it."""
    kv = lengths * (contexts + 0.5 * lengths)
    base_s, per_sequence_s, per_kv_token_s, slots, kv_tokens, prefill_s = engines.T[:, :, None]
    steps = np.maximum(np.maximum(lengths, lengths / slots), kv / kv_tokens)
    done_s = base_s * steps + per_sequence_s * lengths + per_kv_token_s * kv + prefill_s * prefill
    least_s: Floats = np.maximum(done_s, lengths * base_s + tool_s).min(axis=0)
    return least_s


def _finished(engines: Floats, samples: Samples, placement: Indexes) -> tuple[Floats, Indexes]:
    return finished(engines, samples.lengths, samples.contexts, samples.tool_s, samples.prefill, placement)


@compiled
def draw(
    rows: Indexes,
    lengths: Floats,
    log_sigma: Floats,
    room_tokens: Floats,
    strata: npt.NDArray[np.uint8],
    factors: Floats,
    count: int,
) -> Floats:
    """`sampled`'s lengths."""
    result = np.empty((len(lengths), count))
    for index in range(len(lengths)):
        row = strata[rows[index] % len(strata)]
        draw_one(result[index], lengths[index], log_sigma[index], room_tokens[index], row, factors)
    return result


@inlined
def draw_one(
    lengths: Floats,
    median: float,
    log_sigma: float,
    room_tokens: float,
    row: npt.NDArray[np.uint8],
    factors: Floats,
) -> None:
    """Writes the samples of one trajectory. row: its strata."""
    factor = factors[min(int(log_sigma / SIGMA_STEP + 0.5), len(factors) - 1)]
    for sample in range(len(lengths)):
        lengths[sample] = min(median * factor[row[sample]], room_tokens)


@inlined
def add(sums: Floats, lengths: Floats, base_s: float, context: float, tool_s: float) -> None:
    """One more trajectory on an engine. sums[4, samples]: longest, longest alone in seconds, tokens, KV tokens read.

    A loop for each sum: the compiler then takes several samples at once, which it does not where one loop writes all.
    """
    for sample in range(sums.shape[1]):
        sums[0, sample] = max(sums[0, sample], lengths[sample])
    for sample in range(sums.shape[1]):
        sums[1, sample] = max(sums[1, sample], lengths[sample] * base_s + tool_s)
    for sample in range(sums.shape[1]):
        sums[2, sample] += lengths[sample]
    for sample in range(sums.shape[1]):
        sums[3, sample] += lengths[sample] * (context + 0.5 * lengths[sample])


@inlined
def end(times: Floats, last: Indexes, at: int, sums: Floats, engine: Floats, prefill_s: float) -> None:
    """Engine `at` is done: the linear-integral cost of `costs.py`, and never before its longest alone."""
    for sample in range(len(times)):
        decoded_s = finish_s(engine, sums[0, sample], 0.0, sums[2, sample], sums[3, sample])
        done_s = max(decoded_s + prefill_s, sums[1, sample])
        if done_s > times[sample]:
            times[sample] = done_s
            last[sample] = at


@compiled
def finished(
    engines: Floats, lengths: Floats, contexts: Floats, tool_s: Floats, prefill: Floats, placement: Indexes
) -> tuple[Floats, Indexes]:
    """`makespans`, and the engine that each is due to, of trajectories in any order."""
    prefill_s = np.zeros(len(engines))
    sums = np.zeros((len(engines), 4, lengths.shape[1]))
    for index in range(len(placement)):
        at = placement[index]
        if at >= 0:
            prefill_s[at] += prefill[index] * engines[at, 5]
            add(sums[at], lengths[index], engines[at, 0], contexts[index], tool_s[index])
    times = np.zeros(lengths.shape[1])
    last = np.zeros(lengths.shape[1], np.int64)
    for at in range(len(engines)):
        end(times, last, at, sums[at], engines[at], prefill_s[at])
    return times, last


def warm_up() -> None:
    """Compiles the kernels, or loads them."""
    one = np.ones(1)
    samples = sampled(np.zeros(1, np.int64), one, one, one, one, one)
    makespans(np.ones((1, 6)), samples, np.zeros(1, np.int64))
