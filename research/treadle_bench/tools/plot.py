"""The picture of `treadle bench tools`: Figures 3, 6, 7, 8 and 9 of ARL-Tangram, and the time of
decisions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from treadle_cli.report.style import COLOURS, FAINT, INK

from treadle_bench.bench import Figures
from treadle_bench.pictures import sheet, style
from treadle_bench.tools.gpus import DENSE_PACE, SPARSE_PACE


def _look(
    label: str, colour: str, marker: str = "", *, linewidth: float = 1.4, **more: Any
) -> dict[str, Any]:
    return {"label": label, "color": colour, "marker": marker, "linewidth": linewidth, **more}


# The lines of a panel: those of which its rows have the column.
LOOKS: Mapping[str, dict[str, Any]] = {
    "elastic_s": _look("ours", COLOURS["decode"], "o", linewidth=2.2),
    "least_s": _look("lowest possible", FAINT, linestyle=":"),
    "as_printed_s": _look("as printed", COLOURS["prefill"], "o"),
    "pods_s": _look("pods", COLOURS["queue"], "s"),
    "degree_4_s": _look("degree 4", COLOURS["tool"], "^"),
    "degree_16_s": _look("degree 16", COLOURS["migration"], "v"),
    "static_s": _look("own groups", COLOURS["queue"], "s"),
    "loading_memory_s": _look("loading, memory", COLOURS["tool"], "^"),
    "loading_storage_s": _look("loading, storage", COLOURS["migration"], "v"),
}
OURS = {**LOOKS["elastic_s"], "marker": ""}  # and others, over time
PODS, UNMANAGED = (
    {**OURS, "label": label, "color": COLOURS["queue"], "linewidth": 1.4}
    for label in ("pods", "unmanaged")
)
LEGEND_ROOM = 0.4  # of a panel's logarithmic height, above its lines


def draw(found: Figures, file: Path) -> None:
    """Nine panels: coding, rewards, and below them a trajectory's time, API calls and decisions."""
    note = (
        "Mean seconds of completion; simulated, but for the last panel. Lower is better; note "
        "the logarithmic axes."
    )
    with sheet("Actions of tools and rewards", note, file, height_in=9.6, top=0.90) as figure:
        figure.subplots_adjust(left=0.068, hspace=0.42, wspace=0.28, bottom=0.06)
        panels = figure.subplots(3, 3)
        cores, gpus, setting = found["cores"], found["gpus"], found["setting"]
        _lines(panels[0][0], "coding, by batch (8a, 9)", cores["batches"], "batch")
        _lines(
            panels[0][1], f"coding, by cores, batch {setting['batch']:,}", cores["cores"], "cores"
        )
        _windows(panels[0][2], cores["near"]["windows"])
        paces = ((DENSE_PACE, "Table 1 (8b)"), (SPARSE_PACE, "Figure 3b"))
        for axes, (pace, source) in zip(panels[1], paces, strict=False):
            rows = [row for row in gpus["batches"] if row["pace"] == pace]
            _lines(axes, f"rewards, by batch, pace of {source}", rows, "batch")
        _fractions(panels[1][2], gpus["fractions"], setting["gpus"], setting["scored_batch"])
        _times(panels[2][0], cores["near"])
        _calls(panels[2][1], found["calls"])
        _decisions(panels[2][2], found["decisions"])


def _finish(
    axes: Axes, title: str, *, log: bool = False, legend: Mapping[str, Any] | None = None
) -> None:
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    style(axes, title, size=9, legend={"fontsize": 7, **(legend or {})})


def _lines(axes: Axes, title: str, rows: Sequence[Figures], key: str) -> None:
    for column, look in LOOKS.items():
        if column in rows[0]:
            axes.plot(
                [row[key] for row in rows], [row[column] for row in rows], markersize=4, **look
            )
    _finish(axes, title, log=True, legend={"ncols": 2, "loc": "upper left"})
    axes.set_xticks(
        [row[key] for row in rows], [f"{row[key]:,}" for row in rows], size=7, rotation=30
    )
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** LEGEND_ROOM)


def _windows(axes: Axes, windows: Figures) -> None:
    for of, look in (("elastic", OURS), ("pods", PODS)):
        axes.plot(windows[of]["at_s"], windows[of]["act_s"], **look)
    _finish(axes, "coding, by arrival; grey: how many", log=True)
    arrived = axes.twinx()
    arrived.fill_between(
        windows["elastic"]["at_s"], windows["elastic"]["actions"], color=COLOURS["other"], alpha=0.5
    )
    arrived.set_axis_off()
    axes.set_zorder(arrived.get_zorder() + 1)
    axes.set_facecolor("none")


def _fractions(axes: Axes, fractions: Figures, gpus: int, batch: int) -> None:
    for (name, part), colour in zip(
        fractions.items(), (COLOURS["decode"], COLOURS["migration"]), strict=True
    ):
        tried, seconds = zip(
            *((row["gpus"], row["elastic_s"]) for row in part["gpus"]), strict=True
        )
        axes.plot(tried, seconds, color=colour, marker="o", markersize=4, label=f"ours, {name}")
        axes.axhline(
            part["static_s"],
            color=colour,
            linestyle="--",
            linewidth=1,
            label=f"own groups on {gpus}",
        )
    _finish(axes, f"rewards, by GPUs, batch {batch:,} (8b)", log=True)
    axes.axvline(0.29 * gpus, color=FAINT, linewidth=0.8)
    axes.text(0.29 * gpus, axes.get_ylim()[1], " 29%", size=7, color=FAINT, va="top")


def _times(axes: Axes, near: Figures) -> None:
    rows = {"ours": near["elastic"], "pods": near["pods"]}
    rows |= {"ours, half": near["half"]["elastic"], "pods, half": near["half"]["pods"]}
    left = [0.0] * len(rows)
    for part, colour in (("generation", "other"), ("tools", "tool"), ("rewards", "decode")):
        widths = [row[f"{part}_s"] for row in rows.values()]
        axes.barh(
            range(len(rows)), widths, left=left, color=COLOURS[colour], label=part, height=0.6
        )
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), list(rows), size=8)
    axes.invert_yaxis()
    _finish(axes, "a coding trajectory, s (3a, 7)")
    axes.grid(visible=False, axis="y")


def _calls(axes: Axes, calls: Figures) -> None:
    for of, look in (("managed", OURS), ("unmanaged", UNMANAGED)):
        axes.plot(calls["windows"][of]["at_s"], calls["windows"][of]["act_s"], **look)
    words = (
        f"{calls['unmanaged']['failed_trajectories']:.0%} of unmanaged trajectories\nlose a "
        "call, none of ours"
    )
    axes.text(0.98, 0.6, words, transform=axes.transAxes, ha="right", size=7, color=INK)
    axes.set_ylim(bottom=0)
    _finish(axes, "API calls by arrival, s (6)")


def _decisions(axes: Axes, decisions: Figures) -> None:
    shapes = list(dict.fromkeys(row["shape"] for row in decisions["rows"]))
    for nodes, marker, name in ((1, "o", "one pool"), (10, "s", "10 nodes")):
        rows = [row for row in decisions["rows"] if row["nodes"] == nodes]
        at = [shapes.index(row["shape"]) for row in rows]
        for key, words, colour, fill in (
            ("p50_ms", "median", "decode", "full"),
            ("p99_ms", "99th", "queue", "none"),
        ):
            look: dict[str, Any] = {"color": COLOURS[colour], "markersize": 4, "fillstyle": fill}
            axes.plot([row[key] for row in rows], at, marker, label=f"{name}, {words}", **look)
    axes.axvline(5.0, color=FAINT, linewidth=0.8)
    axes.set_yticks(range(len(shapes)), shapes, size=8)
    axes.set_xlim(left=0)
    _finish(axes, f"one decision, {decisions['waiting']:,} waiting, ms (real)")
