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

from treadle_core.compiled import Flags, Floats, Indexes, compiled, inlined, lean
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


# Columns of what an engine has to do in a sample: sums of tokens and of KV, seconds of work, when
# it ends, and the most seconds of decode steps alone and tools.
LOAD_TOKENS, LOAD_KV, LOAD_WORK, LOAD_ENDS, LOAD_REST = range(5)


class Work(NamedTuple):
    """Work that is left of n trajectories. amounts[samples, n, 5]; contexts: tokens now; started:
    it runs on its engine; read: its engine has prefilled its context; prompts: a number for each
    prompt, from 0."""

    amounts: Floats
    contexts: Floats
    started: Flags
    read: Flags
    prompts: Indexes


class Scratch(NamedTuple):
    """Memory of `end_engine`: whether it has read a prompt, and by a group's number the seconds
    until its prompt is read, of its own work, and of its decode steps alone and its tools."""

    seen: Flags
    waits_s: Floats
    own_s: Floats
    rest_s: Floats


@compiled
def make_scratch(work: Work) -> Scratch:
    """Return memory that serves any group of this work."""
    n = len(work.contexts)
    return Scratch(
        np.zeros(work.prompts.max() + 1, np.bool_), np.empty(n), np.empty(n), np.empty(n)
    )


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
    tokens, contexts, observed, tool_s = map(_floats, (tokens, contexts, observed, tool_s))
    amounts = multiply(tokens, contexts, observed, tool_s, factors)
    return Work(amounts, contexts, started, read, prompts)


def _floats(values: Floats) -> Floats:
    """Return the values as kernels read them: compiled ones take no other layout."""
    return np.ascontiguousarray(values, np.float64)


@compiled
def multiply(
    tokens: Floats, contexts: Floats, observed: Floats, tool_s: Floats, factors: Floats
) -> Floats:
    """Return amounts[samples, n, 5] of medians times factors[samples, n], in a tenth of the time
    that numpy takes."""
    samples, n = factors.shape
    amounts = np.empty((samples, n, TOOL_S + 1))
    for sample in range(samples):
        for index in range(n):
            factor = factors[sample, index]
            d, o = tokens[index] * factor, observed[index] * factor
            mean_context = contexts[index] + 0.5 * (d + o)
            row = amounts[sample, index]
            row[TOKENS], row[KV] = d, d * mean_context
            row[OBSERVED], row[PAIRS] = o, o * mean_context
            row[TOOL_S] = tool_s[index] * factor
    return amounts


def sample_factors(rows: Indexes, log_sigma: Floats, tokens: Floats, room_tokens: Floats) -> Floats:
    """Return factors[samples, n], by which each sample multiplies a length.

    rows: a number of each trajectory, which gives it the same samples in every plan. log_sigma:
    standard deviation of ln(length), of which RECOURSE is sampled, but at least LEAST_SIGMA;
    room_tokens: what the cap leaves."""
    n = len(rows)
    if n == 0:
        return np.ones((1, n))
    count = min(MOST_SAMPLES, max(LEAST_SAMPLES, CELLS // n))
    rows = np.ascontiguousarray(rows, np.int64)
    log_sigma, tokens, room_tokens = map(_floats, (log_sigma, tokens, room_tokens))
    strata, table = _draws()
    return draw(rows, log_sigma, tokens, room_tokens, strata, table, count)


@compiled
def draw(
    rows: Indexes,
    log_sigma: Floats,
    tokens: Floats,
    room_tokens: Floats,
    strata: Indexes,
    table: Floats,
    count: int,
) -> Floats:
    """Return factors[count, n] by the tables of `_draws`."""
    n = len(rows)
    steps, most = np.empty(n, np.int64), np.empty(n)
    for index in range(n):
        sigma = max(RECOURSE * log_sigma[index], LEAST_SIGMA)
        steps[index] = min(int(sigma / SIGMA_STEP + 0.5), SIGMA_STEPS - 1)
        most[index] = room_tokens[index] / max(tokens[index], 1.0)
    factors = np.empty((count, n))
    for sample in range(count):
        for index in range(n):
            factor = table[steps[index], strata[sample, rows[index] % ROWS]]
            factors[sample, index] = min(factor, most[index])
    return factors


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
    times: Floats = finish(engines, work, placement, reading_order(engines, work))[0]
    latest_s: Floats = times.max(axis=0, initial=0.0)
    return latest_s


def is_better(found_s: Floats, best_s: Floats, margin: float) -> bool:
    """Return whether makespans are less than the best so far, by `margin` of their mean and by more
    than chance alone gives in so few samples."""
    if not (np.isfinite(found_s).all() and np.isfinite(best_s).all()):
        return bool(np.isfinite(found_s).all())
    gains_s = best_s - found_s
    by_chance_s = CHANCE * gains_s.std() / np.sqrt(len(gains_s))
    return bool(gains_s.mean() > margin * best_s.mean() + by_chance_s)


@compiled
def least_s(engines: Floats, kinds: Indexes, work: Work) -> float:
    """Return the seconds before which no placement ends at the medians: the longest path alone on
    the engine that is fastest for it, and all work shared by all engines, each trajectory's at the
    engine that has least of it, with its share of slots or of KV, whichever binds.

    kinds: a number from 0 that engines with equal figures share."""
    examples = np.full(kinds.max() + 1, -1)  # an engine of each kind
    for at in range(len(engines)):
        if examples[kinds[at]] < 0:
            examples[kinds[at]] = at
    longest_s = by_slots_s = by_kv_s = 0.0
    for amounts in work.amounts[0]:
        alone_s = slots_s = kv_s = np.inf
        for at in examples:
            engine = engines[at]
            own_s = work_s(engine, amounts)
            alone_s = min(alone_s, engine[BASE_S] * amounts[TOKENS] + own_s + amounts[TOOL_S])
            slots_s = min(slots_s, engine[BASE_S] * amounts[TOKENS] / engine[SLOTS] + own_s)
            kv_s = min(kv_s, engine[BASE_S] * amounts[KV] / engine[KV_TOKENS] + own_s)
        longest_s = max(longest_s, alone_s)
        by_slots_s += slots_s
        by_kv_s += kv_s
    return max(longest_s, by_slots_s / len(engines), by_kv_s / len(engines))


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


@lean
def read_prompts(engine: Floats, work: Work, members: Indexes, scratch: Scratch) -> float:
    """Return the seconds in which an engine prefills the prompts of its members, in their order;
    write to scratch.waits_s how long each waits for it. scratch.seen: False, before and after."""
    seen, waits_s = scratch.seen, scratch.waits_s
    prompts_s = 0.0
    for index in members:
        seen[work.prompts[index]] |= work.read[index]
    for number in range(len(members)):
        index = members[number]
        waits_s[number] = 0.0
        if not work.read[index]:
            if not seen[work.prompts[index]]:
                seen[work.prompts[index]] = True
                prompts_s += prompt_s(engine, work.contexts[index])
            waits_s[number] = prompts_s
    for index in members:
        seen[work.prompts[index]] = False
    return prompts_s


@lean
def end_engine(
    engine: Floats, work: Work, members: Indexes, scratch: Scratch, times: Floats
) -> float:
    """Write when an engine ends its members in each sample to times[samples], and return its
    seconds of prompts. members: in the order in which their prompts are read."""
    for index in members:
        if work.contexts[index] > engine[KV_TOKENS]:
            times[:] = np.inf
            return 0.0
    prompts_s = read_prompts(engine, work, members, scratch)
    waits_s, own_s, rest_s = scratch.waits_s, scratch.own_s, scratch.rest_s
    for sample in range(len(times)):
        tokens = kv_tokens = most_rest_s = 0.0
        all_work_s, longest = prompts_s, -1
        amounts = work.amounts[sample]
        for number in range(len(members)):
            row = amounts[members[number]]
            own_s[number] = work_s(engine, row)
            rest_s[number] = engine[BASE_S] * row[TOKENS] + row[TOOL_S]
            tokens += row[TOKENS]
            kv_tokens += row[KV]
            all_work_s += own_s[number]
            if rest_s[number] >= most_rest_s:
                longest, most_rest_s = number, rest_s[number]
        ends_s = worked_s(engine, tokens, kv_tokens, all_work_s)
        # A path is at most `rest_s` and all the work. So after the one with most, hardly any other
        # can end later, and only of these the root is computed.
        for number in range(-1, len(members)):
            at = number if number >= 0 else longest
            if at < 0 or rest_s[at] + all_work_s <= ends_s:
                continue
            row = amounts[members[at]]
            alone_s = engine[BASE_S] * row[TOKENS] + own_s[at]
            others_s = max(all_work_s - own_s[at] - waits_s[at], 0.0)
            ends_s = max(ends_s, waits_s[at] + path_s(alone_s, row[TOOL_S], others_s))
        times[sample] = ends_s
    return prompts_s


@compiled
def finish(
    engines: Floats, work: Work, placement: Indexes, reading: Indexes
) -> tuple[Floats, Floats]:
    """Return times[engines, samples], seconds until each engine ends, and the seconds of each
    engine's prompts. placement: index of an engine, -1 for none; reading: `reading_order`."""
    m, n, samples = len(engines), len(placement), len(work.amounts)
    times, prompts_s = np.zeros((m, samples)), np.zeros(m)
    if n == 0:
        return times, prompts_s
    first, members = members_of(placement, reading, m)
    scratch, waits_s = make_scratch(work), np.zeros(n)
    for at in range(m):
        group = members[first[at] : first[at + 1]]
        prompts_s[at] = read_prompts(engines[at], work, group, scratch)
        for number in range(len(group)):
            waits_s[group[number]] = scratch.waits_s[number]
    loads, longest = np.zeros((m, LOAD_REST + 1)), np.zeros(m, np.int64)
    memory = (waits_s, prompts_s, scratch, loads, longest)
    for sample in range(samples):
        end_all(engines, work.amounts[sample], placement, *memory)
        times[:, sample] = loads[:, LOAD_ENDS]
    for index in range(n):
        if placement[index] >= 0 and work.contexts[index] > engines[placement[index], KV_TOKENS]:
            times[placement[index], :] = np.inf
    return times, prompts_s


@lean
def end_all(
    engines: Floats,
    amounts: Floats,
    placement: Indexes,
    waits_s: Floats,
    prompts_s: Floats,
    scratch: Scratch,
    loads: Floats,
    longest: Indexes,
) -> None:
    """Write when each engine ends one sample to the column LOAD_ENDS of loads[engines]: as
    `end_engine`, with memory read in its order, which is much faster for many trajectories.

    longest: scratch of a number for each engine."""
    own_s, rest_s = scratch.own_s, scratch.rest_s
    for at in range(len(engines)):
        loads[at, :] = 0.0
        loads[at, LOAD_WORK] = prompts_s[at]
        longest[at] = -1
    for index in range(len(placement)):
        at = placement[index]
        if at < 0:
            continue
        row = amounts[index]
        own_s[index] = work_s(engines[at], row)
        rest_s[index] = engines[at, BASE_S] * row[TOKENS] + row[TOOL_S]
        loads[at, LOAD_TOKENS] += row[TOKENS]
        loads[at, LOAD_KV] += row[KV]
        loads[at, LOAD_WORK] += own_s[index]
        if rest_s[index] >= loads[at, LOAD_REST]:
            longest[at], loads[at, LOAD_REST] = index, rest_s[index]
    for at in range(len(engines)):
        load = loads[at]
        load[LOAD_ENDS] = worked_s(engines[at], load[LOAD_TOKENS], load[LOAD_KV], load[LOAD_WORK])
    for number in range(-len(engines), len(placement)):
        index = number if number >= 0 else longest[-1 - number]
        at = placement[index] if index >= 0 else -1
        if at < 0 or rest_s[index] + loads[at, LOAD_WORK] <= loads[at, LOAD_ENDS]:
            continue
        alone_s = engines[at, BASE_S] * amounts[index, TOKENS] + own_s[index]
        others_s = max(loads[at, LOAD_WORK] - own_s[index] - waits_s[index], 0.0)
        end_s = waits_s[index] + path_s(alone_s, amounts[index, TOOL_S], others_s)
        loads[at, LOAD_ENDS] = max(loads[at, LOAD_ENDS], end_s)


@compiled
def savings_s(
    engines: Floats, work: Work, placement: Indexes, moving: Indexes, targets: Indexes
) -> Floats:
    """Return for each trajectory in `moving` the seconds by which the later of its two engines ends
    earlier if it alone moves. Work at its medians; its prompt moves with its context."""
    m, n, amounts = len(engines), len(placement), work.amounts[0]
    first, members = members_of(placement, np.arange(n), m)
    prompts_s = finish(engines, work, placement, reading_order(engines, work))[1]
    loads, own_s, rest_s = np.zeros((m, 3)), np.zeros(n), np.zeros(n)
    for at in range(m):
        loads[at, 2] = prompts_s[at]
        for index in members[first[at] : first[at + 1]]:
            own_s[index] = work_s(engines[at], amounts[index])
            rest_s[index] = engines[at, BASE_S] * amounts[index, TOKENS] + amounts[index, TOOL_S]
            add(loads[at], engines[at], amounts[index], 1.0)
    before_s = np.zeros(m)
    for at in range(m):
        group = members[first[at] : first[at + 1]]
        before_s[at] = end_s(engines[at], amounts, loads[at], group, own_s, rest_s, -1)
    result, changed = np.zeros(len(moving)), np.zeros(3)
    for number in range(len(moving)):
        index, there = moving[number], targets[number]
        here = placement[index]
        changed[:] = loads[here]
        add(changed, engines[here], amounts[index], -1.0)
        group = members[first[here] : first[here + 1]]
        after_s = end_s(engines[here], amounts, changed, group, own_s, rest_s, index)
        changed[:] = loads[there]
        add(changed, engines[there], amounts[index], 1.0)
        group = members[first[there] : first[there + 1]]
        after_s = max(after_s, end_s(engines[there], amounts, changed, group, own_s, rest_s, -1))
        work_there_s = work_s(engines[there], amounts[index])
        alone_s = engines[there, BASE_S] * amounts[index, TOKENS] + work_there_s
        own_path_s = path_s(alone_s, amounts[index, TOOL_S], max(changed[2] - work_there_s, 0.0))
        result[number] = max(before_s[here], before_s[there]) - max(after_s, own_path_s)
    return result


@inlined
def add(loads: Floats, engine: Floats, amounts: Floats, sign: float) -> None:
    """Add a trajectory to the tokens, KV and seconds of work of an engine, or take it away."""
    loads[0] += sign * amounts[TOKENS]
    loads[1] += sign * amounts[KV]
    loads[2] += sign * work_s(engine, amounts)


@compiled
def end_s(
    engine: Floats,
    amounts: Floats,
    loads: Floats,
    members: Indexes,
    own_s: Floats,
    rest_s: Floats,
    without: int,
) -> float:
    """Return when an engine ends these loads and the paths of its members but for one; -1 for none.

    own_s, rest_s: of each trajectory on the engine where it is; see `end_engine`."""
    ends_s = worked_s(engine, loads[0], loads[1], loads[2])
    for index in members:
        if index != without and rest_s[index] + loads[2] > ends_s:
            alone_s = engine[BASE_S] * amounts[index, TOKENS] + own_s[index]
            others_s = max(loads[2] - own_s[index], 0.0)
            ends_s = max(ends_s, path_s(alone_s, amounts[index, TOOL_S], others_s))
    return ends_s
