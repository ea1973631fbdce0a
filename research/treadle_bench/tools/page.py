"""What the page of `bench tools` needs beside its figures: the aims, the paper's own figures, and
the assumptions."""

from collections.abc import Iterator, Mapping
from typing import Any

from treadle_bench.tools import api_calls, coding, cores, gpus, reward_models, trace
from treadle_bench.tools.pods import PodRules

# ARL-Tangram's Table 1, seconds an action: execution, queue, overhead.
PAPER_TABLE_1 = {
    ("coding", 1_280): "0.975 / 0.015 / 0.024",
    ("coding", 1_536): "1.206 / 0.428 / 0.036",
    ("rewards", 2_048): "0.621 / 0.081 / 0.201",
    ("rewards", 3_072): "0.705 / 15.05 / 0.24",
}
CALL_COLUMNS = {
    "call_s": "a call, s",
    "answered_call_s": "s for each answer",
    "whole_trajectory_s": "s for each trajectory without a lost call",
    "failed_calls": "calls lost",
    "failed_trajectories": "trajectories that lost a call",
    "refused": "refusals",
    "makespan_s": "last trajectory, s",
}

Found = Mapping[str, Any]


def page_values(found: Found) -> dict[str, Any]:
    """For the template."""
    batches = found["cores"]["batches"]
    rewards = [row for row in found["gpus"]["batches"] if row["pace"] == gpus.DENSE_PACE]
    printed = [row["ratio_pods"] / row["ratio_as_printed"] for row in batches]
    varied = [batches[0]["batch"], found["cores"]["varied_batch"], found["setting"]["batch"]]
    return {
        "data": found["cores"]["shapes"] not in ("fitted", "traces"),
        "aims": list(check_aims(found)),
        "paces": {name: found["gpus"]["fractions"][name] for name in gpus.PACES},
        "table1": [("coding", row) for row in found["cores"]["table1"]]
        + [("rewards", row) for row in rewards],
        "paper_table1": PAPER_TABLE_1,
        "call_columns": CALL_COLUMNS,
        "varied": varied,
        "sensitivity": {row["changed"]: row for row in found["cores"]["sensitivity"]},
        "pods_range": [
            min(row["ratio_pods"] for row in batches),
            max(row["ratio_pods"] for row in batches),
        ],
        "printed_range": [min(printed), max(printed)],
        "degree_4": batches[1],
        "degree_16": batches[-2],
        "highest_ratio": highest_ratio,
        "last_rewards": max(rewards, key=lambda row: row["batch"]),
        "assumed": {
            "coding": coding,
            "models": reward_models,
            "trace": trace,
            "api": api_calls,
            "pods": PodRules(),
        }
        | {"cores": cores, "gpus": gpus},
    }


def check_aims(found: Found) -> Iterator[list[str]]:
    """Rows of a table: the aim, its limit, the value, and whether the aim is reached."""
    batch, small = found["setting"]["batch"], found["setting"]["small_batch"]
    rows = {row["batch"]: row for row in found["cores"]["batches"]}
    highest = {4: highest_ratio(rows[small], 4), 16: highest_ratio(rows[batch], 16)}
    busy = "fraction of the reward GPUs for the same ACT, GPUs as busy as in"
    decision = (
        f"one decision, {found['decisions']['waiting']:,} waiting, 99th percentile of the "
        "worst state, ms"
    )
    aims: tuple[tuple[str, str, float, float | None, float | None], ...] = (
        (
            f"ACT, a pod for each trajectory over ours, batch {batch:,}",
            "≥",
            4.0,
            found["act_ratio_pod_1280"],
            None,
        ),
        ("the same, least of all batches", "≥", 3.0, found["act_ratio_min"], None),
        (
            f"ACT, degree 4 over ours, batch {small:,}",
            "≥",
            2.0,
            found["act_ratio_dop4_256"],
            highest[4],
        ),
        (
            f"ACT, degree 16 over ours, batch {batch:,}",
            "≥",
            3.0,
            found["act_ratio_dop16_1280"],
            highest[16],
        ),
        (f"{busy} Figure 3b", "≤", 0.29, found["gpu_fraction_same_act"], None),
        (
            f"{busy} Table 1",
            "≤",
            0.29,
            found["gpus"]["fractions"][gpus.DENSE_PACE]["fraction"],
            None,
        ),
        (decision, "≤", 5.0, found["decision_p99_ms"], None),
        ("decisions, % of execution (3% in the paper)", "≤", 0.5, found["overhead_pct"], None),
        ("Invoke of a trivial snippet, warm, median, ms", "≤", 5.0, found["live_p50_ms"], None),
        ("the same, 99th percentile, ms", "≤", 25.0, found["live_p99_ms"], None),
    )
    for aim, sign, limit, value, bound in aims:
        reached = value is not None and (value >= limit if sign == "≥" else value <= limit)
        yield _aim(aim, f"{sign} {limit:g}", value, reached, bound)
    asked = None if found["live"]["missing"] else found["live"]["sessions"]["asked"]
    ended = found["sessions_ok"]
    yield _aim(
        "sessions open at once that end well",
        "all of 200",
        ended,
        ended is not None and ended == asked,
    )


def _aim(
    aim: str, limit: str, value: float | None, reached: bool, highest: float | None = None
) -> list[str]:
    if value is None:
        return [aim, limit, "not measured", "no"]
    why = "" if highest is None else f"; no scheduler can have more than {highest:.2f}"
    return [aim, limit, f"**{value:.4g}**", "yes" if reached else f"**no**{why}"]


def highest_ratio(row: Found, degree: int) -> float:
    """The highest ratio to a fixed degree that any scheduler can have."""
    return float(row[f"ratio_degree_{degree}"] * row["elastic_s"] / row["least_s"])
