"""Heddle's Figure 14: which step runs first, everything else Treadle's. See ablation.py for the keys.

`rows` with the paper's 100 slots an engine; `crowded` the same with half the slots, so that steps must wait: with a
slot for every trajectory there is little to order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle_core.model import Ordering
from treadle_sim.systems import TREADLE, System

from treadle_bench.ablation import LLM, Variant, ablate, lines, losses, ratios
from treadle_bench.options import BenchOptions
from treadle_bench.page import MACHINE, command, paragraph, point, seeds
from treadle_bench.pictures import draw_bars
from treadle_bench.rollouts import SLOTS

NAME = "heddle14"
PAPER = "1.1–1.26×"
CROWDED_SLOTS = SLOTS // 2
PROGRESSIVE = "progressive"
UNHELD = "round-robin, no room held"


def _ordered(ordering: Ordering, *, preempt: bool, reserve: bool = True) -> System:
    policy = replace(TREADLE.policy, ordering=ordering, preempt=preempt, reserve=reserve)
    return replace(TREADLE, name=ordering.value, policy=policy)


# Orderings that never look at how much is left do not preempt either; the two that Autellix could mean do, as it does.
VARIANTS = (
    Variant(PROGRESSIVE, TREADLE),
    Variant("FCFS", _ordered(Ordering.FCFS, preempt=False)),
    Variant("round-robin", _ordered(Ordering.ROUND_ROBIN, preempt=False)),
    Variant("least attained", _ordered(Ordering.LEAST_ATTAINED, preempt=True)),
    Variant("shortest first", _ordered(Ordering.SHORTEST_FIRST, preempt=True)),
    Variant(UNHELD, _ordered(Ordering.ROUND_ROBIN, preempt=False, reserve=False)),
)


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises TraceFileError, OSError."""
    found = await ablate(f"{NAME}, {SLOTS} slots", VARIANTS, options)
    found["crowded"] = await ablate(f"{NAME}, {CROWDED_SLOTS} slots", VARIANTS, options, slots=CROWDED_SLOTS)
    return found


def page(found: Mapping[str, Any]) -> Iterator[str]:
    others = [variant.name for variant in VARIANTS[1:] if variant.name != UNHELD]
    yield "# heddle14: which step runs first"
    yield ""
    yield from paragraph(
        f"`{command(NAME, found)}`, on {MACHINE}. {LLM}, {found['trajectories']:,} trajectories on {found['gpus']}",
        f"{found['accelerator']} GPUs; Treadle's engines, placement and moves throughout, only the ordering differs.",
        "Autellix is two columns: what it publishes (least attained service) and what the paper calls it (shortest",
        "first, which needs a predictor). Those two and ours preempt. In all of these an engine holds room for the KV",
        "of whoever has begun; the last column is round-robin without that, as frameworks run it: what it loses beside",
        "round-robin is prefixes that are evicted and computed again, not order.",
    )
    yield "![rollout time and waiting of the longest](heddle14.png)"
    yield ""
    yield f"## {found['slots']} slots an engine, as in the paper"
    yield ""
    yield from lines(found, queue=True)
    yield ""
    yield f"## {found['crowded']['slots']} slots an engine"
    yield ""
    yield from lines(found["crowded"], queue=True)
    yield ""
    yield "## What to know"
    yield ""
    yield from point(
        f"The paper reports {PAPER} over FCFS, round-robin and Autellix. Here: {ratios(found, others)}, with half the",
        f"slots {ratios(found['crowded'], others)}; over round-robin without room held {ratios(found, [UNHELD])} and",
        f"{ratios(found['crowded'], [UNHELD])}.",
    )
    yield from losses(found)
    yield from losses(found["crowded"], " with half the slots")


def draw(found: Mapping[str, Any], file: Path) -> None:
    title = "Which step runs first"
    note = (
        f"{LLM}, {found['gpus']} {found['accelerator']} GPUs, {seeds(found)}. Left: "
        f"{found['slots']} slots an engine; right: {found['crowded']['slots']}."
    )
    panels = [
        [("rollout seconds", found, "makespan_s"), ("rollout seconds, half the slots", found["crowded"], "makespan_s")],
        [
            ("seconds the longest waits", found, "longest_queue_s"),
            ("seconds the longest waits, half the slots", found["crowded"], "longest_queue_s"),
        ],
    ]
    draw_bars(title, note, panels, file)
