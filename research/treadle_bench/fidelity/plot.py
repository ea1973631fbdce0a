"""The picture of `treadle bench fidelity`: when each trajectory ended, live and simulated, and how
both rollouts ran.

Above: the end of each trajectory, simulated over live, and the number of running trajectories over
time. Below: one play of Treadle, live and simulated, a row for each trajectory in the same order.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from treadle_cli.report.style import COLOURS, FAINT, GRID, INK

from treadle_bench.fidelity.live import Play
from treadle_bench.fidelity.stage import Case
from treadle_bench.pictures import sheet, style

PARTS = ("queue", "prefill", "decode", "tool")
POLICY_COLOURS = (COLOURS["queue"], COLOURS["decode"])
TITLES = {"verl": "pinned, in order of arrival", "treadle": "Treadle"}
WITHIN = 0.10  # the band around equality


def draw(cases: Sequence[Case], file: Path) -> None:
    """Write the picture."""
    title = "The same rollout on live engines and in the simulator"
    note = (
        "Two SGLang engines, one core each. Simulated on the profile that was measured on them "
        "before."
    )
    with sheet(title, note, file, height_in=8.4, top=0.86) as figure:
        figure.subplots_adjust(left=0.06, bottom=0.06, hspace=0.30, wspace=0.14)
        above, below = figure.subplots(2, 2)
        colours = dict(
            zip(dict.fromkeys(case.policy for case in cases), POLICY_COLOURS, strict=False)
        )
        _draw_ends(above[0], cases, colours)
        _draw_running(above[1], cases, colours)
        shown = cases[len(colours) - 1]
        live = shown.plays[0]
        order = np.argsort(live.ends_s).tolist()
        until_s = 1.03 * max(live.makespan_s, shown.simulated.makespan_s)
        for axes, kind, play in zip(
            below, ("live", "simulated"), (live, shown.simulated), strict=True
        ):
            _draw_spans(axes, play, order, until_s)
            style(axes, f"{TITLES.get(shown.policy, shown.policy)}, {kind}")


def _draw_ends(axes: Axes, cases: Sequence[Case], colours: dict[str, str]) -> None:
    most_s = 1.05 * max(play.makespan_s for case in cases for play in (*case.plays, case.simulated))
    line = np.array([0.0, most_s])
    axes.fill_between(line, line * (1 - WITHIN), line * (1 + WITHIN), color=GRID, linewidth=0)
    axes.plot(line, line, color=FAINT, linewidth=0.8)
    for case in cases:
        look: dict[str, Any] = {
            "s": 12,
            "color": colours[case.policy],
            "alpha": 0.5,
            "linewidths": 0,
        }
        for play in case.plays:
            axes.scatter(play.ends_s, case.simulated.ends_s, **look)
    dots = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=TITLES.get(policy, policy))
        for policy, colour in colours.items()
    ]
    legend = {
        "handles": [*dots, Patch(color=GRID, label=f"within {WITHIN:.0%}")],
        "loc": "upper left",
    }
    limits, label = (0, most_s), "end of a trajectory, live (s)"
    style(axes, xlim=limits, ylim=limits, xlabel=label, ylabel="simulated (s)", legend=legend)


def _draw_running(axes: Axes, cases: Sequence[Case], colours: dict[str, str]) -> None:
    for case in cases:
        for play, line in (*((live, "-") for live in case.plays), (case.simulated, "--")):
            left = np.arange(len(play.ends_s), -1, -1)
            look: dict[str, Any] = {
                "color": colours[case.policy],
                "linestyle": line,
                "linewidth": 1.0,
                "alpha": 0.7,
            }
            axes.step([0.0, *np.sort(play.ends_s)], left, where="post", **look)
    lines = [
        Line2D([], [], color=INK, label="live"),
        Line2D([], [], color=INK, linestyle="--", label="simulated"),
    ]
    legend = {"handles": lines, "loc": "upper right"}
    style(
        axes,
        xlabel="seconds",
        ylabel="running trajectories",
        xlim=(0, None),
        ylim=(0, None),
        legend=legend,
    )


def _draw_spans(axes: Axes, play: Play, order: Sequence[int], until_s: float) -> None:
    for part in PARTS:
        bars = [
            (row, span.start_s, span.end_s - span.start_s)
            for row, at in enumerate(order)
            for span in play.trajectories[at].spans
            if span.kind == part
        ]
        rows, starts, lengths = zip(*bars, strict=True) if bars else ((), (), ())
        axes.barh(
            rows, lengths, left=starts, height=0.86, color=COLOURS[part], linewidth=0, label=part
        )
    axes.set(xlim=(0, until_s), xlabel="seconds", yticks=[], ylim=(-0.7, len(order) - 0.3))
    axes.legend(frameon=False, loc="lower right", ncols=2)
