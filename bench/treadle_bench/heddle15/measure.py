"""Heddle's Figure 15: which engine runs a step, on engines of one GPU each. See ablation.py for the keys.

Only the placement differs: engines, order of steps and predictions are the same, moves belong to the placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle_core.model import PlacementRule, Replanning
from treadle_core.tuning import Tuning
from treadle_sim.systems import TREADLE_HOMOGENEOUS, System

from treadle_bench.ablation import LLM, Variant, ablate, lines, losses, ratios
from treadle_bench.options import BenchOptions
from treadle_bench.page import MACHINE, command, paragraph, point, seeds
from treadle_bench.pictures import draw_bars

NAME = "heddle15"
PAPER = "1.2–1.5×"
DEGREE = 1
NO_SKEW = 10**9  # steps: no load is ever skewed, so the cache decides always


def _placed(rule: PlacementRule, tuning: Tuning) -> System:
    policy = replace(TREADLE_HOMOGENEOUS.policy, placement=rule, migrate=False)
    return replace(TREADLE_HOMOGENEOUS, name=rule.value, policy=policy, tuning=tuning)


VARIANTS = (
    Variant("planned", TREADLE_HOMOGENEOUS, DEGREE),
    Variant("least load beyond a skew", _placed(PlacementRule.CACHE_AWARE, TREADLE_HOMOGENEOUS.tuning), DEGREE),
    Variant(
        "cache-aware",
        _placed(PlacementRule.CACHE_AWARE, replace(TREADLE_HOMOGENEOUS.tuning, skew_steps=NO_SKEW)),
        DEGREE,
    ),
    Variant("pinned", _placed(PlacementRule.PINNED, TREADLE_HOMOGENEOUS.tuning), DEGREE),
    Variant("least load", _placed(PlacementRule.LEAST_LOAD, TREADLE_HOMOGENEOUS.tuning), DEGREE),
    Variant(
        "rank scaling",
        replace(
            TREADLE_HOMOGENEOUS,
            name="rank_scaling",
            policy=replace(TREADLE_HOMOGENEOUS.policy, replanning=Replanning.RANK_SCALING),
        ),
        DEGREE,
    ),
)


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises TraceFileError, OSError."""
    return await ablate(NAME, VARIANTS, options)


def page(found: Mapping[str, Any]) -> Iterator[str]:
    yield "# heddle15: which engine runs a step"
    yield ""
    yield from paragraph(
        f"`{command(NAME, found)}`, on {MACHINE}. {LLM}, {found['trajectories']:,} trajectories on {found['gpus']}",
        f"{found['accelerator']} GPUs, an engine each; the order of steps and the predictions are Treadle's in every",
        "column, only the placement differs.",
    )
    yield from point("planned: Treadle's partition, solved again on what remains, with moves while tools run;")
    yield from point(
        "least load beyond a skew, cache-aware: the paper's two baselines, with the prefix unless loads are skewed,",
        "and always;",
    )
    yield from point(
        "pinned (verl) and least load at each step (slime); rank scaling: Heddle's own partition and rule of moves,",
        "as printed.",
    )
    yield ""
    yield "![tokens a second by placement](heddle15.png)"
    yield ""
    yield from lines(found)
    yield ""
    yield "## What to know"
    yield ""
    theirs = ["least load beyond a skew", "cache-aware"]
    yield from point(
        f"The paper reports {PAPER} over its two baselines. Here, over the same two: {ratios(found, theirs)}.",
    )
    yield from losses(found)


def draw(found: Mapping[str, Any], file: Path) -> None:
    note = (
        f"{LLM} on {found['gpus']} {found['accelerator']} GPUs, one an engine; {seeds(found)}. "
        "Right: when half of the trajectories had ended."
    )
    panels = [[("tokens a second", found, "tokens_per_s"), ("seconds until half have ended", found, "p50_s")]]
    draw_bars("Which engine runs a step", note, panels, file)
