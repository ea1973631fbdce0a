"""What `treadle bench tools` asks of itself, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treadle_bench.tools.against import most_ratio
from treadle_bench.tools.gpus import DENSE_PACE

Found = Mapping[str, Any]
PAPER_OVERHEAD_PCT, OVERHEAD_PCT = 3.0, 0.5


def lines(found: Found) -> Iterator[list[str]]:
    """Rows of a table: what is asked, the line, what was found, and whether that holds."""
    batch, small = found["setting"]["batch"], found["setting"]["small_batch"]
    pods = f"ACT, a pod a trajectory over ours, batch {batch:,}"
    yield _row(pods, "≥ 4", found["act_ratio_pod_1280"], found["act_ratio_pod_1280"] >= 4.0)
    yield _row("the same, least of all batches", "≥ 3", found["act_ratio_min"], found["act_ratio_min"] >= 3.0)
    four, sixteen = found["act_ratio_dop4_256"], found["act_ratio_dop16_1280"]
    rows = {row["batch"]: row for row in found["cores"]["batches"]}
    most_four, most_sixteen = most_ratio(rows[small], 4), most_ratio(rows[batch], 16)
    yield _row(f"ACT, degree 4 over ours, batch {small:,}", "≥ 2", four, four >= 2.0, most_four)
    yield _row(f"ACT, degree 16 over ours, batch {batch:,}", "≥ 3", sixteen, sixteen >= 3.0, most_sixteen)
    fraction = found["gpu_fraction_same_act"]
    asked = "part of the reward GPUs for the same ACT, as busy as in Figure 3b"
    yield _row(asked, "≤ 0.29", fraction, fraction is not None and fraction <= 0.29)
    dense = found["gpus"]["fractions"][DENSE_PACE]["fraction"]
    asked = "the same, as busy as in Table 1"
    yield _row(asked, "≤ 0.29", dense, dense is not None and dense <= 0.29)
    asked = f"one decision, {found['decisions']['waiting']:,} waiting, 99th percentile of the worst state, ms"
    yield _row(asked, "≤ 5", found["decision_p99_ms"], found["decision_p99_ms"] <= 5.0)
    yield _row(
        "decisions, % of execution", "< 3, aim < 0.5", found["overhead_pct"], found["overhead_pct"] < OVERHEAD_PCT
    )
    p50, p99, ended = found["live_p50_ms"], found["live_p99_ms"], found["sessions_ok"]
    yield _row("Invoke of a trivial snippet, warm, median, ms", "≤ 5", p50, p50 is not None and p50 <= 5.0)
    yield _row("the same, 99th percentile, ms", "≤ 25", p99, p99 is not None and p99 <= 25.0)
    asked_for = None if found["live"]["missing"] else found["live"]["sessions"]["asked"]
    yield _row("sessions at once that end well", "200", ended, ended is not None and ended == asked_for)


def _row(asked: str, line: str, value: float | None, holds: bool, most: float | None = None) -> list[str]:
    if value is None:
        return [asked, line, "not measured", "no"]
    missed = "**missed**" if most is None else f"**missed**; no scheduler could have more than {most:.2f}"
    return [asked, line, f"**{value:.4g}**", "holds" if holds else missed]
