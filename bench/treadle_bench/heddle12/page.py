"""Page and picture of `treadle bench heddle12`: what each cell shows, and where Treadle loses in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from treadle_cli.report.palette import COLOURS

from treadle_bench.heddle12.aims import aims
from treadle_bench.page import MACHINE, command, paragraph, point, ratio, seconds, table
from treadle_bench.pictures import FAINT, INK, figure_with, tidy

# Speedups over the systems that the paper gives, over its nine cells: least and greatest (Heddle §7.1).
PAPER = {"verl": (1.4, 2.3), "verl*": (1.1, 2.4), "slime": (1.2, 2.5)}
NOTHING_TO_WIN = 1.05  # of the bound: below, the best baseline leaves less than any predictor's error
ALIKE = 0.98  # ratios above are not called a loss

LOOKS: Mapping[str, dict[str, Any]] = {
    "verl": {"marker": "s", "color": "#9AA3AF"},
    "verl*": {"marker": "D", "color": "#9AA3AF"},
    "slime": {"marker": "v", "color": "#9AA3AF"},
    "affinity-las": {"marker": "<", "color": "#6B7280"},
    "pausing": {"marker": ">", "color": "#6B7280"},
    "heddle": {"marker": "o", "color": COLOURS["queue"]},
    "oracle": {"marker": "o", "color": COLOURS["prefill"], "fillstyle": "none"},
    "treadle-whole-turns": {"marker": "o", "color": COLOURS["decode"], "fillstyle": "none"},
    "treadle": {"marker": "o", "color": COLOURS["decode"], "markersize": 9},
}

OWN = ("heddle", "oracle", "treadle", "treadle-whole-turns")  # the upper line of a row; baselines stand below
BASELINES_LOWER = 0.2  # of a row
ROOM_FOR_WORDS = 1.35  # of a panel whose points end at 1


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown."""
    yield "# heddle12: every system, every cell"
    yield ""
    repeated = {**found, "seeds": found["small"]["seeds"]} if "small" in found else found
    shown = {key: value for key, value in repeated.items() if key != "scale" or "small" not in found}
    yield from paragraph(
        f"`{command('heddle12', shown)}`, on {MACHINE}. `heddle12.json` holds all figures. Heddle's Figure 12: agents",
        f"for coding, search and math on Qwen3-8B, 14B and 32B; {found['gpus']} {found['accelerator']} GPUs, 16",
        "samples a prompt, at most 40,000 tokens, engines of 100 slots a GPU. As many trajectories as the paper's",
        "baselines",
        "have slots: 100 for each engine of 1, 1 and 2 GPUs.",
    )
    yield from paragraph(
        f"Predictions: `{found['predictor']}`, whose error `workloads.md` tells. Every baseline runs at every degree",
        "and counts at its best; Heddle as printed, Treadle and the oracle (Treadle told every length) plan their",
        "engines from another epoch of the same prompts. Ratios are makespan over Treadle's makespan: above 1 Treadle",
        "is faster.",
    )
    yield "![makespan over the bound](heddle12.png)"
    yield ""
    yield f"## {found['gpus']} GPUs, {_seeds(found['seeds'])}"
    yield ""
    yield from _tables(found["cells"])
    if found["dense_cells"]:
        yield ""
        yield "### As many trajectories on the 32B as on the others"
        yield ""
        yield from _tables(found["dense_cells"])
    if "small" in found:
        small = found["small"]
        yield ""
        yield f"## {small['gpus']} GPUs and a quarter of the trajectories, {_seeds(small['seeds'])}"
        yield ""
        yield from paragraph(
            "Medians over seeds, in brackets the least and the greatest. Fewer draws make a shorter longest one, so",
            "less here is bound by the tail.",
        )
        yield from _tables([*small["cells"], *small["dense_cells"]])
    yield ""
    yield "## What we ask of it"
    yield ""
    yield from aims(found)
    yield ""
    yield "## Against the paper's own figures"
    yield ""
    yield from _against_paper(found)
    yield ""
    yield "## What this does not show"
    yield ""
    yield from point(
        "Engines are simulated (`docs/simulator.md`), with curves fitted to other people's measurements (`fit.md`);",
        "the paper's testbed, datasets and checkpoints are not at hand, and its figures stand in it as pictures.",
        "Ratios are compared, not seconds.",
    )
    yield from point(
        '"In whole turns": the best baseline over Treadle with `call_tokens` 0, so that a trajectory can neither move',
        "nor be ranked anew within a turn.",
    )
    yield from point(
        "The bound has neither queueing nor interference and takes work as divisible: no system reaches it where work",
        "binds.",
    )
    if "small" in found:
        yield from point(
            f"One seed at full size: the spread on {found['small']['gpus']} GPUs is the guide to how much a seed",
            "matters.",
        )


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _tables(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    heads = [
        "",
        "model",
        "trajectories",
        "bound, by",
        "Treadle, s",
        "best baseline, s",
        "ratio to it",
        "in whole turns",
    ]
    heads += ["to Heddle as printed", "to the oracle", "to the bound"]
    yield from table(heads, (_main(cell) for cell in cells))
    yield ""
    names = list(cells[0]["ratio_to"])
    heads = ["ratio to, each at its best degree", "model", *names]
    yield from table(heads, (_each(cell, names) for cell in cells))
    yield ""
    yield from table(
        ["", "model", "where Treadle loses"], ([c["workload"], c["model"], where_it_loses(c)] for c in cells)
    )


def _main(cell: Mapping[str, Any]) -> list[str]:
    spread = cell["spread"] or {}
    best = cell["best_baseline"]
    row = [cell["workload"], cell["model"], f"{cell['trajectories']:,}"]
    row += [f"{seconds(cell['bound_s'])} s, {cell['bound_by']}", f"**{seconds(cell['policy']['treadle'])}**"]
    row += [f"{seconds(cell['policy'][best])} ({best}, {cell['degree'][best]} GPUs an engine)"]
    row.append(f"**{ratio(cell['ratio_to_best_baseline'], spread.get('ratio_to_best_baseline'))}**")
    row.append(ratio(cell["whole_turns_to_best_baseline"], spread.get("whole_turns_to_best_baseline")))
    for to in ("heddle", "oracle", "bound"):
        row.append(ratio(cell[f"ratio_to_{to}"], spread.get(f"ratio_to_{to}")))
    return row


def _each(cell: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    shown = [f"{ratio(cell['ratio_to'][name])} ({cell['degree'][name]})" for name in names]
    return [cell["workload"], cell["model"], *shown]


def where_it_loses(cell: Mapping[str, Any]) -> str:
    """One line: who is faster and why, from the figures of the cell alone."""
    policy, treadle_s = cell["policy"], cell["policy"]["treadle"]
    faster = {name: treadle_s / policy[name] - 1.0 for name in cell["ratio_to"] if policy[name] < treadle_s}
    faster |= {"Heddle as printed": treadle_s / policy["heddle"] - 1.0} if policy["heddle"] < treadle_s else {}
    over_bound = treadle_s / cell["bound_s"] - 1.0
    told = policy["oracle"] / treadle_s
    rest = f"{over_bound:.0%} above the bound; told every length {seconds(policy['oracle'])} s"
    if not faster:
        return f"to nobody. {rest}"
    who = ", ".join(f"{name} by {by:.1%}" for name, by in sorted(faster.items(), key=lambda item: -item[1]))
    best_s = min(policy[name] for name in policy if name not in ("treadle", "treadle-whole-turns", "oracle"))
    if best_s < NOTHING_TO_WIN * cell["bound_s"]:
        why = "nothing to win: the best is within 5% of the bound"
    elif policy["oracle"] < ALIKE * best_s:
        why = "by the predictor's error: told every length it would win"
    elif told > ALIKE:
        why = "by the plan itself: told every length it is no faster"
    else:
        why = "by the plan and the predictor's error both"
    last = cell["last"]
    parts = {"waited": last["queue_s"], "decoded": last["decode_s"], "in tools": last["tool_s"]}
    story = ", ".join(f"{name} {seconds(value)} s" for name, value in parts.items())
    return f"to {who}; {why}. {rest}. Its last trajectory: {story}"


def _against_paper(found: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for name, (least, most) in PAPER.items():
        ours = [cell["ratio_at_paper_degree"].get(name) for cell in found["cells"]]
        given = [each for each in ours if each is not None]
        best = [cell["ratio_to"][name] for cell in found["cells"]]
        heddle = [
            cell["policy_at_paper_degree"][name] / cell["policy"]["heddle"]
            for cell in found["cells"]
            if name in cell["policy_at_paper_degree"]
        ]
        rows.append([name, f"{least}–{most}", _range(heddle), _range(given), _range(best)])
    yield from table(
        [
            "over",
            "the paper's Heddle",
            "Heddle as printed here, their degree",
            "Treadle here, their degree",
            "Treadle, their best degree",
        ],
        rows,
    )
    yield ""
    yield "The paper fixes its baselines at 1, 1 and 2 GPUs an engine. By cell, Treadle's ratio at that degree:"
    yield ""
    names = list(PAPER)
    yield from table(
        ["", "model", *names],
        (
            [cell["workload"], cell["model"], *(_given(cell["ratio_at_paper_degree"].get(name)) for name in names)]
            for cell in found["cells"]
        ),
    )


def _given(value: float | None) -> str:
    """Nothing where the degree does not divide the GPUs."""
    return "" if value is None else ratio(value)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}–{max(values):.2f}" if values else ""


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Makespans over the bound, a row a model, a panel a workload."""
    cells = found["cells"]
    names = list(dict.fromkeys(cell["workload"] for cell in cells))
    title = "How far above the bound each system ends"
    note = (
        f"Makespan over a bound that no schedule beats (1). {found['gpus']} {found['accelerator']} GPUs, "
        f"{_seeds(found['seeds'])}. Baselines at their best parallelism; pale: verl, verl* and slime at the paper's."
    )
    with figure_with(title, note, file, height_in=4.8, top=0.74) as figure:
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            _panel(axes, name, [cell for cell in cells if cell["workload"] == name])
        handles = [Line2D([], [], linestyle="", label=name, **look) for name, look in LOOKS.items()]
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.008, 0.88), ncols=len(LOOKS), frameon=False)


def _panel(axes: Axes, name: str, cells: Sequence[Mapping[str, Any]]) -> None:
    axes.axvline(1.0, color=INK, linewidth=1.0)
    right = 1.0
    for row, cell in enumerate(cells):
        bound_s = cell["bound_s"]
        at = {policy: value / bound_s for policy, value in cell["policy"].items()}
        right = max(right, *(value for policy, value in at.items() if policy not in OWN or policy == "treadle"))
        for policy in PAPER:
            if policy in cell["policy_at_paper_degree"]:
                value = cell["policy_at_paper_degree"][policy] / bound_s
                right = max(right, value)
                axes.plot(value, row + BASELINES_LOWER, **{**LOOKS[policy], "color": COLOURS["other"]})
        for policy, look in LOOKS.items():
            if policy in at:
                lower = 0.0 if policy in OWN else BASELINES_LOWER
                axes.plot(at[policy], row + lower, linestyle="", **look)
        best = cell["ratio_to_best_baseline"]
        text = f"{best:.2f}× the best baseline · bound by {cell['bound_by']}"
        axes.annotate(text, (1.0, row), xytext=(6, 12), textcoords="offset points", size=8, color=FAINT)
    outside = any(cell["policy"]["heddle"] > right * cell["bound_s"] for cell in cells)
    right = 1.0 + (ROOM_FOR_WORDS if outside else 1.06) * (right - 1.0)
    for row, cell in enumerate(cells):
        value = cell["policy"]["heddle"] / cell["bound_s"]
        if value > right:  # where one point would squeeze all others, a word stands for it
            axes.text(
                right, row, f"heddle {value:.1f} →", ha="right", va="center", size=8, color=LOOKS["heddle"]["color"]
            )
    axes.set_xlim(1.0 - 0.06 * (right - 1.0), right)
    axes.set_yticks(range(len(cells)), [cell["model"] for cell in cells])
    axes.set_ylim(len(cells) - 0.5, -0.6)
    axes.set_title(name, loc="left", size=10, weight="bold")
    axes.set_xlabel("makespan / bound")
    tidy(axes)
