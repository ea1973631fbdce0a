"""Samples of predicted lengths, and when a placement would finish in each of them.

A plan made of medians puts hundreds of trajectories that are predicted short on one engine; one of them is long after
all and decodes beside the hundreds, so with the errors of real predictors the plan ends later than plain balance. The
mean makespan over samples shows it before it happens. (The papers plan on one number for each trajectory.)

The same arguments give the same samples, so that placements are compared under the same lengths, and row r always takes
row r of the draws. A length is its median times exp(log_sigma * z), at most what the trajectory's cap leaves; without
any deviation there is one sample, the medians.
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle_core.compiled import Flags, Floats, Indexes, compiled, inlined
from treadle_core.placing.balance import finish_s

# Samples of one plan: 32 are enough for their mean; with thousands of trajectories, which even out chance among
# themselves, fewer, so that they take no longer than a sort.
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


class Samples(NamedTuple):
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


def draw_samples(
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
    drawn = draw(rows, lengths, log_sigma, room_tokens, *draws(), sample_count(n))
    return Samples(drawn, contexts, tool_s, prefill)


@dataclass(frozen=True)
class Fate:
    """How a placement ends in the samples.

    critical: for each engine whether it is the last one in some sample; a placement that takes nothing from a critical
    engine ends no earlier in any sample. least: whether no placement ends earlier, as the last trajectory of each
    sample has an engine to itself already and no engine is faster.
    """

    mean_makespan_s: float
    critical: Flags
    least: bool


def judge(engines: Floats, samples: Samples, placement: Indexes) -> Fate:
    """How a placement ends in the samples.

    engines: rows of base_s, per_sequence_s, per_kv_token_s, slots, KV tokens (inf where unknown), and seconds a
    prefilled token (0 where unknown); placement: row of each trajectory's engine, -1 for none.
    """
    times_s, last = finish_samples(engines, samples, placement)
    critical = np.zeros(len(engines), np.bool_)
    if not len(engines):  # all have left since the plan was asked for
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
    """Seconds that each of these trajectories takes alone on the engine that is fastest for it."""
    kv = lengths * (contexts + 0.5 * lengths)
    base_s, per_sequence_s, per_kv_token_s, slots, kv_tokens, prefill_s = engines.T[:, :, None]
    steps = np.maximum(np.maximum(lengths, lengths / slots), kv / kv_tokens)
    done_s = base_s * steps + per_sequence_s * lengths + per_kv_token_s * kv + prefill_s * prefill
    least_s: Floats = np.maximum(done_s, lengths * base_s + tool_s).min(axis=0)
    return least_s


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
    """The lengths of `draw_samples`."""
    result = np.empty((len(lengths), count))
    for index in range(len(lengths)):
        row = strata[rows[index] % len(strata)]
        draw_one(result[index], lengths[index], log_sigma[index], room_tokens[index], row, factors)
    return result


@inlined
def draw_one(
    lengths: Floats, median: float, log_sigma: float, room_tokens: float, row: npt.NDArray[np.uint8], factors: Floats
) -> None:
    """Write the samples of one trajectory. row: its strata."""
    factor = factors[min(int(log_sigma / SIGMA_STEP + 0.5), len(factors) - 1)]
    for sample in range(len(lengths)):
        lengths[sample] = min(median * factor[row[sample]], room_tokens)


@inlined
def add(sums: Floats, lengths: Floats, base_s: float, context: float, tool_s: float) -> None:
    """Add a trajectory to an engine. sums[4, samples]: longest, longest alone in seconds, tokens, KV tokens read.

    A loop for each sum, as the compiler then takes several samples at once.
    """
    for sample in range(sums.shape[1]):
        sums[0, sample] = max(sums[0, sample], lengths[sample])
    for sample in range(sums.shape[1]):
        sums[1, sample] = max(sums[1, sample], lengths[sample] * base_s + tool_s)
    for sample in range(sums.shape[1]):
        sums[2, sample] += lengths[sample]
    for sample in range(sums.shape[1]):
        sums[3, sample] += lengths[sample] * (context + 0.5 * lengths[sample])


@compiled
def finish_samples(engines: Floats, samples: Samples, placement: Indexes) -> tuple[Floats, Indexes]:
    """Seconds until the last engine finishes, and which one that is, in each sample; trajectories in any order. By the
    linear-integral cost of `costs`, and never before an engine's longest trajectory alone."""
    lengths, contexts, tool_s, prefill = samples
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
        engine, longest, alone_s, tokens, kv = engines[at], sums[at, 0], sums[at, 1], sums[at, 2], sums[at, 3]
        for sample in range(len(times)):
            decoded_s = finish_s(engine, longest[sample], 0.0, tokens[sample], kv[sample])
            done_s = max(decoded_s + prefill_s[at], alone_s[sample])
            if done_s > times[sample]:
                times[sample] = done_s
                last[sample] = at
    return times, last
