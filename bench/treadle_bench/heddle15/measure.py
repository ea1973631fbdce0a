"""Heddle's Figure 15: rollouts that differ only in which engine runs a step, on engines of one GPU.

The keys are those of ablation.py. Engines, order of steps and predictions are equal; migrations belong to the
placement.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle_core.model import PlacementRule, Replanning
from treadle_sim.systems import TREADLE_HOMOGENEOUS, System

from treadle_bench.ablation import LLM, Variant, ablate, page_values
from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.page import describe_seeds
from treadle_bench.pictures import draw_panels

NO_SKEW = 10**9  # steps: no engine is ever that much busier, so the cached prefix always decides
PAPER_BASELINES = ("least load beyond a skew", "cache-aware")


def _place_by(rule: PlacementRule, skew_steps: int = TREADLE_HOMOGENEOUS.tuning.skew_steps) -> System:
    policy = replace(TREADLE_HOMOGENEOUS.policy, placement=rule, migrate=False)
    tuning = replace(TREADLE_HOMOGENEOUS.tuning, skew_steps=skew_steps)
    return replace(TREADLE_HOMOGENEOUS, name=rule.value, policy=policy, tuning=tuning)


RANK_SCALING = replace(
    TREADLE_HOMOGENEOUS,
    name="rank_scaling",
    policy=replace(TREADLE_HOMOGENEOUS.policy, replanning=Replanning.RANK_SCALING),
)
SYSTEMS = {
    "planned": TREADLE_HOMOGENEOUS,
    "least load beyond a skew": _place_by(PlacementRule.CACHE_AWARE),
    "cache-aware": _place_by(PlacementRule.CACHE_AWARE, NO_SKEW),
    "pinned": _place_by(PlacementRule.PINNED),
    "least load": _place_by(PlacementRule.LEAST_LOAD),
    "rank scaling": RANK_SCALING,
}
VARIANTS = tuple(Variant(name, system, degree=1) for name, system in SYSTEMS.items())


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError, OSError."""
    return await ablate("heddle15", VARIANTS, options)


def draw(found: Figures, file: Path) -> None:
    """Write the picture."""
    note = (
        f"{LLM} on {found['gpus']} {found['accelerator']} GPUs, one an engine; {describe_seeds(found['seeds'])}. "
        "Right: when half of the trajectories had ended."
    )
    panels = [[("tokens a second", found, "tokens_per_s"), ("seconds until half have ended", found, "p50_s")]]
    draw_panels("Which engine runs a step", note, panels, file)


BENCH = Bench(
    "heddle15",
    "Heddle's Figure 15: which engine runs a step. Takes about 10 minutes, a few with --scale 0.25.",
    measure,
    page=lambda found: {**page_values(found, PAPER_BASELINES), "found": found},
    draw=draw,
)
