"""Show what shaping does to the distribution that is trained on, at a glance: of a rollout, or of a
history."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text
from treadle import Client, Distribution, ShapingReport, Timeouts

from treadle_cli import exits
from treadle_cli.exits import Terminal, UsageProblem, cell, printable
from treadle_cli.mesh.scheduler import own_certificates
from treadle_cli.options import DEFAULT_SCHEDULER, AsJson, Scheduler, print_json
from treadle_cli.report.style import COLOURS

CALL_S = 10.0
WIDTH = 48  # characters of a line from the least to the largest value
KINDS = (("sampled", COLOURS["queue"]), ("trained", COLOURS["decode"]))
HARDLY = 0.1  # a distance of Kolmogorov and Smirnov that a few hundred samples show by chance


def shaping(
    rollout: Annotated[str, typer.Argument(help="Id of a rollout of the mesh.")] = "",
    history: Annotated[
        str, typer.Option(help="Instead: a history, of which all rollouts that are over count.")
    ] = "",
    scheduler: Scheduler = DEFAULT_SCHEDULER,
    as_json: AsJson = False,
) -> None:
    """Say what shaping does to the distribution that is trained on, and which kinds of samples it
    starves."""

    async def run(_: asyncio.Event) -> int:
        report = await read_shaping(scheduler, rollout, history)
        if as_json:
            print_json(asdict(report))
        else:
            print_shaping(report, rollout or history, Terminal())
        return 0

    exits.run(run)


async def read_shaping(scheduler: str, rollout_id: str, history: str) -> ShapingReport:
    """Return the report of a rollout or of a history from the mesh. Raises UsageProblem,
    TreadleError."""
    if bool(rollout_id) == bool(history):
        raise UsageProblem("shaping takes either a ROLLOUT or --history NAME")
    own_certificates()  # raises where something is wrong with them
    async with Client(scheduler, timeouts=Timeouts(control_s=CALL_S)) as client:
        return await client.shaping_report(rollout_id, history)


def print_shaping(report: ShapingReport, name: str, console: Console) -> None:
    """Print alarms first, then each distribution as two lines on one axis, then why samples were
    not trained."""
    console.print(
        Text(
            f"{printable(name)}: {report.trained} of {report.sampled} sampled trajectories are "
            "trained",
            "bold",
        )
    )
    kept = cell(f"kept fraction {report.kept_fraction:.2f}: {report.kept_verdict}")
    console.print(kept.append("\n"))
    for alarm in report.alarms:
        console.print(Text(f"ALARM  {printable(alarm)}\n", "bold red"))
    if not report.alarms:
        console.print("No kind of samples is starved.\n")
    console.print("Lines go from the 10th to the 90th percentile; ● is the median.\n")
    rows = (
        ("tokens of a trajectory", report.length, ".0f"),
        ("reward", report.reward, ".2f"),
        ("success rate of its prompt", report.success_rate, ".2f"),
    )
    for title, values, shown in rows:
        for line in draw_pair(title, values, shown):
            console.print(line, highlight=False)
    drops = dict(sorted(report.drops.items(), key=lambda each: -each[1]))
    ages = {
        f"{age} version{'s' if age != 1 else ''} old": n
        for age, n in sorted(report.stale_tokens.items())
    }
    for title, counts in (
        ("samples that are not trained, by reason", drops),
        ("trained tokens, by age", ages),
    ):
        console.print(Text(title, "bold"))
        for line in draw_counts(counts):
            console.print(line, highlight=False)
    if report.length_cap_tokens or report.length_cap_report:
        cap = f"{report.length_cap_tokens} tokens" if report.length_cap_tokens else "none"
        console.print(cell(f"length cap of the next rollout: {cap}; {report.length_cap_report}"))


def draw_pair(title: str, values: Distribution, shown: str) -> Iterator[Text]:
    """Yield a title, then from the 10th to the 90th percentile a line with the median for what was
    sampled and trained."""
    if not values.sampled:
        return
    apart = "alike" if values.distance < HARDLY else f"{values.distance:.0%} apart"
    yield Text.assemble((title, "bold"), f", {apart}")
    both = [each for kind, _ in KINDS for each in getattr(values, kind)]
    low, high = min(*both, 0.0), max(both)
    for kind, colour in KINDS:
        percentiles: Sequence[float] = getattr(values, kind)
        if percentiles:
            first, middle, last = (
                round((each - low) / ((high - low) or 1.0) * (WIDTH - 1)) for each in percentiles
            )
            line = [" "] * WIDTH
            line[first : last + 1] = "━" * (last + 1 - first)
            line[middle] = "●"
            numbers = "  ".join(format(each, shown) for each in percentiles)
            yield Text.assemble(f"  {kind:8}", ("".join(line), colour), f"  {numbers}")
    yield Text("")


def draw_counts(counts: dict[str, int]) -> Iterator[Text]:
    """Yield a bar for each row."""
    for name, count in counts.items():
        bar = "━" * max(1, round(count / max(counts.values()) * WIDTH))
        yield Text.assemble(f"  {printable(name):16}", (bar, COLOURS["queue"]), f" {count}")
    yield Text("" if counts else "  none\n")
