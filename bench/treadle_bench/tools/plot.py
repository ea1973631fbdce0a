"""The picture of `treadle bench tools`: Figures 6, 8 and 9 of ARL-Tangram in shape, and what decisions take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from treadle_bench.pictures import COLOURS, FAINT, INK, figure_with, tidy
from treadle_bench.tools.gpus import DENSE_PACE, SPARSE_PACE

Found = Mapping[str, Any]
LOOKS: Mapping[str, dict[str, Any]] = {
    "ours": {"color": COLOURS["decode"], "marker": "o", "linewidth": 2.2},
    "as printed": {"color": COLOURS["prefill"], "marker": "o", "linewidth": 1.4},
    "pods": {"color": COLOURS["queue"], "marker": "s", "linewidth": 1.4},
    "degree 4": {"color": COLOURS["tool"], "marker": "^", "linewidth": 1.4},
    "degree 16": {"color": COLOURS["migration"], "marker": "v", "linewidth": 1.4},
    "at best": {"color": FAINT, "linestyle": ":", "linewidth": 1.4},
    "own groups": {"color": COLOURS["queue"], "marker": "s", "linewidth": 1.4},
    "loading, memory": {"color": COLOURS["tool"], "marker": "^", "linewidth": 1.4},
    "loading, storage": {"color": COLOURS["migration"], "marker": "v", "linewidth": 1.4},
    "every call for itself": {"color": COLOURS["queue"], "linewidth": 1.4},
}
LEGEND_ROOM = 0.4  # of a panel's logarithmic height, above its lines
CORES = {
    "ours": "elastic_s",
    "at best": "least_s",
    "as printed": "as_printed_s",
    "pods": "pods_s",
    "degree 4": "degree_4_s",
    "degree 16": "degree_16_s",
}
GPUS = {
    "ours": "elastic_s",
    "as printed": "as_printed_s",
    "own groups": "static_s",
    "loading, memory": "loading_memory_s",
    "loading, storage": "loading_storage_s",
}


def draw(found: Found, file: Path) -> None:
    """Eight panels: coding above, rewards and calls below."""
    note = "Mean seconds of completion; simulated, but for the last panel. Lower is better; note the logarithmic axes."
    with figure_with("Actions of tools and rewards", note, file, height_in=9.6, top=0.90) as figure:
        figure.subplots_adjust(left=0.068, hspace=0.42, wspace=0.28, bottom=0.06)
        sheet = figure.subplots(3, 3)
        cores, gpus, setting = found["cores"], found["gpus"], found["setting"]
        _lines(sheet[0][0], "coding, by batch (8a, 9)", cores["batches"], "batch", CORES)
        _lines(sheet[0][1], f"coding, by cores, batch {setting['batch']:,}", cores["cores"], "cores", CORES)
        _windows(sheet[0][2], cores["near"]["windows"])
        dense = [row for row in gpus["batches"] if row["pace"] == DENSE_PACE]
        _lines(sheet[1][0], "rewards, by batch, pace of Table 1 (8b)", dense, "batch", GPUS)
        sparse = [row for row in gpus["batches"] if row["pace"] == SPARSE_PACE]
        _lines(sheet[1][1], "rewards, by batch, pace of Figure 3b", sparse, "batch", GPUS)
        _fractions(sheet[1][2], gpus["fractions"], setting["gpus"], setting["scored_batch"])
        _parts(sheet[2][0], cores["near"])
        _calls(sheet[2][1], found["calls"])
        _decisions(sheet[2][2], found["decisions"])


def _titled(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", size=9, weight="bold")
    tidy(axes)


def _log(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _lines(axes: Axes, title: str, rows: Sequence[Found], key: str, series: Mapping[str, str]) -> None:
    for name, column in series.items():
        axes.plot([row[key] for row in rows], [row[column] for row in rows], label=name, markersize=4, **LOOKS[name])
    _log(axes)
    axes.set_xticks([row[key] for row in rows], [f"{row[key]:,}" for row in rows], size=7, rotation=30)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** LEGEND_ROOM)
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper left")
    _titled(axes, title)


def _windows(axes: Axes, windows: Found) -> None:
    for name, of in (("ours", "elastic"), ("pods", "pods")):
        axes.plot(windows[of]["at_s"], windows[of]["act_s"], label=name, **{**LOOKS[name], "marker": ""})
    _log(axes)
    came = axes.twinx()
    came.fill_between(windows["elastic"]["at_s"], windows["elastic"]["actions"], color=COLOURS["other"], alpha=0.5)
    came.set_yticks([])
    for side in ("top", "right", "left", "bottom"):
        came.spines[side].set_visible(False)
    axes.set_zorder(came.get_zorder() + 1)
    axes.set_facecolor("none")
    axes.legend(frameon=False, fontsize=7)
    _titled(axes, "coding, by arrival; grey: how many")


def _fractions(axes: Axes, fractions: Found, gpus: int, batch: int) -> None:
    for (name, part), colour in zip(fractions.items(), (COLOURS["decode"], COLOURS["migration"]), strict=True):
        axes.plot(
            [row["gpus"] for row in part["gpus"]],
            [row["elastic_s"] for row in part["gpus"]],
            color=colour, marker="o", markersize=4, label=f"ours, {name}",
        )  # fmt: skip
        axes.axhline(part["static_s"], color=colour, linestyle="--", linewidth=1, label=f"own groups on {gpus}")
    _log(axes)
    axes.axvline(0.29 * gpus, color=FAINT, linewidth=0.8)
    axes.text(0.29 * gpus, axes.get_ylim()[1], " 29%", size=7, color=FAINT, va="top")
    axes.legend(frameon=False, fontsize=7)
    _titled(axes, f"rewards, by GPUs, batch {batch:,} (8b)")


def _parts(axes: Axes, near: Found) -> None:
    names = ["ours", "pods", "ours, half", "pods, half"]
    rows = [near["elastic"], near["pods"], near["half"]["elastic"], near["half"]["pods"]]
    left = [0.0] * len(rows)
    shades = (("generation_s", COLOURS["other"]), ("tools_s", COLOURS["tool"]), ("rewards_s", COLOURS["decode"]))
    for key, colour in shades:
        widths = [row[key] for row in rows]
        axes.barh(range(len(rows)), widths, left=left, color=colour, label=key.removesuffix("_s"), height=0.6)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), names, size=8)
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=7)
    _titled(axes, "a coding trajectory, s (3a, 7)")
    axes.grid(visible=False, axis="y")


def _calls(axes: Axes, calls: Found) -> None:
    for name, of in (("ours", "managed"), ("every call for itself", "unmanaged")):
        windows = calls["windows"][of]
        axes.plot(windows["at_s"], windows["act_s"], label=name, **{**LOOKS[name], "marker": ""})
    lost = calls["unmanaged"]["failed_trajectories"]
    axes.text(0.98, 0.6, f"{lost:.0%} of trajectories\nlose a call for itself, none of ours", transform=axes.transAxes,
              ha="right", size=7, color=INK)  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7)
    _titled(axes, "API calls by arrival, s (6)")


def _decisions(axes: Axes, decisions: Found) -> None:
    rows = decisions["rows"]
    for nodes, marker in ((1, "o"), (10, "s")):
        of = [row for row in rows if row["nodes"] == nodes]
        at = [list(dict.fromkeys(row["shape"] for row in rows)).index(row["shape"]) for row in of]
        name = "one pool" if nodes == 1 else f"{nodes} nodes"
        axes.plot(
            [row["p50_ms"] for row in of], at, marker, color=COLOURS["decode"], markersize=4, label=f"{name}, median"
        )
        axes.plot(
            [row["p99_ms"] for row in of], at, marker, color=COLOURS["queue"], markersize=4, fillstyle="none",
            label=f"{name}, 99th",
        )  # fmt: skip
    axes.axvline(5.0, color=FAINT, linewidth=0.8)
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    axes.set_yticks(range(len(shapes)), shapes, size=8)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=6)
    _titled(axes, f"one decision, {decisions['waiting']:,} waiting, ms (real)")
