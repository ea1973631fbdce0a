"""`treadle fit`: fits engine curves to public measurements, or to a profile measured on a live engine.

The fitting is `treadle_sim.fitting`; this module prints and writes its results.
"""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from treadle_sim.engine_model import ENGINE_FIELDS, render_profiles
from treadle_sim.fitting.curves import FitError, MeasuredEngine, MeasuredProfileError, fit_measured
from treadle_sim.fitting.fit import FitReport, FittedEngine, fit_public
from treadle_sim.fitting.tables import FitDataError

from treadle_cli.fit_picture import draw_measured, draw_public
from treadle_cli.problems import UsageProblem
from treadle_cli.templates import render

COMMAND = "treadle fit --data DIR --out bench/results --profiles sim/treadle_sim/profiles"
SHOWN_BATCH = 100  # slots of an engine in the papers
SHOWN_CONTEXT = 8_192  # tokens of each sequence in the table's larger step


def fit_data(data: Path, out_folder: Path | None, profiles_folder: Path | None, progress: Console) -> FitReport:
    """Fit all public measurements under `data`. Writes fit.json, fit.md and fit.png to out_folder, and the profiles to
    profiles_folder, unless these are None. Raises UsageProblem for missing or unreadable tables."""
    try:
        with progress.status("fitting curves"):
            report = fit_public(data)
    except FitDataError as error:
        raise UsageProblem(str(error)) from error
    if out_folder is not None:
        out_folder.mkdir(parents=True, exist_ok=True)
        _write_json(out_folder / "fit.json", public_figures(report))
        (out_folder / "fit.md").write_text(render("treadle_cli", "fit.md.j2", command=COMMAND, report=report))
        with progress.status("drawing"):
            draw_public(report, out_folder / "fit.png")
    if profiles_folder is not None:
        profiles_folder.mkdir(parents=True, exist_ok=True)
        for accelerator in sorted({profile.accelerator for profile in report.shipped}):
            mine = [profile for profile in report.shipped if profile.accelerator == accelerator]
            _write_json(profiles_folder / f"{accelerator.lower()}.json", render_profiles(accelerator, mine))
    return report


def fit_profile(file: Path, out_folder: Path | None) -> MeasuredEngine:
    """Fit one measured profile; writes NAME-fit.json and NAME-fit.png to out_folder unless it is None. Raises
    UsageProblem."""
    try:
        measured = fit_measured(json.loads(file.read_text()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, MeasuredProfileError) as error:
        raise UsageProblem(f"{file}: {error}") from error
    if out_folder is not None:
        out_folder.mkdir(parents=True, exist_ok=True)
        _write_json(out_folder / f"{file.stem}-fit.json", measured_figures(measured))
        draw_measured(measured, out_folder / f"{file.stem}-fit.png")
    return measured


def public_figures(report: FitReport) -> dict[str, Any]:
    """One JSON object: levels of whole engines with their errors, curves with theirs, and checks on unseen data."""
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


def measured_figures(measured: MeasuredEngine) -> dict[str, Any]:
    """One JSON object: the engine with its curve, and the errors against what was measured."""
    return {"engine": {"name": measured.engine.name, **asdict(measured.engine)}, **_errors(measured)}


def _errors(fit: FittedEngine | MeasuredEngine) -> dict[str, Any]:
    errors = {"decode_error": fit.decode_error, "prefill_error": fit.prefill_error}
    return {name: asdict(error) if error else None for name, error in errors.items()}


def print_public(report: FitReport, out: Console) -> None:
    """Tables for a terminal of 80 columns."""
    show = partial(out.print, highlight=False)
    served = _table("requests", "rows", "left out", "med", "p90", "unseen degree", "unseen batch", "step alone")
    for fit in report.served:
        seen = fit.unseen_gpus
        held_out = map(_held_out, (fit.unseen_gpus, fit.unseen_batch, fit.steps))
        served.add_row(
            fit.engine, str(len(fit.rows)), str(fit.left_out), f"{seen.median:.1%}", f"{seen.p90:.1%}", *held_out
        )
    show(f"{report.served[0].llm} on {report.served[0].accelerator}, measured whole; error of")
    show(served)
    show("\nData that no fit saw")
    for check in report.checks:
        show(f"  {check.label}:\n  {check.rows} rows, {check.median:.1%}, p90 {check.p90:.1%}")
    for engine in sorted({fitted.engine for fitted in report.engines}):
        show(f"\n{engine}: decode curves; ms of a step of 1, and of {SHOWN_BATCH} of 8K each")
        table = _table("engine", "origin", "points", "med", "p90", "held out", "1", str(SHOWN_BATCH))
        for fitted in report.engines:
            if fitted.engine == engine:
                table.add_row(*_engine_row(fitted))
        show(table)
    for skipped in report.skipped:
        show(f"not fitted: {skipped}")


def print_measured(measured: MeasuredEngine, out: Console) -> None:
    """The fit of one live engine for a terminal."""
    show = partial(out.print, highlight=False)
    engine, curve = measured.engine, measured.engine.curve
    steps = ", ".join(f"{size:g}: {step * 1e3:.2f}" for size, step in zip(curve.batch_sizes, curve.step_s, strict=True))
    line = curve.linear(engine.slots)
    show(f"{engine.name}, {engine.slots} slots, {engine.kv_tokens:,} KV tokens")
    show(f"step, ms by batch  {steps}; {curve.per_kv_token_s * 1e9:.1f} ns a KV token")
    show(f"as planners see it {line.base_s * 1e3:.2f} ms + {line.per_sequence_s * 1e3:.3f} a sequence")
    show(f"decode error       {_describe(measured.decode_error)}")
    if measured.prefill_error:
        prefill_token_us = curve.prefill_token_s * 1e6
        show(f"prefill            {curve.prefill_fixed_s * 1e3:.2f} ms + {prefill_token_us:.1f} µs a token")
        show(f"prefill error      {_describe(measured.prefill_error)}")


def _engine_row(fitted: FittedEngine) -> tuple[str, ...]:
    profile, curve, error = fitted.profile, fitted.profile.curve, fitted.decode_error
    large_s = curve.decode_s(SHOWN_BATCH) + curve.per_kv_token_s * SHOWN_BATCH * SHOWN_CONTEXT
    fits = profile.kv_tokens >= SHOWN_BATCH * SHOWN_CONTEXT
    return (
        f"{profile.llm} {profile.accelerator} x{profile.gpus}",
        profile.origin,
        *((str(error.points), f"{error.median:.1%}", f"{error.p90:.1%}", _held_out(error)) if error else ("",) * 4),
        f"{curve.decode_s(1) * 1e3:.2f}",
        f"{large_s * 1e3:.1f}" if fits else "no room",
    )


def _table(*columns: str) -> Table:
    return Table(*[Column(name, no_wrap=True) for name in columns], box=None, padding=(0, 1, 0, 0))


def _held_out(error: FitError) -> str:
    return f"{error.held_out_median:.1%}, {error.held_out_p90:.1%}"


def _describe(error: FitError) -> str:
    held_out = f"held out median {error.held_out_median:.1%}, p90 {error.held_out_p90:.1%}"
    return f"median {error.median:.1%}, p90 {error.p90:.1%}; {held_out} ({error.points} points)"


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")
