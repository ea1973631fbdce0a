"""What the page of `bench predictor` says of its rows: which estimator is ahead, and whether quantiles hold."""

from collections.abc import Mapping, Sequence
from typing import Any

from treadle_bench.bench import Figures

Row = Mapping[str, Any]

ORDER = ("learned", "chosen", "siblings", "boosted", "numbers", "prompt-only", "history")
BASELINES = ("siblings", "boosted", "numbers", "prompt-only", "history")
SHOWN = {"recall_top10": "recall of the longest 10%", "pearson_log": "Pearson, log", "pinball": "pinball loss"}
LOWER_IS_BETTER = ("pinball",)
LEVELS = {"below_p10": 0.1, "below_p50": 0.5, "below_p90": 0.9}
TOLERANCE = 0.05  # of a share below a quantile


def page_values(found: Figures) -> dict[str, Any]:
    """For the template. sections: the rows of each data set."""
    rows = [row for row in found["rows"] if row["estimator"] in ORDER]
    of_data = {
        data: [row for row in rows if row["data"] == data] for data in dict.fromkeys(row["data"] for row in rows)
    }
    return {
        "estimators": [name for name in ORDER if any(row["estimator"] == name for row in rows)],
        "sections": of_data,
        "shown": SHOWN,
        "levels": LEVELS,
        "traces": found.get("traces"),
        "latency": found if "p50_ms" in found else None,
        "compare_learned": compare_learned,
        "check_quantiles": check_quantiles,
        "describe_rise": describe_rise,
    }


def compare_learned(rows: Sequence[Row], score: str) -> str:
    """At which steps the learned estimator is ahead of every baseline, and which baseline is ahead at the others."""
    ahead, behind = [], []
    for step in dict.fromkeys(row["step"] for row in rows):
        of = {row["estimator"]: row[score] for row in rows if row["step"] == step}
        sign = -1.0 if score in LOWER_IS_BETTER else 1.0
        best = max((name for name in BASELINES if name in of), key=lambda name: sign * of[name])
        if "learned" in of and sign * of["learned"] > sign * of[best]:
            ahead.append(str(step))
        else:
            than = f", learned {of['learned']:.2f}" if "learned" in of else ""
            behind.append(f"{best} at step {step} ({of[best]:.2f}{than})")
    said = f"learned is ahead of every baseline at step {', '.join(ahead)}" if ahead else "learned is nowhere ahead"
    return said + (f"; ahead of it: {'; '.join(behind)}" if behind else "")


def check_quantiles(rows: Sequence[Row], estimator: str) -> str:
    """The steps and quantiles at which the share of true values below the quantile is off by more than TOLERANCE."""
    points = f"{round(100 * TOLERANCE)} points"
    off = [
        f"step {row['step']} {name.removeprefix('below_')} {row[name]:.2f}{_interval(row, name)}"
        for row in rows
        if row["estimator"] == estimator
        for name, level in LEVELS.items()
        if abs(row[name] - level) > TOLERANCE
    ]
    return f"off by more than {points}: {', '.join(off)}" if off else f"all within {points}"


def describe_rise(rows: Sequence[Row], score: str) -> str:
    """The learned estimator's score by step, and whether it rises over steps 0, 1 and 2."""
    values = {row["step"]: row[score] for row in rows if row["estimator"] == "learned"}
    said = ", ".join(f"step {step} {value:.2f}" for step, value in values.items())
    first = [values[step] for step in (0, 1, 2) if step in values]
    return f"{said}: it {'rises' if first == sorted(set(first)) else 'does not rise'} over steps 0, 1, 2"


def _interval(row: Row, name: str) -> str:
    interval = row.get(f"{name}_interval")
    return "" if interval is None else f" ({interval[0]:.2f}–{interval[1]:.2f} over prompts)"
