"""The picture of `treadle bench tools`: Figures 3, 6, 7, 8 and 9 of ARL-Tangram, and the time of decisions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from treadle_cli.report.palette import COLOURS, FAINT, INK

from treadle_bench.bench import Figures
from treadle_bench.pictures import sheet, style
from treadle_bench.tools.gpus import DENSE_PACE, SPARSE_PACE

LOOKS: Mapping[str, dict[str, Any]] = {
    "ours": {"color": COLOURS["decode"], "marker": "o", "linewidth": 2.2},
    "as printed": {"color": COLOURS["prefill"], "marker": "o", "linewidth": 1.4},
    "pods": {"color": COLOURS["queue"], "marker": "s", "linewidth": 1.4},
    "degree 4": {"color": COLOURS["tool"], "marker": "^", "linewidth": 1.4},
    "degree 16": {"color": COLOURS["migration"], "marker": "v", "linewidth": 1.4},
    "lowest possible": {"color": FAINT, "linestyle": ":", "linewidth": 1.4},
    "own groups": {"color": COLOURS["queue"], "marker": "s", "linewidth": 1.4},
    "loading, memory": {"color": COLOURS["tool"], "marker": "^", "linewidth": 1.4},
    "loading, storage": {"color": COLOURS["migration"], "marker": "v", "linewidth": 1.4},
    "unmanaged": {"color": COLOURS["queue"], "linewidth": 1.4},
}
LEGEND_ROOM = 0.4  # of a panel's logarithmic height, above its lines
CORES = {
    "ours": "elastic_s",
    "lowest possible": "least_s",
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


def draw(found: Figures, file: Path) -> None:
    """Nine panels: coding, rewards, and below them a trajectory's time, API calls and decisions."""
    note = "Mean seconds of completion; simulated, but for the last panel. Lower is better; note the logarithmic axes."
    with sheet("Actions of tools and rewards", note, file, height_in=9.6, top=0.90) as figure:
        figure.subplots_adjust(left=0.068, hspace=0.42, wspace=0.28, bottom=0.06)
        panels = figure.subplots(3, 3)
        cores, gpus, setting = found["cores"], found["gpus"], found["setting"]
        _lines(panels[0][0], "coding, by batch (8a, 9)", cores["batches"], "batch", CORES)
        _lines(panels[0][1], f"coding, by cores, batch {setting['batch']:,}", cores["cores"], "cores", CORES)
        _windows(panels[0][2], cores["near"]["windows"])
        paces = ((DENSE_PACE, "Table 1 (8b)"), (SPARSE_PACE, "Figure 3b"))
        for axes, (pace, source) in zip(panels[1], paces, strict=False):
            rows = [row for row in gpus["batches"] if row["pace"] == pace]
            _lines(axes, f"rewards, by batch, pace of {source}", rows, "batch", GPUS)
        _fractions(panels[1][2], gpus["fractions"], setting["gpus"], setting["scored_batch"])
        _times(panels[2][0], cores["near"])
        _calls(panels[2][1], found["calls"])
        _decisions(panels[2][2], found["decisions"])


def _finish(axes: Axes, title: str, *, log: bool = False) -> None:
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if not axes.get_legend():
        axes.legend(frameon=False, fontsize=7)
    style(axes, title, size=9)


def _lines(axes: Axes, title: str, rows: Sequence[Figures], key: str, series: Mapping[str, str]) -> None:
    for name, column in series.items():
        axes.plot([row[key] for row in rows], [row[column] for row in rows], label=name, markersize=4, **LOOKS[name])
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="upper left")
    _finish(axes, title, log=True)
    axes.set_xticks([row[key] for row in rows], [f"{row[key]:,}" for row in rows], size=7, rotation=30)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** LEGEND_ROOM)


def _windows(axes: Axes, windows: Figures) -> None:
    for name, of in (("ours", "elastic"), ("pods", "pods")):
        axes.plot(windows[of]["at_s"], windows[of]["act_s"], label=name, **{**LOOKS[name], "marker": ""})
    _finish(axes, "coding, by arrival; grey: how many", log=True)
    arrived = axes.twinx()
    arrived.fill_between(windows["elastic"]["at_s"], windows["elastic"]["actions"], color=COLOURS["other"], alpha=0.5)
    arrived.set_axis_off()
    axes.set_zorder(arrived.get_zorder() + 1)
    axes.set_facecolor("none")


def _fractions(axes: Axes, fractions: Figures, gpus: int, batch: int) -> None:
    for (name, part), colour in zip(fractions.items(), (COLOURS["decode"], COLOURS["migration"]), strict=True):
        tried, seconds = zip(*((row["gpus"], row["elastic_s"]) for row in part["gpus"]), strict=True)
        axes.plot(tried, seconds, color=colour, marker="o", markersize=4, label=f"ours, {name}")
        axes.axhline(part["static_s"], color=colour, linestyle="--", linewidth=1, label=f"own groups on {gpus}")
    _finish(axes, f"rewards, by GPUs, batch {batch:,} (8b)", log=True)
    axes.axvline(0.29 * gpus, color=FAINT, linewidth=0.8)
    axes.text(0.29 * gpus, axes.get_ylim()[1], " 29%", size=7, color=FAINT, va="top")


def _times(axes: Axes, near: Figures) -> None:
    rows = {"ours": near["elastic"], "pods": near["pods"]}
    rows |= {"ours, half": near["half"]["elastic"], "pods, half": near["half"]["pods"]}
    left = [0.0] * len(rows)
    for part, colour in (("generation", "other"), ("tools", "tool"), ("rewards", "decode")):
        widths = [row[f"{part}_s"] for row in rows.values()]
        axes.barh(range(len(rows)), widths, left=left, color=COLOURS[colour], label=part, height=0.6)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), list(rows), size=8)
    axes.invert_yaxis()
    _finish(axes, "a coding trajectory, s (3a, 7)")
    axes.grid(visible=False, axis="y")


def _calls(axes: Axes, calls: Figures) -> None:
    for name, of in (("ours", "managed"), ("unmanaged", "unmanaged")):
        windows = calls["windows"][of]
        axes.plot(windows["at_s"], windows["act_s"], label=name, **{**LOOKS[name], "marker": ""})
    words = f"{calls['unmanaged']['failed_trajectories']:.0%} of unmanaged trajectories\nlose a call, none of ours"
    axes.text(0.98, 0.6, words, transform=axes.transAxes, ha="right", size=7, color=INK)
    axes.set_ylim(bottom=0)
    _finish(axes, "API calls by arrival, s (6)")


def _decisions(axes: Axes, decisions: Figures) -> None:
    shapes = list(dict.fromkeys(row["shape"] for row in decisions["rows"]))
    for nodes, marker in ((1, "o"), (10, "s")):
        rows = [row for row in decisions["rows"] if row["nodes"] == nodes]
        at = [shapes.index(row["shape"]) for row in rows]
        name = "one pool" if nodes == 1 else f"{nodes} nodes"
        looks = (("p50_ms", "median", COLOURS["decode"], "full"), ("p99_ms", "99th", COLOURS["queue"], "none"))
        for key, words, colour, fill in looks:
            look: dict[str, Any] = {"color": colour, "markersize": 4, "fillstyle": fill, "label": f"{name}, {words}"}
            axes.plot([row[key] for row in rows], at, marker, **look)
    axes.axvline(5.0, color=FAINT, linewidth=0.8)
    axes.set_yticks(range(len(shapes)), shapes, size=8)
    axes.set_xlim(left=0)
    _finish(axes, f"one decision, {decisions['waiting']:,} waiting, ms (real)")
