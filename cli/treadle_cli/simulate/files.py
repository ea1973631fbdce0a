"""What a simulation leaves in its folder: summary.json, trajectories.jsonl, simulate.png and simulate.html.

trajectories.jsonl holds columns, not rows: its first line is the workload's, then a line for each system and seed, all
in the order of the workload; 6,400 trajectories of nine systems are about 3 MB.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle_sim.outcome import Times
from treadle_sim.rollout import Run

from treadle_cli.simulate.comparison import Comparison
from treadle_cli.simulate.request import SimulationPlan
from treadle_cli.simulate.sentences import Told

SUMMARY, TRAJECTORIES, PICTURE, PAGE = "summary.json", "trajectories.jsonl", "simulate.png", "simulate.html"
SECONDS = ("finished_s", "queue_s", "prefill_s", "decode_s", "tool_s")
COUNTS = ("prefilled_tokens", "preemptions", "migrations")


def new_folder(out: Path) -> Path:
    """simulate-<time>-<four letters> in `out`, created. Raises OSError."""
    folder = out / f"simulate-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
    folder.mkdir(parents=True)
    return folder


def document(plan: SimulationPlan, comparison: Comparison, told: Told, folder: Path) -> dict[str, Any]:
    """What --json prints and summary.json holds."""
    setting = plan.settings[0]
    works = setting.workload.trajectories
    return {
        "workload": plan.workload,
        "trajectories": len(works),
        "prompts": len({work.prompt_id for work in works}),
        "gen_tokens": setting.workload.gen_tokens,
        "llm": plan.llm,
        "accelerator": plan.accelerator,
        "curve": plan.origin,
        "gpus": setting.gpus,
        "slots_per_gpu": setting.models[0].slots // setting.models[0].gpus,
        "degree": plan.degree or None,
        "predictor": setting.predictor,
        "seeds": [each.seed for each in plan.settings],
        **comparison.as_json(),
        "told": told.lines(),
        "losses": list(told.losses),
        "folder": str(folder),
    }


def write_trajectories(plan: SimulationPlan, runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """See the module."""
    works = plan.settings[0].workload.trajectories
    with path.open("w") as lines:
        first = {
            "workload": plan.workload,
            "seed": plan.seed,
            "prompt_id": [work.prompt_id for work in works],
            "sample": [work.sample for work in works],
            "gen_tokens": [work.gen_tokens for work in works],
        }
        lines.write(json.dumps(first, separators=(",", ":")) + "\n")
        for name, each in runs.items():
            for setting, run in zip(plan.settings, each, strict=True):
                line = {"system": name, "seed": setting.seed, **_columns(run.outcome.times)}
                lines.write(json.dumps(line, separators=(",", ":")) + "\n")


def _columns(times: Sequence[Times]) -> dict[str, list[float]]:
    seconds = {name: [round(getattr(each, name), 3) for each in times] for name in SECONDS}
    return {**seconds, **{name: [getattr(each, name) for each in times] for name in COUNTS}}
