"""When would each engine finish? And is a plan better than what we have?

One cost function judges every candidate placement (the present one, the placement service's plan, a rebalance of the
present one), so that a plan is never adopted on its own word. It is the linear-integral cost of reference point 4 in
plain floats: `a * max(L_max, sum L / slots) + b * sum L + k * sum L * context`, exact for a linear engine that is never
idle. Pure functions over values; nothing is kept.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from treadle_core.model import EngineSpec

# Moves that one rebalance proposes at most; the next one, a few dozen events later, goes on from there.
REBALANCE_MOVES = 32


@dataclass(frozen=True, slots=True)
class Work:
    """What is left of one trajectory: tokens to sample, on what context, and the seconds it takes alone, its tool calls
    included."""

    trajectory_id: str
    tokens: float
    context_tokens: int
    alone_s: float = 0.0


@dataclass(slots=True)
class EngineSums:
    """Sums over the trajectories of one engine; all that its finish time needs."""

    longest_tokens: float = 0.0
    longest_alone_s: float = 0.0
    tokens: float = 0.0
    kv_tokens: float = 0.0


def kv_tokens(work: Work) -> float:
    """KV tokens read over the rest of a trajectory, whose context grows by one a step."""
    return work.tokens * (work.context_tokens + 0.5 * work.tokens)


# Sums of floats in another order differ by less than this fraction.
ROUNDING = 1e-9

Placement = Mapping[str, str]  # trajectory_id -> engine_id


def finish_s(spec: EngineSpec, sums: EngineSums) -> float:
    """Seconds until an engine has done all of it; 0 for nothing. Never less than the longest takes alone: tools can be
    the bound."""
    curve = spec.decode_curve
    steps = max(sums.longest_tokens, sums.tokens / max(1, spec.slot_limit))
    decode_s = curve.base_s * steps + curve.per_sequence_s * sums.tokens + curve.per_kv_token_s * sums.kv_tokens
    return max(decode_s, sums.longest_alone_s)


def total(works: Iterable[Work]) -> EngineSums:
    """Sums of several."""
    longest_tokens = longest_alone_s = tokens = all_kv_tokens = 0.0
    for work in works:
        longest_tokens = max(longest_tokens, work.tokens)
        longest_alone_s = max(longest_alone_s, work.alone_s)
        tokens += work.tokens
        all_kv_tokens += kv_tokens(work)
    return EngineSums(longest_tokens, longest_alone_s, tokens, all_kv_tokens)


def finish_times(placement: Placement, works: Mapping[str, Work], specs: Mapping[str, EngineSpec]) -> dict[str, float]:
    """When each engine finishes under a placement."""
    groups = _groups(placement, works, specs)
    return {engine_id: finish_s(specs[engine_id], total(group.values())) for engine_id, group in groups.items()}


def better(candidate: Mapping[str, float], present: Mapping[str, float], margin: float) -> bool:
    """Whether a candidate's finish times beat the present ones by a fraction `margin`: the last engine first, and where
    that one is bound either way (one trajectory that nothing shortens), the next to last, and so on. One that makes a
    later engine even a little later does not.
    """
    for new_s, old_s in zip(
        sorted(candidate.values(), reverse=True), sorted(present.values(), reverse=True), strict=True
    ):
        if new_s < old_s * (1.0 - margin):
            return True
        if new_s > old_s * (1.0 + ROUNDING):
            return False
    return False


def rebalanced(
    placement: Placement, works: Mapping[str, Work], specs: Mapping[str, EngineSpec], margin: float, movable: Set[str]
) -> dict[str, str]:
    """The placement after moving trajectories one by one from the engine that finishes last to the one that finishes
    first, while that helps and they differ by more than `margin`.

    Moves few: it starts from what is. An engine that no move relieves is left as it is, and the others are balanced
    among themselves. Ties go to the smaller id, so that the result is determined.
    """
    groups = _groups(placement, works, specs)
    times = {engine_id: finish_s(specs[engine_id], total(group.values())) for engine_id, group in groups.items()}
    result = dict(placement)
    moves = 0
    while len(times) > 1 and moves < REBALANCE_MOVES:
        last = max(times, key=lambda engine_id: (times[engine_id], engine_id))
        target = min(times, key=lambda engine_id: (times[engine_id], engine_id))
        if times[target] >= times[last] * (1.0 - margin):
            break
        best = _best_move(specs[last], groups[last], specs[target], groups[target], movable)
        if best is None or best[0] >= times[last]:
            del times[last]
            continue
        trajectory_id = best[1]
        groups[target][trajectory_id] = groups[last].pop(trajectory_id)
        result[trajectory_id] = target
        moves += 1
        for engine_id in (last, target):
            times[engine_id] = finish_s(specs[engine_id], total(groups[engine_id].values()))
    return result


def relabelled(
    planned: Placement, present: Placement, works: Mapping[str, Work], specs: Mapping[str, EngineSpec]
) -> dict[str, str]:
    """The same partition with the groups of equal engines renamed so that the most context stays where it is."""
    overlap: dict[tuple[str, str], int] = {}
    for trajectory_id, engine_id in planned.items():
        here = present.get(trajectory_id, "")
        if here in specs and engine_id in specs and _alike(specs[here], specs[engine_id]):
            weight = 1 + works[trajectory_id].context_tokens if trajectory_id in works else 1
            overlap[(engine_id, here)] = overlap.get((engine_id, here), 0) + weight
    renamed: dict[str, str] = {}
    taken: set[str] = set()
    for (engine_id, here), _ in sorted(overlap.items(), key=lambda pair: (-pair[1], pair[0])):
        if engine_id not in renamed and here not in taken:
            renamed[engine_id] = here
            taken.add(here)
    for engine_id in sorted(specs):  # groups that overlap nothing take what is left, among their equals
        if engine_id not in renamed:
            free = [other for other in sorted(specs) if other not in taken and _alike(specs[other], specs[engine_id])]
            renamed[engine_id] = free[0]
            taken.add(free[0])
    return {trajectory_id: renamed.get(engine_id, engine_id) for trajectory_id, engine_id in planned.items()}


def _alike(one: EngineSpec, other: EngineSpec) -> bool:
    return (one.slot_limit, one.tensor_parallel, one.kv_tokens_capacity, one.decode_curve) == (
        other.slot_limit,
        other.tensor_parallel,
        other.kv_tokens_capacity,
        other.decode_curve,
    )


def _groups(
    placement: Placement, works: Mapping[str, Work], specs: Mapping[str, EngineSpec]
) -> dict[str, dict[str, Work]]:
    groups: dict[str, dict[str, Work]] = {engine_id: {} for engine_id in specs}
    for trajectory_id, engine_id in placement.items():
        if engine_id in groups and trajectory_id in works:
            groups[engine_id][trajectory_id] = works[trajectory_id]
    return groups


def _best_move(
    source: EngineSpec, leaving: Mapping[str, Work], target: EngineSpec, there: Mapping[str, Work], movable: Set[str]
) -> tuple[float, str] | None:
    """The move that leaves the two engines soonest done: (seconds, trajectory). None where there is nothing to move."""
    there_sums, all_sums = total(there.values()), total(leaving.values())
    longest = sorted((work.tokens for work in leaving.values()), reverse=True)[1:2] or [0.0]
    longest_alone = sorted((work.alone_s for work in leaving.values()), reverse=True)[1:2] or [0.0]
    best: tuple[float, str] | None = None
    for trajectory_id, work in leaving.items():
        if trajectory_id not in movable:
            continue
        work_kv_tokens = kv_tokens(work)
        rest = EngineSums(
            longest[0] if work.tokens >= all_sums.longest_tokens else all_sums.longest_tokens,
            longest_alone[0] if work.alone_s >= all_sums.longest_alone_s else all_sums.longest_alone_s,
            all_sums.tokens - work.tokens,
            all_sums.kv_tokens - work_kv_tokens,
        )
        joined = EngineSums(
            max(there_sums.longest_tokens, work.tokens),
            max(there_sums.longest_alone_s, work.alone_s),
            there_sums.tokens + work.tokens,
            there_sums.kv_tokens + work_kv_tokens,
        )
        after_s = max(finish_s(source, rest), finish_s(target, joined))
        if best is None or (after_s, trajectory_id) < best:
            best = (after_s, trajectory_id)
    return best
