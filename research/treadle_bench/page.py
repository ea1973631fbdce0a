"""Pages of figures: fills `pages/<name>.md.j2` with the figures of a run. Templates hold words and
tables.

A template sees the keys of the bench's JSON, what the bench prepares for its page, and the names
below. A name that is missing is an error. `MACHINE` describes where the committed results were
made.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

MACHINE = "2 cores of an AMD EPYC, no accelerator: everything is simulated"


def render(name: str, values: Mapping[str, Any]) -> str:
    """The page of bench `name` in Markdown. Raises jinja2.UndefinedError for a value that its
    template needs."""
    return _templates.get_template(f"{name}.md.j2").render(values, name=name)


def seconds(value: float) -> str:
    """As in 1,204 or 56.1."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def ratio(value: float, spread: Sequence[float] | None = None) -> str:
    """As in 1.24 or 1.24 (1.19–1.30)."""
    return (
        f"{value:.2f} ({value_range(spread)})"
        if spread and spread[0] < spread[1]
        else f"{value:.2f}"
    )


def value_range(values: Iterable[float]) -> str:
    """Least and greatest, as in 1.02–1.31; nothing of no values."""
    found = list(values)
    return f"{min(found):.2f}–{max(found):.2f}" if found else ""


def ratios_to(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Range of the ratios of an ablation to its variants `names`, as in 1.02–1.31×."""
    ratios = [row["ratio_to"][name] for row in rows for name in names if name in row["ratio_to"]]
    return f"{value_range(ratios)}×"


def describe_seeds(seeds: Sequence[int]) -> str:
    """As in "seed 0" or "median of seeds 0 to 4"."""
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"median of seeds {seeds[0]} to {seeds[-1]}"


def command(name: str, seeds: Sequence[int], repeats: int, scale: float | None = None) -> str:
    """The command that printed the figures."""
    scaled = "" if scale is None else f" --scale {scale:g}"
    return (
        f"treadle bench {name} --seed {seeds[0]} --repeats {repeats}{scaled} --pictures "
        "research/results"
    )


def heading(cells: Iterable[object]) -> str:
    """First two lines of a Markdown table whose columns depend on the figures."""
    line = row(cells)
    return f"{line}\n|{'---|' * (line.count('|') - 1)}"


def row(cells: Iterable[object]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


_templates = Environment(
    loader=PackageLoader("treadle_bench", "pages"),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,
)
_templates.globals |= {"machine": MACHINE, "command": command, "heading": heading, "row": row}
_templates.filters |= {
    "seconds": seconds,
    "ratio": ratio,
    "ratios_to": ratios_to,
    "seeds": describe_seeds,
}
_templates.filters |= {
    "fixed": lambda value, digits=2: f"{value:,.{digits}f}",
    "percent": lambda value, digits=0: f"{value:.{digits}%}",
}
