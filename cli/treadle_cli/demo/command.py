"""Define the options of `treadle demo` and `treadle rollout`. The work is imported when a command
runs."""

import asyncio
from typing import Annotated

import typer

from treadle_cli import exits
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.engines import DEFAULT_MODEL, default_model_folder, engine_plan
from treadle_cli.options import (
    DEFAULT_OUT,
    DEFAULT_SCHEDULER,
    NATS_VARIABLE,
    AsJson,
    Engines,
    Model,
    Out,
    Prompts,
    Samples,
    Scheduler,
    Seed,
    Slots,
    ToolLatency,
    Weights,
    choose_console,
    new_run_folder,
)

DEFAULT_SLOTS = 4  # four trajectories a slot: they queue, as they do where GPUs are scarce
DEFAULT_PROMPTS = 8
DEFAULT_TOOL_LATENCY_S = 0.5  # a remote sandbox; coding agents' tools take 4 s on average


def demo(
    ctx: typer.Context,
    prompts: Prompts = DEFAULT_PROMPTS,
    samples: Samples = 4,
    seed: Seed = 0,
    tool_latency: ToolLatency = DEFAULT_TOOL_LATENCY_S,
    engines: Engines = 2,
    slots: Slots = DEFAULT_SLOTS,
    model: Model = DEFAULT_MODEL,
    weights: Weights = "auto",
    out_folder: Out = DEFAULT_OUT,
    repeats: Annotated[
        int, typer.Option(min=1, help="Epochs that are compared, after the first.")
    ] = 3,
    keep_logs: Annotated[
        bool, typer.Option("--keep-logs", help="Keep the processes' logs also when all went well.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run epochs of agentic work, pinned first come first served and with Treadle, and draw where
    the time went.

    What stands after -- is passed to SGLang.
    """
    from treadle_cli.demo.rollout import Work
    from treadle_cli.demo.run import run_demo
    from treadle_cli.report.drawing import print_summary

    async def begin(hurry: asyncio.Event) -> int:
        plan = engine_plan(max(engines, 1), slots, model, seed, ctx.args, weights)
        work = Work(prompts, samples, seed, tool_latency)
        folder = new_run_folder(out_folder)
        code = await run_demo(
            plan, work, repeats, folder, choose_console(as_json), hurry, keep_logs=keep_logs
        )
        if as_json:
            print_summary(folder)
        return code

    exits.run(begin)


def rollout(
    scheduler: Scheduler = DEFAULT_SCHEDULER,
    nats_url: Annotated[
        str,
        typer.Option(
            help="The mesh's NATS; without it migrations do not show.", envvar=NATS_VARIABLE
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(help="Folder with the tokenizer.json of the model that the mesh serves.")
    ] = DEFAULT_MODEL,
    prompts: Prompts = DEFAULT_PROMPTS,
    samples: Samples = 4,
    seed: Seed = 0,
    tool_latency: ToolLatency = DEFAULT_TOOL_LATENCY_S,
    job: Annotated[
        str, typer.Option(help="Name of the job whose share of the engines the rollout takes.")
    ] = "",
    weight: Annotated[
        float | None, typer.Option(min=0.001, help="Of that share, beside other jobs; needs --job.")
    ] = None,
    out_folder: Out = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """Run the demo's work once on a mesh that is running, under the policy that it has."""
    from treadle_cli.demo.rollout import Work, run_attached
    from treadle_cli.report.drawing import print_summary

    if weight is not None and not job:
        exits.end(UsageProblem("--weight needs --job: the name whose share it is of"))
    tokenizer = str(default_model_folder()) if model == DEFAULT_MODEL else model
    work = Work(prompts, samples, seed, tool_latency, job, weight)

    async def begin(_: asyncio.Event) -> int:
        folder = new_run_folder(out_folder)
        console = choose_console(as_json)
        code = await run_attached(scheduler, nats_url, tokenizer, work, folder, console)
        if as_json:
            print_summary(folder)
        return code

    exits.run(begin)
