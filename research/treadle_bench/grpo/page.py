"""What the page of `grpo` says of its cells, and the picture: rewards over steps, seconds of a step
by part, rollout seconds with and without shaping."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from treadle_cli.report.style import COLOURS, FAINT

from treadle_bench.pictures import SERIES, sheet, style

Cell = Mapping[str, Any]

MACHINE = "2 cores of an AMD EPYC (AVX2), no accelerator"
PART_COLOURS = {
    "rollout_s": COLOURS["decode"],
    "reward_s": COLOURS["tool"],
    "train_s": COLOURS["queue"],
    "sync_s": COLOURS["migration"],
}
PART_NAMES = {"rollout_s": "rollout", "reward_s": "reward", "train_s": "train", "sync_s": "sync"}
TITLES = {"none": "no shaping", "cap": "length cap", "first-k": "first K"}
SHADES = {"none": COLOURS["queue"], "cap": COLOURS["decode"], "first-k": COLOURS["tool"]}


def page_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """For the template."""
    cells = found["cells"]
    return {
        "machine": MACHINE,
        "titles": TITLES,
        "rising": [cell for cell in cells if cell["gain_interval"][0] > 0.0],
        "flat": [name_cell(cell) for cell in cells if cell["gain_interval"][0] <= 0.0],
        "slower": [name_cell(cell) for cell in cells if cell.get("rollout_ratio", 2.0) <= 1.0],
        "name_cell": name_cell,
        "signed": signed,
        "shaped_tokens": ", ".join(
            f"{name_cell(cell)} {cell['trained_tokens']:.0f}" for cell in cells
        )
        + " tokens",
        "within_bound": all(run["max_staleness"] <= run["bound"] for run in found["runs"]),
    }


def name_cell(cell: Cell) -> str:
    """As in "bound 1, length cap"."""
    return f"bound {cell['bound']}, {TITLES[cell['shaping']]}"


def signed(interval: Sequence[float], digits: int = 3) -> str:
    """As in -0.012 to +0.034."""
    return " to ".join(f"{value:+.{digits}f}" for value in interval)


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write the picture."""
    seeds = len(found["seeds"])
    note = (
        f"A small Llama with LoRA on sums, two SGLang engines on two cores. Means of {seeds} "
        "seeds; bands: range."
    )
    with sheet("GRPO through the mesh, on CPUs", note, file, height_in=8.2, top=0.88) as figure:
        figure.subplots_adjust(hspace=0.42, wspace=0.22)
        (left, right), (below_left, below_right) = figure.subplots(2, 2)
        _rewards(left, found, "none")
        _rewards(right, found, "cap", "first-k")
        _parts(below_left, found["cells"])
        _rollouts(below_right, [run for run in found["runs"] if run["bound"] == 0])


def _curves(runs: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """[runs, steps]"""
    return np.array([run[key] for run in runs])


def _rewards(axes: Axes, found: Mapping[str, Any], *shapings: str) -> None:
    cells = [cell for shaping in shapings for cell in found["cells"] if cell["shaping"] == shaping]
    for colour, cell in zip(SERIES, cells, strict=False):
        own = [
            run
            for run in found["runs"]
            if (run["bound"], run["shaping"]) == (cell["bound"], cell["shaping"])
        ]
        rewards = _curves(own, "rewards")
        steps = np.arange(rewards.shape[1])
        axes.plot(steps, rewards.mean(0), color=colour, linewidth=2, label=name_cell(cell))
        axes.fill_between(
            steps, rewards.min(0), rewards.max(0), color=colour, alpha=0.12, linewidth=0
        )
    legend = {"loc": "lower right"} if axes.lines else None
    title = "without shaping" if shapings == ("none",) else "shaped"
    style(
        axes, f"Reward of trained trajectories, {title}", legend=legend, ylim=(0, 1), xlabel="step"
    )


def _parts(axes: Axes, cells: Sequence[Cell]) -> None:
    """Bars of parts beside the length of a step: where the bound is above 0 parts of several steps
    overlap."""
    names = [f"{TITLES[cell['shaping']]}\nbound {cell['bound']}" for cell in cells]
    bottoms = np.zeros(len(cells))
    for part, colour in PART_COLOURS.items():
        heights = np.array([cell[part] for cell in cells])
        axes.bar(range(len(cells)), heights, 0.6, bottoms, color=colour, label=PART_NAMES[part])
        bottoms += heights
    axes.plot(
        range(len(cells)), [cell["step_s"] for cell in cells], "o", color="black", label="a step"
    )
    style(axes, "Seconds by part, and of a whole step", legend={"ncols": 3, "loc": "upper right"})
    axes.set_xticks(range(len(cells)), names, size=7)
    axes.set_ylim(0, 1.3 * max(bottoms))
    axes.grid(visible=False, axis="x")


def _rollouts(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    for shaping, colour in SHADES.items():
        seconds = sorted(
            value for run in runs if run["shaping"] == shaping for value in run["rollouts_s"][1:]
        )
        if seconds:
            share = np.arange(1, len(seconds) + 1) / len(seconds)
            axes.step(
                seconds,
                share,
                color=colour,
                linewidth=2,
                label=f"{TITLES[shaping]}, mean {fmean(seconds):.1f} s",
            )
    style(
        axes,
        "Rollouts of bound 0 that have ended by then",
        legend={"loc": "lower right"},
        xlabel="seconds",
        ylim=(0, 1),
    )
    axes.yaxis.label.set_color(FAINT)
