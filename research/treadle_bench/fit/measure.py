"""Fits of the shipped engines: curves from public measurements, and how far off they are.

Keys: `served`: the level of whole engines, with its errors. `engines`: the curves, with theirs.
`checks`: predictions of data that no fit saw. `skipped`: kernels of too few contexts. There are no
random numbers and no clock: repeats give the same figures.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treadle_cli.exits import UsageProblem
from treadle_cli.report.style import render
from treadle_sim.engine_model import ENGINE_FIELDS, render_profiles

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.fit.plot import draw
from treadle_bench.fit.profiles import FitReport, fit_public

COMMAND = (
    "treadle bench fit --data DIR --pictures research/results --profiles sim/treadle_sim/profiles"
)


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Fit all public measurements. Raises UsageProblem for missing or unreadable tables.

    Writes page and picture to `pictures`, and the profiles that the simulator ships to `profiles`,
    where these are given.
    """
    if options.data is None:
        raise UsageProblem(
            "fit needs --data, the folder of public engine measurements that sim/README.md names"
        )
    with options.progress.status("fitting curves"):
        report = fit_public(options.data)
    figures = _figures(report)
    if options.pictures is not None:
        _write_json(options.pictures / "fit.json", figures)
        (options.pictures / "fit.md").write_text(
            render("treadle_bench", "pages/fit.md.j2", command=COMMAND, report=report)
        )
        with options.progress.status("drawing"):
            draw(report, options.pictures / "fit.png")
    if options.profiles is not None:
        for accelerator in sorted({profile.accelerator for profile in report.shipped}):
            mine = [profile for profile in report.shipped if profile.accelerator == accelerator]
            profiles = render_profiles(accelerator, mine)
            _write_json(options.profiles / f"{accelerator.lower()}.json", profiles)
    return figures


def _figures(report: FitReport) -> dict[str, Any]:
    """Levels of whole engines with their errors, curves with theirs, and checks on unseen data."""
    return {
        "served": [
            {
                "engine": served.engine,
                "llm": served.llm,
                "accelerator": served.accelerator,
                "rows": len(served.rows),
                "rows_left_out": served.left_out,
                "level": asdict(served.level),
                "request_error_unseen_gpus": asdict(served.unseen_gpus),
                "request_error_unseen_batch": asdict(served.unseen_batch),
                "request_error_unseen_prompt": asdict(served.unseen_prompt),
                "step_error_unseen_gpus": asdict(served.steps),
            }
            for served in report.served
        ],
        "checks": [
            {name: getattr(check, name) for name in ("label", "rows", "median", "p90", "bias")}
            for check in report.checks
        ],
        "skipped": list(report.skipped),
        "engines": [
            {
                "engine": fitted.engine,
                "accelerator": fitted.profile.accelerator,
                **{name: getattr(fitted.profile, name) for name in ENGINE_FIELDS},
                "curve": asdict(fitted.profile.curve),
                "decode_error": asdict(fitted.decode_error) if fitted.decode_error else None,
                "prefill_error": asdict(fitted.prefill_error) if fitted.prefill_error else None,
            }
            for fitted in report.engines
        ],
    }


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


BENCH = Bench(
    "fit",
    "The simulator's engine curves, fitted to public measurements (--data), and how far off they "
    "are.",
    measure,
    decides=(),
)
