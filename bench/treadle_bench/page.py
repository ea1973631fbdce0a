"""What stands beside a figure: its page in Markdown, its JSON and its picture, one name for all three."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MACHINE = "2 cores of an AMD EPYC, no accelerator: everything is simulated"
COLUMNS = 140  # of text in a page

Draw = Callable[[Mapping[str, Any], Path], None]
Write = Callable[[Mapping[str, Any]], Iterable[str]]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return lines


def command(name: str, found: Mapping[str, Any]) -> str:
    """What printed it, from the `seeds`, `repeats` and `scale` that it holds."""
    scale = f" --scale {found['scale']:g}" if "scale" in found else ""
    seed, repeats = found["seeds"][0], found["repeats"]
    return f"treadle bench {name} --seed {seed} --repeats {repeats}{scale} --pictures bench/results"


def paragraph(*sentences: str) -> list[str]:
    """Lines of text, and an empty one."""
    return [*_wrapped(" ".join(sentences), ""), ""]


def point(*sentences: str) -> list[str]:
    """Lines of one item of a list."""
    return _wrapped("- " + " ".join(sentences), "  ")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def put_down(name: str, found: Mapping[str, Any], folder: Path, write: Write, draw: Draw | None = None) -> None:
    """Writes NAME.json, NAME.md and NAME.png into `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / f"{name}.md").write_text("\n".join(write(found)) + "\n")
    if draw is not None:
        draw(found, folder / f"{name}.png")


def seconds(value: float) -> str:
    """As in 1,204 or 56.1."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def ratio(value: float, spread: Sequence[float] | None = None) -> str:
    """As in 1.24 or 1.24 (1.19–1.30)."""
    return f"{value:.2f} ({spread[0]:.2f}–{spread[1]:.2f})" if spread and spread[0] < spread[1] else f"{value:.2f}"


def seeds(found: Mapping[str, Any]) -> str:
    """As in "seed 0" or "median of seeds 0 to 4"."""
    first, last = found["seeds"][0], found["seeds"][-1]
    return f"seed {first}" if first == last else f"median of seeds {first} to {last}"
