"""The picture of `treadle bench fidelity`: when each trajectory ended, live and simulated, and how both rollouts ran.

Above: the end of each trajectory, simulated over live, and the number of trajectories that still run over time. Below:
one play of Treadle as a Gantt chart, live and simulated, trajectories in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from treadle_cli.report.palette import COLOURS, FAINT, GRID, INK

from treadle_bench.fidelity.live import Play
from treadle_bench.fidelity.stage import Case

WIDTH_IN, HEIGHT_IN, DPI = 11.0, 8.4, 150
PARTS = ("queue", "prefill", "decode", "tool")
POLICY_COLOURS = (COLOURS["queue"], COLOURS["decode"])
TITLES = {"verl": "pinned, in order of arrival", "treadle": "Treadle"}
WITHIN = 0.10  # the band around equality


def draw(cases: Sequence[Case], folder: Path) -> None:
    """Writes fidelity.png into `folder`."""
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": INK}):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), dpi=DPI, facecolor="white")
        grid = figure.add_gridspec(2, 2, left=0.06, right=0.985, top=0.86, bottom=0.06, hspace=0.30, wspace=0.14)
        colours = dict(zip(dict.fromkeys(case.policy for case in cases), POLICY_COLOURS, strict=False))
        _ends(figure.add_subplot(grid[0, 0]), cases, colours)
        _running(figure.add_subplot(grid[0, 1]), cases, colours)
        shown = cases[len(colours) - 1]
        live = shown.plays[0]
        order = np.argsort([played.finished_s for played in live.trajectories])
        until_s = 1.03 * max(live.makespan_s, shown.simulated.makespan_s)
        for column, (title, play) in enumerate((("live", live), ("simulated", shown.simulated))):
            axes = figure.add_subplot(grid[1, column])
            _gantt(axes, play, [int(at) for at in order], until_s)
            axes.set_title(f"{TITLES.get(shown.policy, shown.policy)}, {title}", size=10, loc="left")
        figure.text(0.015, 0.955, "The same rollout on live engines and in the simulator", size=15, weight="bold")
        note = "Two SGLang engines, one core each. Simulated on the profile that was measured on them before."
        figure.text(0.015, 0.925, note, color=FAINT)
        figure.savefig(folder / "fidelity.png")


def _ends(axes: Axes, cases: Sequence[Case], colours: dict[str, str]) -> None:
    most_s = 1.05 * max(play.makespan_s for case in cases for play in (*case.plays, case.simulated))
    line = np.array([0.0, most_s])
    axes.fill_between(line, line * (1 - WITHIN), line * (1 + WITHIN), color=GRID, linewidth=0)
    axes.plot(line, line, color=FAINT, linewidth=0.8)
    for case in cases:
        simulated_s = [played.finished_s for played in case.simulated.trajectories]
        for play in case.plays:
            live_s = [played.finished_s for played in play.trajectories]
            axes.scatter(live_s, simulated_s, s=12, color=colours[case.policy], alpha=0.5, linewidths=0)
    axes.set(xlim=(0, most_s), ylim=(0, most_s), xlabel="end of a trajectory, live (s)", ylabel="simulated (s)")
    axes.legend(
        handles=[
            *(
                Line2D([], [], marker="o", linestyle="", color=colour, label=TITLES.get(policy, policy))
                for policy, colour in colours.items()
            ),
            Patch(color=GRID, label=f"within {WITHIN:.0%}"),
        ],
        frameon=False,
        loc="upper left",
    )
    _plain(axes)


def _running(axes: Axes, cases: Sequence[Case], colours: dict[str, str]) -> None:
    for case in cases:
        for play, style in (*((live, "-") for live in case.plays), (case.simulated, "--")):
            ends = np.sort([played.finished_s for played in play.trajectories])
            left = np.arange(len(ends), -1, -1)
            axes.step(
                [0.0, *ends], left, where="post", color=colours[case.policy], linestyle=style, linewidth=1.0, alpha=0.7
            )
    axes.set(xlabel="seconds", ylabel="trajectories that still run")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(
        handles=[
            Line2D([], [], color=INK, linestyle="-", label="live"),
            Line2D([], [], color=INK, linestyle="--", label="simulated"),
        ],
        frameon=False,
        loc="upper right",
    )
    _plain(axes)


def _gantt(axes: Axes, play: Play, order: Sequence[int], until_s: float) -> None:
    for part in PARTS:
        rows, starts, lengths = [], [], []
        for row, at in enumerate(order):
            for span in play.trajectories[at].spans:
                if span.kind == part:
                    rows.append(row)
                    starts.append(span.start_s)
                    lengths.append(span.end_s - span.start_s)
        axes.barh(rows, lengths, left=starts, height=0.86, color=COLOURS[part], linewidth=0, label=part)
    axes.set(xlim=(0, until_s), xlabel="seconds", yticks=[], ylim=(-0.7, len(order) - 0.3))
    axes.legend(frameon=False, loc="lower right", ncols=2)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=FAINT, length=0)
