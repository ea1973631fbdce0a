"""What the page of `shaping` says of its figures beside them; and the picture: the ablation by
mode, ratios and GPUs, the patches, and RollArt's sweeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from treadle_cli.report.style import FAINT, INK

from treadle_bench.pictures import SERIES, draw_groups, legend_above, sheet, style
from treadle_bench.shaping import agentic, patches, training
from treadle_bench.shaping.training import MODES, OFF

Row = Mapping[str, Any]

DARTS_TARGET, TAIL_TARGET, STATIC_TARGET, PAGED_TARGET = 1.63, 1.4, 0.13, 0.43
SHORT = {
    "verl, samples streamed": "verl, samples\nstreamed",
    "+ token-level streaming": "+ token\nstreaming",
    "+ distribution-aware sampling": "+ dual-end\nsampling",
    "DARTS, tuned budget": "DARTS,\ntuned",
    "tail batching": "tail\nbatching",
    "tail batching, streamed": "tail b.,\nstreamed",
    "partial rollout": "partial\nrollout",
    "first 8 of 12, streamed": "first 8\nof 12",
}


def page_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """For the template."""
    rows = found["cells"]
    tables = {
        name: by_name([row for row in rows if row["table"] == name])
        for name in ("ablation", "ratios", "scaling")
    }
    return {
        "setting": {
            "large": training.LARGE,
            "small": training.SMALL,
            "accelerator": training.ACCELERATOR,
            "gpus": training.GPUS,
            "groups": training.GROUPS,
            "keep": training.KEEP,
            "dataset": training.DATASET,
            "steps": training.STEPS,
            "rollout_share": training.ROLLOUT_SHARE,
            "uniform": training.UNIFORM,
            "trade_off": training.TRADE_OFF_PER_S,
            "tuned": training.TUNED_PER_S,
            "agentic": f"{agentic.LLM} on {agentic.ENGINES} {agentic.ACCELERATOR}",
            "patches": f"{patches.LLM} on {patches.ENGINES} {patches.ACCELERATOR}",
            "started": patches.STARTED,
            "bound_paper": agentic.BOUND_PAPER,
        },
        "modes": MODES,
        "tables": tables,
        "by_rollout": bound_by_rollout(tables["ablation"]),
        "bounds_of_fit": max(speedup for _, speedup in found["fit"]["gradient"]),
        "learned": describe_learning(tables["ablation"]),
        "targets": judge_targets(found),
        "ahead": find_ahead(tables["ablation"]),
        "losses": [say_loss(row) for row in rows if row["speedup"] < 1.0],
        "alarms": {
            row["name"]: row["alarms"]
            for row in rows
            if row["table"] == "ablation" and row["mode"] == OFF
        },
        "order": order_bias(rows),
    }


def by_name(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """The rows of a table by name, then by mode."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["name"], {})[row["mode"]] = row
    return found


def bound_by_rollout(rows: Mapping[str, Mapping[str, Row]]) -> dict[str, tuple[float, float]]:
    """The highest possible speedup of DARTS over verl and over tail batching, by mode. A step takes
    at least as long as its rollout, even where all training is hidden behind it."""
    return {
        mode: (
            rows["verl"][mode]["seconds"] / rows["DARTS"][mode]["rollout_s"],
            rows["tail batching"][mode]["seconds"] / rows["DARTS"][mode]["rollout_s"],
        )
        for mode in MODES
    }


def describe_learning(
    rows: Mapping[str, Mapping[str, Row]],
) -> dict[str, dict[str, tuple[float, float]]]:
    """By mode and scheme: mean tokens at the end over those at the start, and the mean success rate
    of all steps."""
    names = ("verl", "DARTS", "DARTS, tuned budget", "first 8 of 12, streamed")
    return {
        mode: {name: (_shrink(rows[name][mode]), rows[name][mode]["success"]) for name in names}
        for mode in MODES
        if mode != OFF
    }


def _shrink(row: Row) -> float:
    start, end = row["mean_tokens"]
    return float(end / start)


def judge_targets(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Each target, what was found, and whether it is reached."""
    lines = []
    for title, key, target in (
        ("DARTS over verl", "vs_verl", DARTS_TARGET),
        ("DARTS over tail batching", "vs_tail_batching", TAIL_TARGET),
    ):
        for kind, who in (("darts", "5% pruned"), ("tuned", "tuned budget")):
            values = {mode: found["headline"][mode][f"{kind}_{key}"] for mode in MODES}
            says = ", ".join(f"{mode} {value:.2f}" for mode, value in values.items())
            reached = [mode for mode, value in values.items() if value >= target]
            verdict = f"reached: {', '.join(reached)}" if reached else "not reached"
            lines.append((f"{title}, {who}: at least {target}", says, verdict))
    for title, key, most in (
        ("all patches over static batches", "patches_vs_static", STATIC_TARGET),
        ("all patches over paged KV with continuous batching", "patches_vs_paged", PAGED_TARGET),
    ):
        verdict = "reached" if found[key] <= most else "not reached"
        lines.append((f"{title}: at most {most}", f"{found[key]:.3f}", verdict))
    return lines


def find_ahead(rows: Mapping[str, Mapping[str, Row]]) -> dict[str, dict[str, list[str]]]:
    """By DARTS' budget and mode: the other schemes whose steps are shorter, the shortest first."""
    found: dict[str, dict[str, list[str]]] = {}
    for ours in ("DARTS", "DARTS, tuned budget"):
        for mode in MODES:
            speedups = {
                name: of[mode]["speedup"]
                for name, of in rows.items()
                if not name.startswith("DARTS")
            }
            faster = [name for name in speedups if speedups[name] > rows[ours][mode]["speedup"]]
            named = [
                f"{name} ({speedups[name]:.2f})"
                for name in sorted(faster, key=lambda name: -speedups[name])
            ]
            found.setdefault(ours, {})[mode] = named
    return found


def say_loss(row: Row) -> str:
    """As in "ablation, partial rollout, off: 0.97"."""
    return f"{row['table']}, {row['name']}, {row['mode']}: {row['speedup']:.2f}"


def order_bias(rows: Sequence[Row]) -> dict[str, float]:
    """Of each scheme, without learning: how many times as much as verl's the mean length of prompts
    varies from step to step. Above 1 long prompts are trained together."""
    of = {
        row["name"]: row["order_spread"]
        for row in rows
        if row["table"] == "ablation" and row["mode"] == OFF
    }
    return {name: spread / of["verl"] for name, spread in of.items()}


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write the picture."""
    tables = page_values(found)["tables"]
    note = (
        "Every scheme changes which samples are trained, or how stale they are. Lines: as "
        "published."
    )
    with sheet("Shaping which samples are trained", note, file, height_in=8.6, top=0.84) as figure:
        grid = figure.add_gridspec(
            3, 3, left=0.05, right=0.985, top=0.86, bottom=0.06, hspace=0.5, wspace=0.2
        )
        first = figure.add_subplot(grid[0, :])
        _table(first, "DARTS' Table 3: steps of verl over steps of each", tables["ablation"])
        legend_above(figure, first, 0.085)
        _table(figure.add_subplot(grid[1, 0]), "Table 4: longest to shortest", tables["ratios"])
        _table(figure.add_subplot(grid[1, 1]), "Table 5: GPUs", tables["scaling"])
        axes = figure.add_subplot(grid[1, 2])
        rows = found["patches"]
        names = ["static", "+ paged", "+ cap", "+ dyn. K", "dyn. K\nalone"]
        draw_groups(
            axes,
            "the lesson's patches: over static",
            names,
            {"": [row["relative"] for row in rows]},
        )
        _published(axes, [row["paper"] for row in rows])
        _latency(figure.add_subplot(grid[2, 0]), found["latency"])
        _redundancy(figure.add_subplot(grid[2, 1]), found["redundancy"])
        axes = figure.add_subplot(grid[2, 2])
        axes.plot(
            *zip(*((row["bound"], row["speedup"]) for row in found["bounds"]), strict=True),
            "o-",
            color=SERIES[0],
        )
        axes.axhline(agentic.BOUND_PAPER, color=INK, linewidth=1.0, linestyle="--")
        style(axes, "RollArt 13: speedup by bound", ylim=(0.9, None))


def _table(axes: Axes, title: str, rows: Mapping[str, Mapping[str, Row]]) -> None:
    heights = {mode: [of[mode]["speedup"] for of in rows.values()] for mode in MODES}
    names = [SHORT.get(name, name) for name in rows]
    draw_groups(axes, title, names, heights, (FAINT, SERIES[0], SERIES[1]))
    _published(axes, [of[OFF]["paper"] for of in rows.values()])


def _published(axes: Axes, values: Sequence[float | None]) -> None:
    for at, value in enumerate(values):
        if value is not None:
            axes.plot([at - 0.45, at + 0.45], [value, value], color=INK, linewidth=1.2)


def _latency(axes: Axes, rows: Sequence[Row]) -> None:
    names = [f"{row['mean_s']:g}±{row['deviation_s']:g}" for row in rows]
    draw_groups(
        axes,
        "RollArt 12a: batch over trajectory level",
        names,
        {"": [row["ratio"] for row in rows]},
    )


def _redundancy(axes: Axes, rows: Sequence[Row]) -> None:
    sizes = sorted({row["size"] for row in rows})
    groups = sorted({row["groups"] for row in rows})
    heights = {
        f"{size} a group": [row["speedup"] for row in rows if row["size"] == size] for size in sizes
    }
    draw_groups(
        axes,
        "RollArt 12b: speedup by redundancy",
        [f"{each:g}× groups" for each in groups],
        heights,
    )
    axes.set_ylim(0.0, 1.45 * max(row["speedup"] for row in rows))  # room for the legend
    axes.legend(frameon=False, fontsize=8, loc="upper left")
