"""The page of `bench predictor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treadle_bench.page import paragraph, point, table

Row = Mapping[str, Any]

ORDER = ("learned", "chosen", "siblings", "boosted", "numbers", "prompt-only", "history")
BASELINES = ("siblings", "boosted", "numbers", "prompt-only", "history")
SHOWN = (("recall_top10", "recall of the longest 10%"), ("pearson_log", "Pearson, log"), ("pinball", "pinball loss"))
LOWER_IS_BETTER = ("pinball",)
LEVELS = (("below_p10", 0.1), ("below_p50", 0.5), ("below_p90", 0.9))
TOLERANCE = 0.05  # of a share below a quantile
KNOWS = {
    "history": "the average of its prompt's earlier trajectories, else of all",
    "siblings": "what the service says without a model: siblings so far, then history",
    "boosted": "gradient-boosted trees on the numbers",
    "numbers": "the learned head on the numbers alone",
    "prompt-only": "the learned predictor, asked once before the first step",
    "learned": "the learned predictor: text and numbers, asked after every step",
    "chosen": "what is served: of learned, numbers and siblings the best on prompts that were left out of its fit",
}


def page(found: Mapping[str, Any]) -> Iterator[str]:
    rows: Sequence[Row] = found["rows"]
    yield "# predictor: who knows what is left"
    yield ""
    read = "--data DIR" if found.get("traces") is None else f"--traces {found['traces']}"
    yield from paragraph(
        f"`treadle bench predictor {read} --seed {found['seeds'][0]} --repeats {found['repeats']} --pictures",
        f"bench/results`. Backbone {found['backbone']}, frozen; each prompt is tested by estimators fitted without it,",
        f"once for each of {found['repeats']} ways to deal the prompts into folds, and figures are over all of them,",
        "since a share moves by some points from one deal to the next; 95% intervals over prompts. Steps 0 to 2 are",
        "compared on the same trajectories, those of more than two steps; shares of truths within quantiles are of all",
        "that were asked.",
    )
    yield "![by step](predictor.png)"
    yield ""
    yield from table(["estimator", "knows"], ([name, KNOWS[name]] for name in ORDER if _has(rows, name)))
    yield ""
    yield from table(["data", "trajectories", "prompts", "texts"], (_of_data(each) for each in found["data"]))
    yield ""
    yield from paragraph(
        "Recall and correlation are scored within each fold and averaged by size: over all folds at once, who says the",
        "same of all would be anticorrelated, since the mean of the other folds is low where the own is long.",
        "Regret is the simulator's: each fold's trajectories on four engines, a slot for every fourth, Treadle told",
        "by that estimator after each step up to the eighth, against the same told every length; one number for all",
        "steps. Below 0: the policy is a heuristic, and with few trajectories it may do better by luck than by truth.",
    )
    yield from _latency(found)
    for data in dict.fromkeys(row["data"] for row in rows):
        yield from _section(data, [row for row in rows if row["data"] == data and row["estimator"] in ORDER])


def _latency(found: Mapping[str, Any]) -> Iterator[str]:
    """Nothing where no step has a text."""
    if "p50_ms" in found:
        asked = found["latency_requests"] + found["latency_others"]
        yield from paragraph(
            "A prediction by the service, which reads what is new and what it has not read ahead:",
            f"p50 {found['p50_ms']} ms, p99 {found['p99_ms']} ms for the caller, over {asked:,} questions after steps,",
            f"{found['latency_per_s']:g} a second, sixteen trajectories side by side.",
            f"The model answered {found['latency_requests']:,}, siblings or history the others.",
        )


def _section(data: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"## {data}"
    yield ""
    for name, title in SHOWN:
        yield from point(f"{title}: {verdict(rows, name)}.")
    for name in ("recall_top10", "pearson_log"):
        yield from point(f"{dict(SHOWN)[name]} of the learned one: {_rising(rows, name)}.")
    for estimator in ("learned", "chosen"):
        if any(row["estimator"] == estimator for row in rows):
            yield from point(calibrated(rows, estimator))
    yield ""
    yield from table(
        ["estimator", "regret, mean of folds", "least to most"],
        ([row["estimator"], _percent(row["regret"]), _range(row["regret_range"])] for row in rows if row["step"] == 0),
    )
    yield ""
    yield from table(
        [
            "step",
            "estimator",
            "trajectories",
            *(title for _, title in SHOWN),
            "Pearson",
            *_heads(),
            "within p10 to p90",
        ],
        (
            [
                row["step"],
                row["estimator"],
                row["trajectories"],
                *(_with_interval(row, name) for name, _ in SHOWN),
                f"{row['pearson']:.2f}",
                *(f"{row[name]:.2f}" for name, _ in LEVELS),
                f"{row['coverage_80']:.2f}",
            ]
            for row in rows
        ),
    )
    yield ""


def verdict(rows: Sequence[Row], score: str) -> str:
    """At which steps the learned one is ahead of every baseline, and who is at the others."""
    ahead, behind = [], []
    for step in dict.fromkeys(row["step"] for row in rows):
        of = {row["estimator"]: row[score] for row in rows if row["step"] == step}
        sign = -1.0 if score in LOWER_IS_BETTER else 1.0
        baselines = {name: value for name, value in of.items() if name in BASELINES}
        best = max(baselines, key=lambda name: sign * baselines[name])
        if "learned" in of and sign * of["learned"] > sign * baselines[best]:
            ahead.append(str(step))
        else:
            than = f", learned {of['learned']:.2f}" if "learned" in of else ""
            behind.append(f"{best} at step {step} ({baselines[best]:.2f}{than})")
    said = f"learned is ahead of every baseline at step {', '.join(ahead)}" if ahead else "learned is nowhere ahead"
    return said + (f"; ahead of it: {'; '.join(behind)}" if behind else "")


def calibrated(rows: Sequence[Row], estimator: str) -> str:
    """Where an estimator's quantiles hold what they say."""
    off = [
        f"step {row['step']} {name.removeprefix('below_')} {row[name]:.2f}{_interval(row, name)}"
        for row in rows
        if row["estimator"] == estimator
        for name, level in LEVELS
        if abs(row[name] - level) > TOLERANCE
    ]
    points = round(100 * TOLERANCE)
    if not off:
        return f"quantiles of the {estimator} one: all within {points} points."
    return f"quantiles of the {estimator} one, share of truths below, beyond {points} points: {', '.join(off)}."


def _interval(row: Row, name: str) -> str:
    interval = row.get(f"{name}_interval")
    return "" if interval is None else f" ({interval[0]:.2f}–{interval[1]:.2f} over prompts)"


def _rising(rows: Sequence[Row], score: str) -> str:
    values = {row["step"]: row[score] for row in rows if row["estimator"] == "learned"}
    said = ", ".join(f"step {step} {value:.2f}" for step, value in values.items())
    first = [values[step] for step in (0, 1, 2) if step in values]
    return f"{said}: steps 0, 1, 2 {'rise' if first == sorted(set(first)) else 'do not rise'}"


def _of_data(each: Mapping[str, Any]) -> list[object]:
    prompts = "drawn" if each["drawn"] else "all"
    texts = "prompt and steps" if each["step_texts"] else "prompt alone" if each["prompt_texts"] else "none"
    return [each["name"], each["trajectories"], f"{each['prompts']} ({prompts})", texts]


def _heads() -> list[str]:
    return [f"≤ {name.removeprefix('below_')}" for name, _ in LEVELS]


def _has(rows: Sequence[Row], estimator: str) -> bool:
    return any(row["estimator"] == estimator for row in rows)


def _with_interval(row: Row, name: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{row[name]:.2f} ({low:.2f}–{high:.2f})"


def _percent(value: float) -> str:
    return f"{100 * value:+.1f}%"


def _range(values: Sequence[float]) -> str:
    return f"{_percent(values[0])} to {_percent(values[1])}"
