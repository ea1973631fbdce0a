"""Define the options of `treadle up` and `treadle down`. The work is imported when a command runs:
`mesh` starts a mesh on this machine, `on_ray` one on a Ray cluster.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from treadle_cli import exits
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.engines import DEFAULT_MODEL, DEFAULT_SLOTS, engine_plan
from treadle_cli.options import (
    DEFAULT_OUT,
    DEFAULT_PORT,
    MOST_PORT,
    AsJson,
    Engines,
    Model,
    Out,
    Seed,
    Slots,
    Weights,
    choose_console,
    new_run_folder,
    print_json,
)

# options of treadle up
WITH_RAY = {"engine_actor", "engine_url", "runtime_env", "ray_folder", "ray_cpus"}


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
            help="Encrypt every connection, and let nobody call without a certificate. With --ray, "
            "so by default where the cluster has several nodes.",
        ),
    ] = None,
    ray: Annotated[
        str,
        typer.Option(
            help="Instead: a mesh of Ray actors beside the engines of this cluster, which goes on "
            "until treadle down. An address as ray.init takes it: auto, host:port, ray://host:port."
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
    from treadle_cli.mesh.mesh import MeshPlan, run_up

    with exits.end_with_one_line():
        named = _require_one_kind_of_engines(ctx, bool(ray))
        if ray:
            limit = slots if "slots" in named else 0  # 0: as many as the engines report
            actors, urls = engine_actor or [], engine_url or []
            from treadle_cli.on_ray.command import RayOptions, up_on_ray

            given = RayOptions(
                ray, port, secure, limit, kv_folder, actors, urls, ray_cpus, ray_folder, runtime_env
            )
            up_on_ray(given, as_json, choose_console(as_json))
            return

    def begin(hurry: asyncio.Event) -> Coroutine[Any, Any, int]:
        plan = engine_plan(engines, slots, model, seed, ctx.args, weights)
        plan = replace(plan, kv_folder=kv_folder, kv_limit_gb=kv_limit_gb)
        folder = new_run_folder(out_folder)
        announce = print_json if as_json else None
        mesh = MeshPlan(plan, folder / "state", port, secure=bool(secure))
        return run_up(mesh, folder / "logs", choose_console(as_json), hurry, announce)

    exits.run(begin)


def down(
    address: Annotated[
        str, typer.Option("--ray", help="Address of a Ray cluster as ray.init takes it, e.g. auto.")
    ],
    as_json: AsJson = False,
) -> None:
    """End the mesh of a Ray cluster; its engines go on as they were."""
    from treadle_cli.on_ray.command import end_on_ray

    with exits.end_with_one_line():
        ended = end_on_ray(address)
        if as_json:
            print_json({"ended": ended})
        else:
            typer.echo(f"{len(ended)} actors ended" if ended else "no mesh runs there")


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
