"""Heddle's Figure 14: rollouts that differ only in which waiting step runs first. The keys are those of ablation.py.

`rows`: with the paper's 100 slots an engine. `crowded`: with half the slots, so that steps have to wait; with a slot
for every trajectory the order hardly matters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle_core.model import Ordering
from treadle_sim.systems import TREADLE, System

from treadle_bench.ablation import LLM, Variant, ablate, page_values
from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.page import describe_seeds
from treadle_bench.pictures import draw_panels
from treadle_bench.rollouts import SLOTS

CROWDED_SLOTS = SLOTS // 2
UNRESERVED = "round-robin, no room held"


def _order_by(ordering: Ordering, *, preempt: bool, reserve: bool = True) -> System:
    policy = replace(TREADLE.policy, ordering=ordering, preempt=preempt, reserve=reserve)
    return replace(TREADLE, name=ordering.value, policy=policy)


# Orderings that ignore the remaining work do not preempt; both readings of Autellix do, as Autellix does.
VARIANTS = (
    Variant("progressive", TREADLE),
    Variant("FCFS", _order_by(Ordering.FCFS, preempt=False)),
    Variant("round-robin", _order_by(Ordering.ROUND_ROBIN, preempt=False)),
    Variant("least attained", _order_by(Ordering.LEAST_ATTAINED, preempt=True)),
    Variant("shortest first", _order_by(Ordering.SHORTEST_FIRST, preempt=True)),
    Variant(UNRESERVED, _order_by(Ordering.ROUND_ROBIN, preempt=False, reserve=False)),
)


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError, OSError."""
    found = await ablate(f"heddle14, {SLOTS} slots", VARIANTS, options)
    found["crowded"] = await ablate(f"heddle14, {CROWDED_SLOTS} slots", VARIANTS, options, slots=CROWDED_SLOTS)
    return found


def _page(found: Figures) -> Figures:
    published = [variant.name for variant in VARIANTS[1:] if variant.name != UNRESERVED]
    sizes = (found, found["crowded"])
    return {
        "published": [page_values(size, published) for size in sizes],
        "unreserved": [page_values(size, [UNRESERVED])["measured_ratio"] for size in sizes],
        "found": found,
    }


def draw(found: Figures, file: Path) -> None:
    """Write the picture."""
    crowded = found["crowded"]
    note = (
        f"{LLM}, {found['gpus']} {found['accelerator']} GPUs, {describe_seeds(found['seeds'])}. "
        f"Left: {found['slots']} slots an engine; right: {crowded['slots']}."
    )
    panels = [
        [(title, found, key), (f"{title}, half the slots", crowded, key)]
        for title, key in (("rollout seconds", "makespan_s"), ("seconds the longest waits", "longest_queue_s"))
    ]
    draw_panels("Which step runs first", note, panels, file)


BENCH = Bench(
    "heddle14",
    "Heddle's Figure 14: which step runs first. Takes about 20 minutes, a few with --scale 0.25.",
    measure,
    page=_page,
    draw=draw,
)
