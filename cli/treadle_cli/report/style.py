"""Define what all pages, pictures and tables share: colours, labels, and templates.

The colours are Okabe and Ito's, which people with the common kinds of colour blindness can tell
apart; waiting is warm, work is cold. A template is a Jinja2 file of a package, `*.html.j2` with
values escaped, `*.md.j2` as they are: it holds words, and the caller passes figures.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from treadle_cli.exits import printable

if TYPE_CHECKING:
    from jinja2 import Environment

    from treadle_cli.report.records import TrajectoryRecord

COLOURS = {
    "queue": "#E69F00",
    "prefill": "#56B4E9",
    "decode": "#0072B2",
    "tool": "#009E73",
    "migration": "#CC3D8F",
    "other": "#C9CDD2",
}
DRAWN_KINDS = ("queue", "prefill", "decode", "tool", "migration")  # as bars of their own
MEANINGS = {
    "queue": "waiting for a slot on its engine",
    "prefill": "admitted, before the first token",
    "decode": "generating",
    "tool": "its tool or environment runs",
    "migration": "its KV moves to the other engine",
    "other": "control plane, transfer, the agent's own code",
}
INK = "#1B1F24"
FAINT = "#6B7280"
GRID = "#E5E7EB"


def row_label(trajectory: TrajectoryRecord) -> str:
    """Return a trajectory's label in a picture: "lake-3 #1 · 412 tokens"."""
    return f"{printable(trajectory.prompt_id)} #{trajectory.sample} · {trajectory.gen_tokens} tok"


def render(package: str, template: str, **values: object) -> str:
    """Return the text of `template`, a file of `package` ("treadle_cli.simulate"), with `values` as
    its names."""
    return _environment(package).get_template(template).render(values)


@cache
def _environment(package: str) -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader(package, ""),
        autoescape=select_autoescape(enabled_extensions=("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = format  # {{ share | number(".1%") }}
    environment.filters["printable"] = printable
    return environment
