"""What the ratios of `treadle bench tools` hang on, and where they differ from the paper's, as parts of its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treadle_bench.page import paragraph, point, table
from treadle_bench.tools.gpus import DENSE_PACE

Found = Mapping[str, Any]
LONGER = "actions fill 60% of a life"


def sensitivity(found: Found) -> Iterator[str]:
    yield "## What the ratios hang on"
    yield ""
    setting = found["setting"]
    sizes = [found["cores"]["batches"][0]["batch"], found["cores"]["varied_batch"], setting["batch"]]
    yield from paragraph(
        "Ratios with one assumption changed, of one seed. Rewards are always as long as it takes for actions",
        "to fill 47% of a life",
        "on one core (Figure 3c), unless that is what is changed: longer tools leave less to rewards,",
        "which alone can be",
        "scaled.",
    )
    yield from table(
        [
            "changed",
            *(f"pods, batch {size:,}" for size in sizes),
            f"degree 4, {setting['small_batch']:,}",
            f"degree 16, {setting['batch']:,}",
            "tools of a trajectory, s",
            "reward on one core, s",
        ],
        (
            [
                row["changed"],
                *(f"{row[f'ratio_{size}']:.2f}" for size in sizes),
                f"{row['ratio_degree_4']:.2f}",
                f"{row['ratio_degree_16']:.2f}",
                f"{row['tools_s']:.0f}",
                f"{row['rewards_s']:.0f}",
            ]
            for row in found["cores"]["sensitivity"]
        ),
    )
    yield ""


def against(found: Found) -> Iterator[str]:
    cores, gpus = found["cores"], found["gpus"]
    sensitive = {row["changed"]: row for row in cores["sensitivity"]}
    ratios = [row["ratio_pods"] for row in cores["batches"]]
    printed = [row["ratio_pods"] / row["ratio_as_printed"] for row in cores["batches"]]
    dense = {row["batch"]: row for row in gpus["batches"] if row["pace"] == DENSE_PACE}
    yield from point(
        f"Figure 8a: 3.1 to 27.7 times, ours {min(ratios):.1f} to {max(ratios):.1f}; the paper's scheduler as printed",
        f"{min(printed):.1f} to {max(printed):.1f} here. Its baseline falls over at 1,536 by timeouts of",
        "a control plane that",
        "it does not describe; ours waits for pods no longer than their nodes take to start them, and",
        "with a timeout of 60 s",
        "hardly anybody loses a pod. What it loses is reward time: tests on one core. The paper's pods",
        "lose more on tools",
        "(9.0 times), which must be queueing that half a core a pod on as many cores does not explain.",
    )
    low, high = cores["batches"][1], cores["batches"][-2]
    longer, assumed = sensitive[LONGER], sensitive["as assumed"]
    yield from point(
        "Figure 9: 2.0 times against degree 4 at batch 256 and 3.0 against degree 16 at 1,280; ours",
        f"{low['ratio_degree_4']:.2f} and {high['ratio_degree_16']:.2f}. A scheduler that had every core for every",
        f"action could have {most_ratio(low, 4):.2f} and {most_ratio(high, 16):.2f}: most of what is left is tools,",
        "which nobody shortens. The paper's trace must have longer rewards, or more of them at once: where they take",
        f"{longer['rewards_s']:.0f} s on one core instead of {assumed['rewards_s']:.0f} s, ours are",
        f"{longer['ratio_degree_4']:.2f} and {longer['ratio_degree_16']:.2f}.",
    )
    last = dense[max(dense)]
    yield from point(
        "Figure 8b: at batch 2,048 it is 18.1 times as fast as groups of their own and ServerlessLLM",
        "fails; here domains have",
        "equal shares, which suits such groups, and lengths differ by domain alone. At batch",
        f"{last['batch']:,} and the pace of Table 1 own groups are",
        f"{'faster' if last['ratio_static'] < 1 else 'slower'} than",
        f"the pool ({last['ratio_static']:.2f}): where all GPUs are busy anyway, models that never move",
        "lose nothing to",
        "restoring.",
    )
    yield from point(
        "The two paces: with lives as the project's agents have them and lengths such that execution",
        "takes the 0.62 s of",
        "Table 1, queue and restoring come out as in Table 1 at batch 2,048, but then groups of their",
        "own are busy four times",
        "as much as Figure 3b shows, and no pool on 29% of the GPUs could do the work in time. With",
        "lives four times as long",
        "they are as busy as in Figure 3b. The fraction of GPUs is given for both.",
    )
    four = sensitive["pods run tests with -n 4"][f"ratio_{cores['varied_batch']}"]
    yield from point(
        "Where we lose: pods whose tests run with `-n 4` are beaten by no more than",
        f"{four:.1f} times, since most of what elastic cores save is the single process of the datasets'",
        "test commands. With",
        "tools as long as the public runs' intervals, which hold the model's latency too, or as the",
        "sessions' gaps, which",
        "hold the human, next to nothing is left to rewards and no scheduler is much better than pods;",
        "the paper's mean",
        "execution of 0.975 s an action (Table 1) excludes both. Fixed degree 16 is near ours until",
        "cores are scarce, and",
        "degree 4 once they are: the elastic scheduler is never far from the better of the two, but",
        "does not beat both by",
        "the paper's factors.",
    )
    yield from point(
        "DeepSearch: the manager loses no call, and no trajectory comes to nothing, but calls that are",
        "answered are not",
        "answered sooner: a provider's quota is what it is, and whoever gives up leaves it to others.",
    )


def most_ratio(row: Found, degree: int) -> float:
    """The ratio to a fixed degree that no scheduler is above."""
    return float(row[f"ratio_degree_{degree}"] * row["elastic_s"] / row["least_s"])
