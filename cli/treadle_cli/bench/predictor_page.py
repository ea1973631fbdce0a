"""The page and the picture of `bench predictor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle_cli.bench.figures_picture import SERIES, figure_with, tidy
from treadle_cli.bench.page import paragraph, point, table

ORDER = ("learned", "siblings", "boosted", "numbers", "prompt-only", "history")
SHOWN = (("recall_top10", "recall of the longest 10%"), ("pearson_log", "Pearson, log"), ("pinball", "pinball loss"))
KNOWS = {
    "history": "the average of its prompt's earlier trajectories, else of all",
    "siblings": "what the service says without a model: siblings so far, then history",
    "boosted": "gradient-boosted trees on the numbers",
    "numbers": "the learned head on the numbers alone",
    "prompt-only": "the learned predictor, asked once before the first step",
    "learned": "the learned predictor: text and numbers, asked after every step",
}


def page(found: Mapping[str, Any]) -> Iterator[str]:
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    yield "# predictor: who knows what is left"
    yield ""
    yield from paragraph(
        f"`treadle bench predictor --data DIR --seed {found['seeds'][0]} --pictures bench/results`. Backbone",
        f"{found['backbone']}, frozen; each prompt is tested once, by estimators fitted without it; 95% intervals over",
        "prompts. Steps 0 to 2 are asked of the same trajectories, those of more than two steps.",
    )
    yield "![by step](predictor.png)"
    yield ""
    yield from table(["estimator", "knows"], ([name, KNOWS[name]] for name in ORDER if _has(rows, name)))
    yield ""
    for data in dict.fromkeys(row["data"] for row in rows):
        yield f"## {data}"
        yield ""
        yield from table(
            ["step", "estimator", "trajectories", *(title for _, title in SHOWN), "Pearson", "within p10 to p90"],
            (
                [
                    row["step"],
                    row["estimator"],
                    row["trajectories"],
                    *(_with_interval(row, name) for name, _ in SHOWN),
                    f"{row['pearson']:.2f}",
                    f"{row['coverage_80']:.2f}",
                ]
                for row in rows
                if row["data"] == data and row["estimator"] in ORDER
            ),
        )
        yield ""
        for name, title in SHOWN:
            yield from point(f"{title}: {_verdict([row for row in rows if row['data'] == data], name)}.")
        yield ""
    yield from paragraph(
        "Folds are pooled: where a predictor says nearly the same of all, what correlates is the others' mean,",
        "which is low where its own is long. So a correlation below 0 here means that it knows nothing.",
    )


def draw(found: Mapping[str, Any], file: Path) -> None:
    rows = found["rows"]
    data = list(dict.fromkeys(row["data"] for row in rows))
    note = f"By steps seen, each prompt tested once. Backbone {found['backbone']}, frozen. Shade: 95% over prompts."
    with figure_with("Who knows what is left", note, file, height_in=3.2 * len(data) + 1.0, top=0.86) as figure:
        panels = figure.subplots(len(data), len(SHOWN), squeeze=False)
        for line, of in zip(panels, data, strict=True):
            for axes, (score, title) in zip(line, SHOWN, strict=True):
                for name, colour in zip(ORDER, SERIES, strict=False):
                    own = [row for row in rows if row["data"] == of and row["estimator"] == name]
                    if not own:
                        continue
                    steps, values = [row["step"] for row in own], [row[score] for row in own]
                    axes.plot(steps, values, color=colour, marker="o", markersize=3, label=name)
                    if name == "learned":
                        low, high = zip(*(row[f"{score}_interval"] for row in own), strict=True)
                        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
                axes.set_title(f"{of if score == SHOWN[0][0] else ''}\n{title}", size=9, loc="left")
                axes.set_xticks([0, 1, 2, 4, 8])
                axes.set_xlabel("steps seen")
                tidy(axes)
        panels[0][-1].legend(frameon=False, fontsize=7)
        figure.subplots_adjust(hspace=0.45, wspace=0.25)


def _has(rows: Sequence[Mapping[str, Any]], estimator: str) -> bool:
    return any(row["estimator"] == estimator for row in rows)


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{row[name]:.2f} ({low:.2f}–{high:.2f})"


def _verdict(rows: Sequence[Mapping[str, Any]], score: str) -> str:
    """At which steps the learned one leads, and who does elsewhere."""
    said = []
    for step in dict.fromkeys(row["step"] for row in rows):
        of = {row["estimator"]: row[score] for row in rows if row["step"] == step and row["estimator"] in ORDER}
        best = min(of, key=of.__getitem__) if score == "pinball" else max(of, key=of.__getitem__)
        said.append(f"step {step} {best}")
    return "ahead is at " + ", ".join(said)
