"""Compute when engines end a placement of trajectories whose tools take time: the larger of their
work and of a path.

An engine decodes a step of a batch in a + b * batch + k * KV tokens, and prefills a token in p + h
* (tokens before it). A trajectory with d tokens left to sample and o tokens of tools' answers to
read is w = b d + k q + p o + h r seconds of work for it, where q = d * c and r = o * c, with c =
context + (d + o) / 2 its mean context. Alone it needs a d + w seconds besides its tools' s. Beside
others whose work adds up to W it waits for the share of W that falls into its own decode time x, as
the others work all through its life x + s: x = a d + w + W x / (x + s). So its path is s + x, where
x is the positive root of x^2 + (s - a d - w - W) x - (a d + w) s = 0: a d + w + W without tools, a
d + w with endless ones. An engine ends with the longest path on it, and not before a * max(sum d /
slots, sum q / KV) + sum w + prompts.

A prompt is prefilled once on each engine that has samples of it and none whose context is read
there, the prompt of the longest path first. A trajectory whose context is not read waits for those
prompts; the others are work beside it.

Predictions are uncertain: a placement is judged by the mean, over samples of all lengths, of when
its last engine ends. A plan of medians would put hundreds of trajectories that are predicted short
on one engine, where one that is long after all ends late. In a sample a trajectory's tokens,
answers and tools are its medians times one factor, exp(log_sigma * z), within what its cap leaves.
The same rows give the same samples, so that placements are compared under the same lengths. (Heddle
§5.2 and DARTS eq. 4 plan on one number for each trajectory, and without tools.)
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from treadle_core.compiled import Flags, Floats, Indexes, compiled, inlined
from treadle_core.placing.question import PlanEngine

# Columns of engines: the last two are seconds of prefill for each token, and for each pair of
# tokens.
BASE_S, PER_SEQUENCE_S, PER_KV_TOKEN_S, SLOTS, KV_TOKENS, PREFILL_S, PREFILL_PAIR_S = range(7)
# Amounts of a trajectory: d, q, o, r and s of the module's docstring.
TOKENS, KV, OBSERVED, PAIRS, TOOL_S = range(5)

# Samples of one plan: 32 are enough for their mean; with thousands of trajectories, which even out
# chance among themselves, fewer.
MOST_SAMPLES = 32
LEAST_SAMPLES = 8
CELLS = 1 << 16  # samples times trajectories, about
# z comes from this many equally probable strata of the normal distribution; a row's samples are of
# different ones.
LEVELS = 64
ROWS = 4_099  # a prime: rows that come again do so out of step with anything in the workload
# The part of a prediction's doubt that a plan accounts for: predictions improve and trajectories
# move before they end. On public traces 0.6 ended rollouts up to 10% sooner than 1, 0 up to 8%
# later where tools bind; 0.3 was in between.
RECOURSE = 0.6
# Deviation that is sampled also where lengths are known, since the cost model errs itself: without
# it a plan of known lengths followed each second that the model got wrong, and on 64 GPUs ended
# rollouts 10% later than guessing.
LEAST_SIGMA = 0.1
# Of prompts, while trajectories wait for a slot. On public traces of three trajectories a slot 8
# was nearly as good, 1 was 2% worse in the mean and 64 was 1% worse; where all start at once, 16
# was up to 9% worse than 1.
WAITING_WEIGHT = 16.0
CHANCE = 2.0  # standard errors of a mean gain that tens of candidates reach by chance
# exp(log_sigma * z) is tabulated for deviations in these steps.
SIGMA_STEPS = 128
SIGMA_STEP = 1.0 / 48.0


class Work(NamedTuple):
    """Work that is left of n trajectories. amounts[samples, n, 5]; contexts: tokens now; started:
    it runs on its engine; read: its engine has prefilled its context; prompts: a number for each
    prompt, from 0."""

    amounts: Floats
    contexts: Floats
    started: Flags
    read: Flags
    prompts: Indexes


def number_kinds(figures: Iterable[Hashable]) -> Indexes:
    """Return a number for each engine, the same for engines with equal figures."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(each, len(numbers)) for each in figures], np.int64)


def engine_rows(engines: Sequence[PlanEngine]) -> Floats:
    """Return the engines as the kernels read them, in the caller's order."""
    rows = np.zeros((len(engines), PREFILL_PAIR_S + 1))
    for row, engine in zip(rows, engines, strict=True):
        curve, capacity = engine.decode_curve, engine.kv_tokens_capacity
        row[:PREFILL_S] = (
            *(curve.base_s, curve.per_sequence_s, curve.per_kv_token_s),
            *(max(1, engine.slot_limit), capacity or np.inf),
        )
        row[PREFILL_S] = 1.0 / curve.prefill_tokens_per_s if curve.prefill_tokens_per_s else 0.0
        row[PREFILL_PAIR_S] = curve.prefill_pair_s
    return rows


def kinds_of(engines: Sequence[PlanEngine]) -> Indexes:
    """Return a number for each engine, the same for engines with equal figures."""
    return number_kinds(
        (each.slot_limit, each.kv_tokens_capacity, each.tensor_parallel, each.decode_curve)
        for each in engines
    )


def work_of(
    tokens: Floats,
    contexts: Floats,
    observed: Floats,
    tool_s: Floats,
    started: Flags,
    read: Flags,
    prompts: Indexes,
    factors: Floats | None = None,
) -> Work:
    """Return the work at its medians, or times factors[samples, n]. observed: tokens of tools'
    answers still to come."""
    factors = np.ones((1, len(tokens))) if factors is None else factors
    d, o = tokens * factors, observed * factors
    mean_contexts = contexts + 0.5 * (d + o)
    amounts = np.stack((d, d * mean_contexts, o, o * mean_contexts, tool_s * factors), axis=2)
    return Work(amounts, contexts, started, read, prompts)


def sample_factors(rows: Indexes, log_sigma: Floats, tokens: Floats, room_tokens: Floats) -> Floats:
    """Return factors[samples, n], by which each sample multiplies a length.

    rows: a number of each trajectory, which gives it the same samples in every plan. log_sigma:
    standard deviation of ln(length), of which RECOURSE is sampled, but at least LEAST_SIGMA;
    room_tokens: what the cap leaves."""
    n = len(rows)
    most = room_tokens / np.maximum(tokens, 1.0)
    if n == 0:
        return np.minimum(np.ones((1, n)), most)
    count = min(MOST_SAMPLES, max(LEAST_SAMPLES, CELLS // n))
    strata, table = _draws()
    sigmas = np.maximum(RECOURSE * log_sigma, LEAST_SIGMA)
    steps = np.minimum((sigmas / SIGMA_STEP + 0.5).astype(np.int64), SIGMA_STEPS - 1)
    factors: Floats = np.minimum(table[steps, strata[:count, rows % ROWS]], most)
    return np.ascontiguousarray(factors)  # kernels are compiled for each layout of their arrays


@cache
def _draws() -> tuple[Indexes, Floats]:
    """Return strata[MOST_SAMPLES, ROWS], a stratum for each sample and row, and table[SIGMA_STEPS,
    LEVELS], the factors of a length."""
    rng = np.random.default_rng(0)
    every = LEVELS // MOST_SAMPLES
    strata = np.tile(np.arange(MOST_SAMPLES) * every, (ROWS, 1))
    strata = rng.permuted(strata, axis=1) + rng.integers(0, every, strata.shape)
    z = np.array([NormalDist().inv_cdf((level + 0.5) / LEVELS) for level in range(LEVELS)])
    return np.ascontiguousarray(strata.T), np.exp(
        np.arange(SIGMA_STEPS)[:, None] * SIGMA_STEP * z[None, :]
    )


def makespans_s(engines: Floats, work: Work, placement: Indexes) -> Floats:
    """Return when the last engine ends in each sample; infinite where a context does not fit its
    engine's KV."""
    times: Floats = finish(engines, work, placement)[0].max(axis=0, initial=0.0)
    return times


def is_better(found_s: Floats, best_s: Floats, margin: float) -> bool:
    """Return whether makespans are less than the best so far, by `margin` of their mean and by more
    than chance alone gives in so few samples."""
    if not (np.isfinite(found_s).all() and np.isfinite(best_s).all()):
        return bool(np.isfinite(found_s).all())
    gains_s = best_s - found_s
    by_chance_s = CHANCE * gains_s.std() / np.sqrt(len(gains_s))
    return bool(gains_s.mean() > margin * best_s.mean() + by_chance_s)


@compiled
def least_s(engines: Floats, work: Work) -> float:
    """Return the seconds before which no placement ends at the medians: the longest path alone on
    the engine that is fastest for it, and all work shared by all engines, each trajectory's at the
    engine that has least of it."""
    longest_s = shared_s = 0.0
    for amounts in work.amounts[0]:
        alone_s = least_work_s = np.inf
        for engine in engines:
            own_s = work_s(engine, amounts)
            least_work_s = min(least_work_s, own_s)
            alone_s = min(alone_s, engine[BASE_S] * amounts[TOKENS] + own_s + amounts[TOOL_S])
        longest_s = max(longest_s, alone_s)
        shared_s += least_work_s
    return max(longest_s, shared_s / len(engines))


@inlined
def path_s(own_s: float, tool_s: float, others_s: float) -> float:
    """Return the seconds until a trajectory ends that needs own_s alone, beside others with
    others_s of work."""
    half = 0.5 * (own_s + others_s - tool_s)
    return float(tool_s + half + np.sqrt(half * half + own_s * tool_s))


@inlined
def work_s(engine: Floats, amounts: Floats) -> float:
    """Return the seconds of an engine's work for a trajectory: w of the module's docstring."""
    decode_s = engine[PER_SEQUENCE_S] * amounts[TOKENS] + engine[PER_KV_TOKEN_S] * amounts[KV]
    return float(
        decode_s + engine[PREFILL_S] * amounts[OBSERVED] + engine[PREFILL_PAIR_S] * amounts[PAIRS]
    )


@inlined
def prompt_s(engine: Floats, tokens: float) -> float:
    """Return the seconds to prefill a prompt."""
    return float(engine[PREFILL_S] * tokens + 0.5 * engine[PREFILL_PAIR_S] * tokens * tokens)


@compiled
def prompt_weight(engines: Floats, count: int) -> float:
    """Return the weight of the seconds of prompts where placements of `count` trajectories are
    compared. It is larger while some of them wait for a slot: a later plan can still send these to
    another engine than their prompt's."""
    return WAITING_WEIGHT if count > engines[:, SLOTS].sum() else 1.0


@inlined
def worked_s(engine: Floats, tokens: float, kv_tokens: float, all_work_s: float) -> float:
    """Return the seconds until an engine has done work that adds up to these figures."""
    return float(
        engine[BASE_S] * max(tokens / engine[SLOTS], kv_tokens / engine[KV_TOKENS]) + all_work_s
    )


@compiled
def prompts_there(work: Work, placement: Indexes, engines: int) -> Flags:
    """Return there[engine, prompt]: whether a sample's context is read on the engine, and with it
    the prompt."""
    there = np.zeros((engines, work.prompts.max() + 1), np.bool_)
    for index in range(len(placement)):
        if work.read[index] and placement[index] >= 0:
            there[placement[index], work.prompts[index]] = True
    return there


@compiled
def reading_order(engines: Floats, work: Work) -> Indexes:
    """Return the trajectories with the longest mean path alone first: the order in which engines
    prefill prompts."""
    base_s = engines[:, BASE_S].mean()
    engine = engines[0].copy()
    for column in range(len(engine)):
        engine[column] = engines[:, column].mean()
    path_s = np.zeros(len(work.contexts))
    for amounts in work.amounts:
        for index in range(len(path_s)):
            path_s[index] += (
                base_s * amounts[index, TOKENS]
                + work_s(engine, amounts[index])
                + amounts[index, TOOL_S]
            )
    return np.argsort(-path_s, kind="mergesort")


@compiled
def members_of(placement: Indexes, order: Indexes, engines: int) -> tuple[Indexes, Indexes]:
    """Return first[engines + 1] and members: engine e runs members[first[e] : first[e + 1]], in the
    given order."""
    first = np.zeros(engines + 1, np.int64)
    for at in placement:
        if at >= 0:
            first[at + 1] += 1
    first = np.cumsum(first)
    filled, members = first.copy(), np.empty(first[-1], np.int64)
    for index in order:
        at = placement[index]
        if at >= 0:
            members[filled[at]] = index
            filled[at] += 1
    return first, members


@compiled
def end_engine(
    engine: Floats,
    work: Work,
    members: Indexes,
    seen: Flags,
    waits_s: Floats,
    own_s: Floats,
    times: Floats,
) -> float:
    """Write when an engine ends its members in each sample to times[samples], and return its
    seconds of prompts.

    members: in the order in which their prompts are read. seen[prompts]: False, before and after;
    waits_s and own_s: scratch of n.
    """
    prompts_s = 0.0
    for index in members:
        if work.contexts[index] > engine[KV_TOKENS]:
            times[:] = np.inf
            return 0.0
    for index in members:
        seen[work.prompts[index]] |= work.read[index]
    for index in members:
        waits_s[index] = 0.0
        if not work.read[index]:
            if not seen[work.prompts[index]]:
                seen[work.prompts[index]] = True
                prompts_s += prompt_s(engine, work.contexts[index])
            waits_s[index] = prompts_s
    for index in members:
        seen[work.prompts[index]] = False
    for sample in range(len(times)):
        tokens = kv_tokens = 0.0
        all_work_s = prompts_s
        amounts = work.amounts[sample]
        for index in members:
            own_s[index] = work_s(engine, amounts[index])
            tokens += amounts[index, TOKENS]
            kv_tokens += amounts[index, KV]
            all_work_s += own_s[index]
        ends_s = worked_s(engine, tokens, kv_tokens, all_work_s)
        for index in members:
            alone_s = engine[BASE_S] * amounts[index, TOKENS] + own_s[index]
            others_s = all_work_s - own_s[index] - waits_s[index]
            ends_s = max(
                ends_s, waits_s[index] + path_s(alone_s, amounts[index, TOOL_S], max(others_s, 0.0))
            )
        times[sample] = ends_s
    return prompts_s


@compiled
def finish(engines: Floats, work: Work, placement: Indexes) -> tuple[Floats, Floats]:
    """Return times[engines, samples], seconds until each engine ends, and the seconds of each
    engine's prompts. placement: index of an engine, -1 for none."""
    m, n = len(engines), len(placement)
    times, prompts_s = np.zeros((m, len(work.amounts))), np.zeros(m)
    if n == 0:
        return times, prompts_s
    first, members = members_of(placement, reading_order(engines, work), m)
    seen, waits_s, own_s = np.zeros(work.prompts.max() + 1, np.bool_), np.empty(n), np.empty(n)
    for at in range(m):
        group = members[first[at] : first[at + 1]]
        prompts_s[at] = end_engine(engines[at], work, group, seen, waits_s, own_s, times[at])
    return times, prompts_s


@compiled
def deal(
    engines: Floats,
    work: Work,
    placement: Indexes,
    order: Indexes,
    unit_of: Indexes,
    allowed: Flags,
) -> Indexes:
    """Give the trajectories of `order` to the allowed engine that then ends first, one unit after
    the other.

    unit_of: trajectories with the same number stay together; the first of a unit in `order` should
    be its longest. A trajectory whose context fits no allowed engine stays where it is. Work at its
    medians: one sample.
    """
    m, result = len(engines), placement.copy()
    amounts = work.amounts[0]
    dealt = np.zeros(len(placement), np.bool_)
    units = 0
    for index in order:
        dealt[index] = True
        units = max(units, unit_of[index] + 1)
    there = prompts_there(work, np.where(dealt, -1, placement), m)
    tokens, kv_tokens, all_work_s = np.zeros(m), np.zeros(m), np.zeros(m)
    for index in range(len(placement)):
        at = placement[index]
        if at >= 0 and not dealt[index]:
            if not there[at, work.prompts[index]]:
                there[at, work.prompts[index]] = True
                all_work_s[at] += prompt_s(engines[at], work.contexts[index])
            tokens[at] += amounts[index, TOKENS]
            kv_tokens[at] += amounts[index, KV]
            all_work_s[at] += work_s(engines[at], amounts[index])
    sums = np.zeros((units, PAIRS + 1))
    contexts = np.zeros(units)
    for index in order:
        for column in range(PAIRS + 1):
            sums[unit_of[index], column] += amounts[index, column]
        contexts[unit_of[index]] = max(contexts[unit_of[index]], work.contexts[index])
    engine_of = np.full(units, -1)
    for index in order:
        unit = unit_of[index]
        if engine_of[unit] < 0:
            best, least_s = -1, np.inf
            for at in range(m):
                engine = engines[at]
                if not allowed[at] or contexts[unit] > engine[KV_TOKENS]:
                    continue
                unit_s = work_s(engine, sums[unit])
                if not there[at, work.prompts[index]]:
                    unit_s += prompt_s(engine, work.contexts[index])
                done_s = worked_s(
                    engine,
                    tokens[at] + sums[unit, TOKENS],
                    kv_tokens[at] + sums[unit, KV],
                    all_work_s[at] + unit_s,
                )
                own_s = engine[BASE_S] * amounts[index, TOKENS] + work_s(engine, amounts[index])
                others_s = all_work_s[at] + unit_s - work_s(engine, amounts[index])
                ends_s = max(done_s, path_s(own_s, amounts[index, TOOL_S], others_s))
                if ends_s < least_s:
                    best, least_s = at, ends_s
            if best < 0:
                continue
            engine_of[unit] = best
            tokens[best] += sums[unit, TOKENS]
            kv_tokens[best] += sums[unit, KV]
            all_work_s[best] += work_s(engines[best], sums[unit])
            if not there[best, work.prompts[index]]:
                all_work_s[best] += prompt_s(engines[best], work.contexts[index])
                there[best, work.prompts[index]] = True
        result[index] = engine_of[unit]
    return result


@compiled
def savings_s(
    engines: Floats, work: Work, placement: Indexes, moving: Indexes, targets: Indexes
) -> Floats:
    """Return for each trajectory in `moving` the seconds by which the later of its two engines ends
    earlier if it alone moves. Work at its medians; its prompt moves with its context."""
    m, amounts = len(engines), work.amounts[0]
    prompts_s = finish(engines, work, placement)[1]
    by_engine = np.argsort(placement)
    first = np.searchsorted(placement[by_engine], np.arange(m + 1))
    result = np.zeros(len(moving))
    for number in range(len(moving)):
        index, there = moving[number], targets[number]
        here = placement[index]
        source = by_engine[first[here] : first[here + 1]]
        target = by_engine[first[there] : first[there + 1]]
        here_s, there_s = prompts_s[here], prompts_s[there]
        before_s = max(
            end_s(engines[here], amounts, here_s, source, -1, -1),
            end_s(engines[there], amounts, there_s, target, -1, -1),
        )
        after_s = max(
            end_s(engines[here], amounts, here_s, source, index, -1),
            end_s(engines[there], amounts, there_s, target, -1, index),
        )
        result[number] = before_s - after_s
    return result


@compiled
def end_s(
    engine: Floats, amounts: Floats, prompts_s: float, members: Indexes, without: int, besides: int
) -> float:
    """Return when an engine ends its prompts and its members `without` one of them, or with one
    `besides`; -1 for none."""
    tokens = kv_tokens = ends_s = 0.0
    all_work_s = prompts_s
    for number in range(len(members) + 1):
        index = members[number] if number < len(members) else besides
        if index >= 0 and index != without:
            tokens += amounts[index, TOKENS]
            kv_tokens += amounts[index, KV]
            all_work_s += work_s(engine, amounts[index])
    for number in range(len(members) + 1):
        index = members[number] if number < len(members) else besides
        if index >= 0 and index != without:
            own_s = work_s(engine, amounts[index])
            alone_s = engine[BASE_S] * amounts[index, TOKENS] + own_s
            ends_s = max(ends_s, path_s(alone_s, amounts[index, TOOL_S], all_work_s - own_s))
    return max(ends_s, worked_s(engine, tokens, kv_tokens, all_work_s))
