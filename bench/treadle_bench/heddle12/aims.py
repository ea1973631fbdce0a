"""What Treadle asks of itself in `treadle bench heddle12`, and how far it comes: the aims that it misses too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from treadle_bench.page import paragraph, table

Cells = Sequence[Mapping[str, Any]]
Values = Callable[[Cells], list[float]]

TAIL_AIM = 1.5  # times the best baseline, where the longest trajectory is what binds
LEAST_AIM = 0.98  # times the best baseline, anywhere
ORACLE_AIM = 0.9  # of the same planner's speed when it is told every length
PAPER_AIMS = {"slime": 2.5, "verl": 2.3}  # at the parallelism at which the paper runs them (Heddle §7.1)


def aims(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown: a row an aim, a column a size."""
    sizes = [found, *([found["small"]] if "small" in found else [])]
    heads = ["asked", *(f"{size['gpus']} GPUs" for size in sizes), f"{found['gpus']} GPUs, told every length"]
    yield from table(heads, _rows([size["cells"] for size in sizes], found["cells"]))
    yield ""
    tail = _of_tail(found["cells"])
    below = [cell["ratio_to_bound"] for cell in found["cells"]]
    told = [cell["bound_s"] / cell["policy"]["oracle"] for cell in found["cells"]]
    yield from paragraph(
        f"{len(tail)} of {len(found['cells'])} cells have the tail as their bound, yet in all of them work and tail",
        "both bind: GPUs that run the longest with few beside them are missing for the rest. Treadle reaches",
        f"{_range(below)} of the bound, told every length {_range(told)}; from the first to the second is what the",
        "predictor gets wrong, the rest is the planner's or nobody's.",
    )


def _rows(sizes: Sequence[Cells], told: Cells) -> Iterator[list[str]]:
    def row(asked: str, aim: float, values: Values, when_told: str = "") -> list[str]:
        return [asked, *(_reached(values(cells), aim) for cells in sizes), when_told]

    asked = f"{TAIL_AIM} times the best baseline where the tail binds"
    yield row(asked, TAIL_AIM, lambda cells: _best(_of_tail(cells)), _reached(_told(_of_tail(told)), TAIL_AIM))
    yield row(f"nowhere below {LEAST_AIM} times the best baseline", LEAST_AIM, _best, _reached(_told(told), LEAST_AIM))
    yield row(f"{ORACLE_AIM} of the planner that is told every length", ORACLE_AIM, _to_oracle)
    for name, aim in PAPER_AIMS.items():
        asked = f"{aim} times {name} at the paper's degree, where the paper has it"
        yield row(asked, aim, partial(_at_paper_degree, name))


def _of_tail(cells: Cells) -> Cells:
    return [cell for cell in cells if cell["bound_by"] == "tail"]


def _best(cells: Cells) -> list[float]:
    return [cell["ratio_to_best_baseline"] for cell in cells]


def _told(cells: Cells) -> list[float]:
    return [cell["policy"][cell["best_baseline"]] / cell["policy"]["oracle"] for cell in cells]


def _to_oracle(cells: Cells) -> list[float]:
    return [cell["ratio_to_oracle"] for cell in cells]


def _at_paper_degree(name: str, cells: Cells) -> list[float]:
    ratios = (cell["ratio_at_paper_degree"].get(name) for cell in cells)
    return [ratio for ratio in ratios if ratio is not None]


def _reached(values: Sequence[float], aim: float) -> str:
    if not values:
        return "no such cell"
    return f"{sum(value >= aim for value in values)} of {len(values)} cells ({_range(values)})"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}–{max(values):.2f}"
