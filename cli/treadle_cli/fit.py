"""`treadle fit`: fits engine curves to public measurements, or to a profile measured on a live engine.

The fitting is `treadle_sim.fitting`, the words are templates. A fit is returned as one JSON object and as a page in
Markdown.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from treadle_sim.engine_model import ENGINE_FIELDS, render_profiles
from treadle_sim.fitting.curves import MeasuredEngine, MeasuredProfileError, fit_measured
from treadle_sim.fitting.fit import FitReport, FittedEngine, fit_public
from treadle_sim.fitting.tables import FitDataError

from treadle_cli.fit_picture import draw_measured, draw_public
from treadle_cli.problems import UsageProblem
from treadle_cli.templates import render

COMMAND = "treadle fit --data DIR --out research/results --profiles sim/treadle_sim/profiles"


def fit_data(
    data: Path, out_folder: Path | None, profiles_folder: Path | None, progress: Console
) -> tuple[dict[str, Any], str]:
    """Fit all public measurements under `data`. Writes fit.json, fit.md and fit.png to out_folder, and the profiles to
    profiles_folder, unless these are None. Raises UsageProblem for missing or unreadable tables."""
    try:
        with progress.status("fitting curves"):
            report = fit_public(data)
    except FitDataError as error:
        raise UsageProblem(str(error)) from error
    figures, page = _public_figures(report), render("treadle_cli", "fit.md.j2", command=COMMAND, report=report)
    if out_folder is not None:
        _write_json(out_folder / "fit.json", figures)
        (out_folder / "fit.md").write_text(page)
        with progress.status("drawing"):
            draw_public(report, out_folder / "fit.png")
    if profiles_folder is not None:
        for accelerator in sorted({profile.accelerator for profile in report.shipped}):
            mine = [profile for profile in report.shipped if profile.accelerator == accelerator]
            _write_json(profiles_folder / f"{accelerator.lower()}.json", render_profiles(accelerator, mine))
    return figures, page


def fit_profile(file: Path, out_folder: Path | None) -> tuple[dict[str, Any], str]:
    """Fit one measured profile; writes NAME-fit.json and NAME-fit.png to out_folder unless it is None. Raises
    UsageProblem."""
    try:
        measured = fit_measured(json.loads(file.read_text()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, MeasuredProfileError) as error:
        raise UsageProblem(f"{file}: {error}") from error
    engine = {"name": measured.engine.name, **asdict(measured.engine)}
    figures = {"engine": engine, **_errors(measured)}
    if out_folder is not None:
        _write_json(out_folder / f"{file.stem}-fit.json", figures)
        draw_measured(measured, out_folder / f"{file.stem}-fit.png")
    return figures, render("treadle_cli", "fit_profile.md.j2", fit=measured)


def _public_figures(report: FitReport) -> dict[str, Any]:
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
                **_errors(fitted),
            }
            for fitted in report.engines
        ],
    }


def _errors(fit: FittedEngine | MeasuredEngine) -> dict[str, Any]:
    errors = {"decode_error": fit.decode_error, "prefill_error": fit.prefill_error}
    return {name: asdict(error) if error else None for name, error in errors.items()}


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
