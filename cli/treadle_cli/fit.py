"""Run `treadle fit`: fit an engine's curve to a profile that was measured on a live engine.

The fitting is `treadle_sim.fitting`, the words are a template.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treadle_sim.fitting import MeasuredProfileError, fit_measured

from treadle_cli.exits import UsageProblem
from treadle_cli.fit_picture import draw_measured
from treadle_cli.templates import render


def fit_profile(file: Path, out_folder: Path | None) -> tuple[dict[str, Any], str]:
    """Fit one measured profile, and return it as a JSON object and as a page in Markdown.

    Writes NAME-fit.json and NAME-fit.png to out_folder unless it is None. Raises UsageProblem.
    """
    try:
        measured = fit_measured(json.loads(file.read_text()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, MeasuredProfileError) as error:
        raise UsageProblem(f"{file}: {error}") from error
    errors = {"decode_error": measured.decode_error, "prefill_error": measured.prefill_error}
    figures = {
        "engine": {"name": measured.engine.name, **asdict(measured.engine)},
        **{name: asdict(error) if error else None for name, error in errors.items()},
    }
    if out_folder is not None:
        out_folder.mkdir(parents=True, exist_ok=True)
        (out_folder / f"{file.stem}-fit.json").write_text(json.dumps(figures, indent=1) + "\n")
        draw_measured(measured, out_folder / f"{file.stem}-fit.png")
    return figures, render("treadle_cli", "fit_profile.md.j2", fit=measured)
