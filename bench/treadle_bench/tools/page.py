"""The page of `treadle bench tools`: what must hold, each figure beside the paper's, and what it hangs on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treadle_bench.page import paragraph, ratio, table
from treadle_bench.tools.against import against, sensitivity
from treadle_bench.tools.assumptions import assumptions
from treadle_bench.tools.gpus import DENSE_PACE, SPARSE_PACE
from treadle_bench.tools.lines import lines

Found = Mapping[str, Any]
# ARL-Tangram's own figures, where its text or Table 1 gives a number: seconds of execution, queue, overhead.
PAPER_TABLE_1 = {
    ("coding", 1_280): (0.975, 0.015, 0.024),
    ("coding", 1_536): (1.206, 0.428, 0.036),
    ("rewards", 2_048): (0.621, 0.081, 0.201),
    ("rewards", 3_072): (0.705, 15.05, 0.240),
}


def page(found: Found) -> Iterator[str]:
    """Lines of Markdown."""
    first, last = found["seeds"]
    data = " --data DIR" if found["cores"]["shapes"] not in ("fitted", "traces") else ""
    yield "# tools: actions of tools and rewards"
    yield ""
    yield from paragraph(
        f"`treadle bench tools --seed {first} --repeats {found['repeats']}{data} --pictures",
        "bench/results`, on 2 cores of a",
        "shared machine, no accelerator. `tools.json` holds all figures. The evaluation of ARL-Tangram",
        "(§6) under a virtual",
        "clock: the gateway's own decisions on batches that start as one burst, against what they replace; then one",
        "decision, and the gateway itself, in real time. ACT is action completion time: waiting, the system's own and",
        "execution. Ratios are the baseline's ACT over ours: above 1 ours is shorter. Simulated figures",
        f"are of seed {first}."
        if first == last
        else f"are medians of seeds {first} to {last}, in brackets their range.",
    )
    yield "![completion times](tools.png)"
    yield ""
    yield "## What must hold"
    yield ""
    yield from table(["asked", "line", "found", ""], lines(found))
    yield ""
    yield from _cores(found["cores"])
    yield from _gpus(found)
    yield from _table1(found)
    yield from _calls(found["calls"])
    yield from _live(found)
    yield from sensitivity(found)
    yield "## What is assumed"
    yield ""
    yield from assumptions()
    yield ""
    yield "## Against the paper's own figures"
    yield ""
    yield from against(found)


def _spread(row: Found, key: str) -> Sequence[float] | None:
    return row["spread"][key] if "spread" in row else None


def _ratio(row: Found, key: str) -> str:
    return ratio(row[key], _spread(row, key))


def _cores(cores: Found) -> Iterator[str]:
    yield "## Coding on CPU cores (Figures 8a and 9)"
    yield ""
    yield from paragraph(
        "Mean seconds of all actions of a trajectory. `at best`: what no scheduler is below, every action",
        "at once on the most cores that it may have. `pods`: a pod a trajectory. `as printed`: the paper's",
        "scheduler, which does not count on actions that have yet to arrive. `degree`: the same",
        "scheduler as ours, rewards with exactly so many cores.",
    )
    heads = [
        "",
        "ours, s",
        "at best, s",
        "pods, s",
        "ratio to pods",
        "with timeouts",
        "to as printed",
        "to degree 4",
        "to degree 16",
    ]
    for name, rows in (("batch", cores["batches"]), ("cores", cores["cores"])):
        shown = [
            [
                f"{row[name]:,}",
                f"**{row['elastic_s']:.1f}**",
                f"{row['least_s']:.1f}",
                f"{row['pods_s']:.1f}",
                f"**{_ratio(row, 'ratio_pods')}**",
                f"{row['ratio_pods_timeouts']:.2f}",
                _ratio(row, "ratio_as_printed"),
                _ratio(row, "ratio_degree_4"),
                _ratio(row, "ratio_degree_16"),
            ]
            for row in rows
        ]
        heads[0] = name
        yield from table(heads, shown)
        yield ""
    near = cores["near"]
    yield from paragraph(
        "One batch from near (Figures 3, 6, 7): on one core each, actions fill",
        f"{near['active_share']:.0%} of a life. A",
        f"trajectory's tools take {near['elastic']['tools_s']:.1f} s and its reward",
        f"{near['elastic']['rewards_s']:.1f} s,",
        f"with pods {near['pods']['tools_s']:.1f} and {near['pods']['rewards_s']:.1f} s: "
        f"{near['pods']['tools_s'] / near['elastic']['tools_s']:.1f} and "
        f"{near['pods']['rewards_s'] / near['elastic']['rewards_s']:.1f} times (paper: 9.0 and 2.8).",
        "With half the cores",
        f"{near['half']['elastic']['act_s']:.1f} s against {near['act_s']['elastic']:.1f} s, pods",
        f"{near['half']['pods']['act_s']:.1f} s against {near['act_s']['pods']:.1f} s.",
    )


def _gpus(found: Found) -> Iterator[str]:
    gpus, count = found["gpus"], found["setting"]["gpus"]
    yield "## Rewards on GPUs (Figures 3b and 8b)"
    yield ""
    yield from paragraph(
        f"Seconds of one reward on {count} GPUs. `own groups`: every model has four GPUs. `loading`:",
        "groups that load what is",
        "asked for, from storage or from the host's memory (as ServerlessLLM). `as printed`: the",
        "scheduler is not told what",
        "restoring costs. Two paces, since the paper's figures contradict each other: see below.",
    )
    heads = [
        "batch",
        "pace",
        "ours, s",
        "own groups, s",
        "ratio to own groups",
        "to loading, storage",
        "memory",
        "as printed",
    ]
    yield from table(
        heads,
        (
            [
                f"{row['batch']:,}",
                row["pace"],
                f"**{row['elastic_s']:.2f}**",
                f"{row['static_s']:.2f}",
                f"**{_ratio(row, 'ratio_static')}**",
                f"{row['ratio_loading_storage']:.1f}",
                f"{row['ratio_loading_memory']:.2f}",
                f"{row['ratio_as_printed']:.2f}",
            ]
            for row in gpus["batches"]
        ),
    )
    yield ""
    sparse, dense = gpus["fractions"][SPARSE_PACE], gpus["fractions"][DENSE_PACE]
    yield from table(
        [f"GPUs, batch {found['setting']['scored_batch']:,}", *(str(row["gpus"]) for row in sparse["gpus"])],
        (
            [
                f"{name}: ours, s (own groups {part['static_s']:.2f})",
                *(f"{row['elastic_s']:.2f}" for row in part["gpus"]),
            ]
            for name, part in ((SPARSE_PACE, sparse), (DENSE_PACE, dense))
        ),
    )
    yield ""
    judge, skewed = gpus["judge"], gpus["skewed"]
    yield from paragraph(
        f"Own groups are busy for {sparse['static_busy']:.1%} of the time at the one pace and",
        f"{dense['static_busy']:.1%} at",
        f"the other; twelve teachers with {gpus['busy']['mean']:.1%} on average (Figure 3b: below 3%).",
        "One judge alone on all",
        f"GPUs: {judge['elastic_s']:.2f} s, five replicas of eight GPUs {judge['static_s']:.2f} s. Where",
        "domains' shares fall",
        f"as 1 / rank own groups take {skewed['ratio']:.1f} times as long as the pool. Here nobody",
        "serves two requests at",
        "once on the same GPUs; a judge that writes would gain by that, so its replicas are shown at",
        "less than their best.",
    )


def _table1(found: Found) -> Iterator[str]:
    yield "## Where an action's time goes (Table 1)"
    yield ""
    rows = [("coding", row) for row in found["cores"]["table1"]]
    rows += [("rewards", row) for row in found["gpus"]["batches"] if row["pace"] == DENSE_PACE]
    shown = []
    for kind, row in rows:
        paper = PAPER_TABLE_1.get((kind, row["batch"]))
        told = "" if paper is None else " / ".join(f"{value:g}" for value in paper)
        ours = [f"{row[key]:.3f}" for key in ("execution_s", "queue_s", "overhead_s")]
        shown.append([kind, f"{row['batch']:,}", *ours, told])
    yield from table(["", "batch", "execution, s", "queue, s", "overhead, s", "paper's three"], shown)
    yield ""
    cores, gpus = found["cores"], found["gpus"]
    yield from paragraph(
        "Overhead of coding is put in: the paper's own 0.024 s of an action; the gateway's is measured",
        "below. Overhead of",
        "rewards is restoring. Decisions come on top, in real time on this machine: those that actions waited for are",
        f"{cores['overhead_pct']:.3f}% of the execution of coding and {gpus['overhead_pct']:.3f}% of that of rewards"
        f" ({cores['decision_mean_ms']:.2f} and {gpus['decision_mean_ms']:.2f} ms each on average;",
        f"the 99th percentile {cores['decision_p99_ms']:.2f} and {gpus['decision_p99_ms']:.2f} ms).",
    )


def _calls(calls: Found) -> Iterator[str]:
    yield "## API calls (Figure 6, DeepSearch)"
    yield ""
    limits = calls["limits"]
    yield from paragraph(
        f"{calls['batch']:,} search agents before a provider that serves {limits['concurrency']}",
        "requests at a time and",
        f"{limits['quota']:,} in {limits['period_s']:.0f} s, and refuses the rest.",
    )
    keys = {
        "call_s": "a call, s",
        "answered_call_s": "for each answer, s",
        "whole_trajectory_s": "for each trajectory without a lost call, s",
        "failed_calls": "calls lost",
        "failed_trajectories": "trajectories that lost one",
        "refused": "refusals",
        "makespan_s": "last trajectory, s",
    }
    rows = []
    for name in ("managed", "unmanaged"):
        row = calls[name]
        cells = [f"{row[key]:.1%}" if key.startswith("failed") else f"{row[key]:,.2f}" for key in keys]
        rows.append([name, *cells])
    yield from table(["", *keys.values()], rows)
    yield ""


def _live(found: Found) -> Iterator[str]:
    yield "## The gateway itself"
    yield ""
    decisions, live = found["decisions"], found["live"]
    yield from paragraph(
        f"One decision over {decisions['waiting']:,} waiting actions and {decisions['cores']:,} cores,",
        f"{decisions['count']:,}",
        "times in 42 states (seven kinds of action, one pool or ten nodes, none to 90% of the cores in use):",
        f"{decisions['p50_ms']:.2f} ms at the median, {decisions['p99_ms']:.2f} ms at the 99th percentile of all,",
        f"{decisions['worst_row_p99_ms']:.2f} ms at that of the worst state; in time of the processor, which others on",
        f"the machine lengthen less, {decisions['processor_p50_ms']:.2f}, {decisions['processor_p99_ms']:.2f} and",
        f"{decisions['worst_row_processor_p99_ms']:.2f} ms. The machine had a load of",
        f"{decisions['load_1m']:g} on its 2 cores, this bench counted, and {live.get('load_1m', 0):g} later on.",
    )
    if live["missing"] is not None:
        yield from paragraph(f"Nothing was measured live: {live['missing']}.")
        return
    invoke, fresh, sessions, replay = live["invoke"], live["fresh"], live["sessions"], live["replay"]
    yield from paragraph(
        f"`Invoke` of `1 + 1`, {invoke['calls']:.0f} calls of one trajectory, one after the other on a warm service:",
        f"{invoke['p50_ms']:.2f} ms at the median, {invoke['p99_ms']:.2f} ms at the 99th percentile, of which the",
        f"sandbox is {invoke['overhead_p50_ms']:.2f} ms. They run in one cell, from which all that a call leaves is",
        "removed after it (ADR 0019). As many calls of no trajectory, each in a fresh cell, which is made and ended",
        f"beside other calls: {fresh['p50_ms']:.2f} and {fresh['p99_ms']:.2f} ms.",
        f"{sessions['asked']:.0f} sessions of frozen_lake open at once, {sessions['steps']:.0f} steps each:",
        f"{sessions['ok']:.0f} ended well, in {sessions['took_s']:.1f} s.",
    )
    yield from paragraph(
        f"A bursty trace of {replay['trajectories']} trajectories, {replay['actions']} commands that sleep, on",
        f"{replay['cores']} cores: mean completion {replay['live_act_s']:.3f} s live and",
        f"{replay['simulated_act_s']:.3f} s",
        f"in the replay ({replay['act_error_pct']:+.1f}%; of which {replay['queue_s']:.3f} s in the queue), the last",
        f"trajectory after {replay['live_makespan_s']:.2f} and {replay['simulated_makespan_s']:.2f} s"
        f" ({replay['makespan_error_pct']:+.1f}%); an action is off by",
        f"{replay['action_error_p50_pct']:.1f}% at the median. The replay was told the median overhead,",
        f"{replay['overhead_ms']:.1f} ms.",
    )
