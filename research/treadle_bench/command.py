"""The command `treadle bench`: all benches, and the command line that runs one and prints its
figures.

`treadle` finds `app` through the entry point "bench" of the group "treadle.commands".
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from treadle_cli import exits
from treadle_cli.app import PASS_FLAGS
from treadle_cli.exits import Terminal, UsageProblem
from treadle_cli.mesh.engines import DEFAULT_MODEL, DEFAULT_SLOTS, engine_plan
from treadle_cli.options import Model, Seed, Slots

from treadle_bench.ablations.measure import HEDDLE14, HEDDLE15, HEDDLE16
from treadle_bench.affinity.measure import BENCH as AFFINITY
from treadle_bench.async_live.measure import BENCH as ASYNC_LIVE
from treadle_bench.asynchronous.measure import BENCH as ASYNC
from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.console.measure import BENCH as CONSOLE
from treadle_bench.control_plane.measure import BENCH as CONTROL_PLANE
from treadle_bench.controller.measure import BENCH as CONTROLLER
from treadle_bench.controller.replan import BENCH as REPLAN
from treadle_bench.engine.measure import BENCH as ENGINE
from treadle_bench.fidelity.measure import BENCH as FIDELITY
from treadle_bench.fit.measure import BENCH as FIT
from treadle_bench.fleet.measure import BENCH as FLEET
from treadle_bench.front_door.measure import BENCH as FRONT_DOOR
from treadle_bench.groups.measure import BENCH as GROUPS
from treadle_bench.grpo.measure import BENCH as GRPO
from treadle_bench.h100.measure import BENCH as H100
from treadle_bench.heddle4.measure import BENCH as HEDDLE4
from treadle_bench.heddle12.measure import BENCH as HEDDLE12
from treadle_bench.heddle_tables.measure import BENCH as HEDDLE_TABLES
from treadle_bench.identity.measure import BENCH as IDENTITY
from treadle_bench.live.measure import BENCH as LIVE
from treadle_bench.long_tail.measure import BENCH as LONG_TAIL
from treadle_bench.migration.measure import BENCH as MIGRATION
from treadle_bench.placement.measure import BENCH as PLACEMENT
from treadle_bench.predictor.measure import BENCH as PREDICTOR
from treadle_bench.real.measure import BENCH as REAL
from treadle_bench.resources.measure import BENCH as RESOURCES
from treadle_bench.shaping.measure import BENCH as SHAPING
from treadle_bench.simulator.measure import BENCH as SIMULATOR
from treadle_bench.staleness import stale_figures
from treadle_bench.tail.measure import BENCH as TAIL
from treadle_bench.tools.measure import BENCH as TOOLS
from treadle_bench.workloads.measure import BENCH as WORKLOADS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
out = Terminal()

BENCHES: Mapping[str, Bench] = {
    bench.name: bench
    for bench in (
        *(
            CONSOLE,
            CONTROL_PLANE,
            ENGINE,
            ASYNC_LIVE,
            FIDELITY,
            FIT,
            FLEET,
            FRONT_DOOR,
            GRPO,
            H100,
            IDENTITY,
            LIVE,
            MIGRATION,
            CONTROLLER,
            REPLAN,
            LONG_TAIL,
            PLACEMENT,
            RESOURCES,
            WORKLOADS,
        ),
        *(
            REAL,
            ASYNC,
            GROUPS,
            TAIL,
            HEDDLE12,
            HEDDLE4,
            HEDDLE14,
            HEDDLE15,
            HEDDLE16,
            HEDDLE_TABLES,
            AFFINITY,
            SHAPING,
            PREDICTOR,
            TOOLS,
            SIMULATOR,
        ),
    )
}


@app.command(context_settings=PASS_FLAGS)
def bench(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Which figure; without it the names are listed.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    seed: Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each measurement is made.")] = 5,
    traces: Annotated[
        Path | None, typer.Option(help="Trace file to run on, see docs/traces.md.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of public traces and engine measurements.")
    ] = None,
    pictures: Annotated[Path | None, typer.Option(help="Folder to draw into.")] = None,
    scale: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Part of a simulated figure's GPUs and trajectories."),
    ] = None,
    redraw: Annotated[
        Path | None,
        typer.Option(
            help="JSON of an earlier run, to draw into --pictures again without measuring."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="JSON of a run that was stopped: its finished cells are kept (real)."),
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option(help="Folder to write the simulator's engine profiles to (fit).")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Small sizes: whether it runs, not what it says (tools, shaping)."
        ),
    ] = False,
    older: Annotated[
        bool,
        typer.Option(
            "--older", help="List committed figures older than the code, and measure none."
        ),
    ] = False,
    slots: Slots = DEFAULT_SLOTS,
    model: Model = DEFAULT_MODEL,
) -> None:
    """Measure a figure on this machine.

    What stands after -- is passed to SGLang.
    """
    if older:
        stale = stale_figures({each.name: each.decides for each in BENCHES.values()})
        listed = ", ".join(f"{each} ({commit})" for each, commit in sorted(stale.items()))
        out.print(f"figures older than the code that decides them: {listed or 'none'}")
        return
    if name not in BENCHES:
        known = "\n".join(f"  {bench.name}: {bench.summary}" for bench in BENCHES.values())
        exits.end(
            UsageProblem(
                f"{f'there is no bench {name!r}; ' if name else ''}the benches are\n{known}"
            )
        )
    chosen = BENCHES[name]
    figures: dict[str, Any] = {}
    if redraw is not None:
        if chosen.page is None or pictures is None:
            exits.end(UsageProblem("--redraw needs --pictures, and a bench that can draw again"))
        chosen.write(_read_figures("--redraw", redraw), pictures)
        return
    earlier = _read_figures("--resume", resume) if resume is not None else None

    async def measure(hurry: asyncio.Event) -> int:
        plan = engine_plan(chosen.engines, slots, model, seed, ctx.args) if chosen.engines else None
        options = BenchOptions(
            *(plan, seed, repeats, traces, data, pictures),
            hurry=hurry,
            scale=scale,
            model=model,
            quick=quick,
            earlier=earlier,
            profiles=profiles,
        )
        figures.update(await chosen.run(options))
        if as_json:
            typer.echo(json.dumps(figures))
        else:
            for key, value in figures.items():
                out.print(f"{key:<32} {_figure(value)}", highlight=False)
        return 0

    exits.run(measure)


def _read_figures(option: str, file: Path) -> Figures:
    try:
        figures: Figures = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        exits.end(UsageProblem(f"{option} {file}: {error}"))
    if not isinstance(figures, dict):
        exits.end(
            UsageProblem(f"{option} {file}: is no JSON object; give the file that a bench wrote")
        )
    return figures


def _figure(value: object) -> str:
    if isinstance(value, list):
        return "".join(f"\n  {row}" for row in value)
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
