"""Define the command line: options in, exit codes out (`exits.py`)."""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from treadle_cli import exits
from treadle_cli.doctor.command import doctor
from treadle_cli.exits import UsageProblem
from treadle_cli.fleet.commands import apply, attach, drain
from treadle_cli.mesh import checks
from treadle_cli.mesh.engines import DEFAULT_MODEL, EnginePlan, default_model_folder
from treadle_cli.on_ray.command import RayOptions, down, up_on_ray
from treadle_cli.options import (
    DEFAULT_DAYS,
    DEFAULT_OUT,
    DEFAULT_PORT,
    DEFAULT_SCHEDULER,
    MOST_PORT,
    Accelerator,
    AsJson,
    Engines,
    Gpus,
    Llm,
    Model,
    Out,
    Profile,
    Prompts,
    Samples,
    Scheduler,
    Seed,
    SimulatedSlots,
    Slots,
    ToolLatency,
    Weights,
    new_run_folder,
)
from treadle_cli.predictor.commands import commands as predictor_commands
from treadle_cli.simulate.command import simulate
from treadle_cli.top.command import top

DEFAULT_SLOTS = 5  # steps that decode at once
DEMO_SLOTS = 4  # four trajectories a slot: they queue, as they do where GPUs are scarce
DEMO_PROMPTS = 8
DEFAULT_TOOL_LATENCY_S = 0.5  # a remote sandbox; coding agents' tools take 4 s on average
# options of treadle up
WITH_RAY = {"engine_actor", "engine_url", "runtime_env", "ray_folder", "ray_cpus"}
PASS_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": False}

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(predictor_commands, name="predictor")
for each in (attach, down, doctor, drain, top, simulate, apply):
    app.command()(each)
out = Console()


@app.command(context_settings=PASS_FLAGS)
def demo(
    ctx: typer.Context,
    prompts: Prompts = DEMO_PROMPTS,
    samples: Samples = 4,
    seed: Seed = 0,
    tool_latency: ToolLatency = DEFAULT_TOOL_LATENCY_S,
    engines: Engines = 2,
    slots: Slots = DEMO_SLOTS,
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
    from treadle_cli.demo.play import Work
    from treadle_cli.demo.run import run_demo

    async def begin(hurry: asyncio.Event) -> int:
        plan = engine_plan(max(engines, 1), slots, model, seed, ctx.args, weights)
        work = Work(prompts, samples, seed, tool_latency)
        folder = new_run_folder(out_folder)
        code = await run_demo(
            plan, work, repeats, folder, _shown(as_json), hurry, keep_logs=keep_logs
        )
        return _print_summary(folder, code) if as_json else code

    exits.run(begin)


@app.command(context_settings=PASS_FLAGS)
def up(
    ctx: typer.Context,
    engines: Engines = 2,
    slots: Slots = DEFAULT_SLOTS,
    model: Model = DEFAULT_MODEL,
    weights: Weights = "auto",
    seed: Seed = 0,
    kv_folder: Annotated[
        Path | None,
        typer.Option(
            help="Where KV pages are to be. By default in the host's memory, where it has room."
        ),
    ] = None,
    kv_limit_gb: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="Most GB of KV pages there. By default an eighth of what is free."
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_PORT, help="Port of the scheduler; the others follow. 0: free ports."
        ),
    ] = DEFAULT_PORT,
    secure: Annotated[
        bool | None,
        typer.Option(
            "--secure/--no-secure",
            help="Encrypt every connection, and let nobody call without a certificate. With "
            "--ray, so by default where "
            "the cluster has several nodes.",
        ),
    ] = None,
    ray: Annotated[
        str,
        typer.Option(
            help="Instead: a mesh of Ray actors beside the engines of this cluster, which goes on "
            "until treadle down. "
            "An address as ray.init takes it: auto, host:port, ray://host:port."
        ),
    ] = "",
    engine_actor: Annotated[
        list[str] | None,
        typer.Option(
            help="With --ray: NAME[:METHOD] of actors with a SGLang server, beside those of verl."
        ),
    ] = None,
    engine_url: Annotated[
        list[str] | None, typer.Option(help="With --ray: a SGLang server on a node of the cluster.")
    ] = None,
    runtime_env: Annotated[
        str,
        typer.Option(
            help="With --ray: the runtime environment of the actors, as JSON; they need "
            "treadle[ray]."
        ),
    ] = "",
    ray_folder: Annotated[
        Path | None,
        typer.Option(help="With --ray: a folder of each node, for NATS's store and for logs."),
    ] = None,
    ray_cpus: Annotated[
        float, typer.Option(min=0, help="With --ray: CPUs that Ray reserves for each service.")
    ] = 0.0,
    out_folder: Out = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """Run a whole mesh on this machine until Ctrl-C: NATS, the services, engines and their
    sidecars. With --json, one line with all addresses is printed when it serves.

    What stands after -- is passed to SGLang.
    """
    from treadle_cli.fleet.attach import print_addresses
    from treadle_cli.mesh.mesh import MeshPlan, run_up

    with exits.end_with_one_line():
        named = _require_one_kind_of_engines(ctx, bool(ray))
        if ray:
            limit = slots if "slots" in named else 0  # 0: as many as the engines report
            actors, urls = engine_actor or [], engine_url or []
            given = RayOptions(
                ray, port, secure, limit, kv_folder, actors, urls, ray_cpus, ray_folder, runtime_env
            )
            up_on_ray(given, as_json, _shown(as_json))
            return

    def begin(hurry: asyncio.Event) -> Coroutine[Any, Any, int]:
        plan = engine_plan(engines, slots, model, seed, ctx.args, weights)
        plan = replace(plan, kv_folder=kv_folder, kv_limit_gb=kv_limit_gb)
        folder = new_run_folder(out_folder)
        announce = print_addresses if as_json else None
        mesh = MeshPlan(plan, folder / "state", port, secure=bool(secure))
        return run_up(mesh, folder / "logs", _shown(as_json), hurry, announce)

    exits.run(begin)


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Where the certificates go; kept between runs.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Whose clients get a certificate; may be given several times."),
    ] = None,
    days: Annotated[
        float, typer.Option(min=0.001, help="How long the certificates are valid.")
    ] = DEFAULT_DAYS,
    as_json: AsJson = False,
) -> None:
    """Make certificates for all parts of a mesh and for its clients; run again, make new ones of
    the same authority."""
    from treadle_cli.authority import DEFAULT_TENANT, identities, make_certificates

    with exits.end_with_one_line():
        tenants = tenant or [DEFAULT_TENANT]
        make_certificates(folder, tenants, days)
        if as_json:
            typer.echo(
                json.dumps(
                    {"folder": str(folder), "days": days, "identities": sorted(identities(tenants))}
                )
            )
            return
        out.print(
            f"{folder}: certificates for {days:g} days. Set TREADLE_TLS_FOLDER to the folder of "
            "each service."
        )


@app.command()
def rollout(
    scheduler: Scheduler = DEFAULT_SCHEDULER,
    nats_url: Annotated[
        str, typer.Option(help="The mesh's NATS; without it migrations do not show.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Folder with the tokenizer.json of the model that the mesh serves.")
    ] = DEFAULT_MODEL,
    prompts: Prompts = DEMO_PROMPTS,
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
    from treadle_cli.demo.play import Work, run_attached

    if weight is not None and not job:
        exits.end(UsageProblem("--weight needs --job: the name whose share it is of"))
    tokenizer = str(default_model_folder()) if model == DEFAULT_MODEL else model
    work = Work(prompts, samples, seed, tool_latency, job, weight)

    async def begin(_: asyncio.Event) -> int:
        folder = new_run_folder(out_folder)
        code = await run_attached(scheduler, nats_url, tokenizer, work, folder, _shown(as_json))
        return _print_summary(folder, code) if as_json else code

    exits.run(begin)


class _Untouched(TyperCommand):
    """Command that receives its arguments unchanged: click would remove the first "--"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return args


# The command of the distribution treadle-bench reads all arguments, --help too.
@app.command(cls=_Untouched, add_help_option=False)
def bench(ctx: typer.Context) -> None:
    """Measure a figure on this machine. Needs the distribution treadle-bench: pip install
    ./research"""
    from importlib.metadata import entry_points

    commands = entry_points(group="treadle.commands", name="bench")
    if not commands:
        exits.end(
            UsageProblem(
                "treadle bench is a distribution of its own: run pip install ./research in a "
                "checkout"
            )
        )
    for command in commands:
        typer.main.get_command(command.load())(ctx.args, prog_name=ctx.command_path)


@app.command()
def explain(
    trajectory: Annotated[
        str, typer.Argument(help="Id of a trajectory of the mesh, or PROMPT#SAMPLE of --trace.")
    ],
    scheduler: Scheduler = DEFAULT_SCHEDULER,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="A trace file (docs/traces.md) instead of a mesh; the rest is for its engines."
        ),
    ] = None,
    llm: Llm = "Qwen3-14B",
    accelerator: Accelerator = "H200",
    gpus: Gpus = 8,
    slots: SimulatedSlots = 100,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Say where the time of a trajectory went, what was decided about it, and how it would end
    under other policies."""
    from treadle_cli.explain.live import explain_live
    from treadle_cli.explain.replay import explain_trace
    from treadle_cli.simulate.request import Request

    async def run(_: asyncio.Event) -> int:
        if trace is None:
            explanation = await explain_live(trajectory, scheduler, exits.err)
        else:
            request = Request(
                str(trace),
                llm,
                accelerator,
                gpus,
                slots,
                prompts=None,
                samples=None,
                systems=None,
                degrees="best",
                predictor="siblings",
                seed=0,
                repeats=1,
                profile=profile,
            )
            with exits.err.status("playing the trace file"):
                explanation = await asyncio.to_thread(explain_trace, trajectory, request)
        if as_json:
            typer.echo(json.dumps(explanation.as_json()))
        else:
            explanation.print(out)
        return 0

    exits.run(run)


@app.command()
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
    from treadle_cli.shaping import print_shaping, read_shaping

    async def run(_: asyncio.Event) -> int:
        report = await read_shaping(scheduler, rollout, history)
        if as_json:
            typer.echo(json.dumps(asdict(report)))
        else:
            print_shaping(report, rollout or history, out)
        return 0

    exits.run(run)


@app.command()
def fit(
    profile: Annotated[
        Path, typer.Option(help="Profile that was measured on a live engine, see sim/README.md.")
    ],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for figures and picture.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit an engine's curve to what was measured on it, and print how far off it is."""
    from treadle_cli.fit import fit_profile

    with exits.end_with_one_line():
        figures, page = fit_profile(profile, out_folder)
        if as_json:
            typer.echo(json.dumps(figures))
        else:
            from rich.markdown import Markdown

            out.print(Markdown(page))


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, runs/<id>.")],
    traces: Annotated[
        Path | None,
        typer.Option(
            help="Write the run's trajectories to this trace file (docs/traces.md) instead."
        ),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            help="Write the run's steps as Chrome trace events for ui.perfetto.dev instead."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the report of a finished run again, from its trajectories.jsonl and summary.json."""
    from treadle_cli.predictor.sources import write_run
    from treadle_cli.report.page import render_run
    from treadle_cli.report.perfetto import write_perfetto
    from treadle_cli.report.records import read_run

    with exits.end_with_one_line():
        if perfetto is not None and traces is not None:
            raise UsageProblem("trace takes either --traces FILE or --perfetto FILE")
        if perfetto is not None:
            file, what, count = perfetto, "slices", write_perfetto(read_run(run), perfetto)
        elif traces is not None:
            file, what, count = traces, "trajectories", write_run(run, traces)
        else:
            render_run(run, _shown(as_json))
            if as_json:
                _print_summary(run, 0)
            return
        typer.echo(
            json.dumps({"file": str(file), what: count}) if as_json else f"{file}: {count} {what}"
        )


def _require_one_kind_of_engines(ctx: typer.Context, on_ray: bool) -> set[str]:
    """Return the names of the options that were given. Raises UsageProblem for one that has no
    effect: a mesh either starts engines or stands beside those of a Ray cluster."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    named = {
        name
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }
    without = {"engines", "model", "weights", "seed", "kv_limit_gb"} if on_ray else WITH_RAY
    wrong = [f"--{name.replace('_', '-')}" for name in sorted(named & without)]
    if wrong or (on_ray and ctx.args):
        raise UsageProblem(
            f"{' '.join(wrong) or '--'} has no effect {'with' if on_ray else 'without'} --ray"
        )
    return named


def _shown(as_json: bool) -> Console:
    """Return where a command shows its progress and its tables; with --json, stdout is for one JSON
    object."""
    return exits.err if as_json else out


def _print_summary(folder: Path, code: int) -> int:
    """Print the object that --json prints of a run: its summary.json, and its folder. Return the
    exit code."""
    from treadle_cli.report.records import SUMMARY_FILE

    typer.echo(
        json.dumps({"folder": str(folder), **json.loads((folder / SUMMARY_FILE).read_text())})
    )
    return code


def engine_plan(
    count: int, slots: int, model: str, seed: int, flags: list[str], weights: str = "auto"
) -> EnginePlan:
    """Return the plan of the engines that the options name, after the checks that a mesh needs.
    Raises UsageProblem."""
    python = checks.engine_python() if count else Path()
    cores = () if checks.has_gpu() else checks.pinned_cores(count)
    checks.require_weights(weights)
    checks.require_bubblewrap()
    checks.nats_server()
    return EnginePlan(count, slots, model, python, cores, seed, tuple(flags), weights)
