"""Define the commands that change which engines a mesh has, with their options. The work is
imported when a command runs."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from treadle_cli import exits
from treadle_cli.options import (
    DEFAULT_OUT,
    DEFAULT_PORT,
    DEFAULT_SCHEDULER,
    MOST_PORT,
    AsJson,
    Out,
    Scheduler,
)


def attach(
    urls: Annotated[
        list[str], typer.Argument(help="SGLang servers that run, e.g. http://127.0.0.1:30000.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Say what must change, and start nothing.")
    ] = False,
    scheduler: Annotated[str, typer.Option(help="host:port of a mesh that runs, to join it.")] = "",
    nats_url: Annotated[str, typer.Option(help="The NATS of that mesh, nats://host:port.")] = "",
    host: Annotated[
        str,
        typer.Option(
            help="Where that mesh reaches this machine, if it runs on another.",
            show_default="127.0.0.1",
        ),
    ] = "",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_PORT, help="Port of the scheduler that is started; 0: free ports."
        ),
    ] = DEFAULT_PORT,
    slots: Annotated[
        int, typer.Option(min=0, help="Steps that decode at once on an engine; 0: as it says.")
    ] = 0,
    kv_folder: Annotated[
        Path | None,
        typer.Option(help="The folder in which the servers' HiCache stores KV, if they share one."),
    ] = None,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Encrypt every connection, and let nobody call without a certificate."
        ),
    ] = False,
    out_folder: Out = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """Put a sidecar beside each SGLang server that somebody else started, until Ctrl-C, which
    leaves the servers as they were. Checks the servers' flags first; exit code 1 of --check where
    one must change."""
    from treadle_cli.fleet.attach import AttachPlan, print_addresses, run_attach, run_check

    plan = AttachPlan(tuple(urls), scheduler, nats_url, port, host, slots, kv_folder, secure)

    def begin(hurry: asyncio.Event) -> Coroutine[Any, Any, int]:
        if check:
            return run_check(plan.urls, as_json, Console())
        announce = print_addresses if as_json else None
        return run_attach(plan, out_folder, _shown(as_json), hurry, announce)

    exits.run(begin)


def drain(
    engine: Annotated[
        str, typer.Argument(help="Id of a registered engine, as `treadle top` shows it.")
    ],
    scheduler: Scheduler = DEFAULT_SCHEDULER,
    undo: Annotated[bool, typer.Option("--undo", help="Use the engine again.")] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Do not wait until the engine is empty.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send an engine no more steps and move its trajectories to others, then wait until it is
    empty. Its running steps end there. Ctrl-C ends the wait and not the drain, which holds until
    --undo."""
    from treadle_cli.fleet.drain import run_drain

    exits.run(lambda _: run_drain(engine, scheduler, undo, not no_wait, as_json, _shown(as_json)))


def apply(
    plan: Annotated[
        Path | None,
        typer.Argument(
            help="JSON file of a treadle.resources.v1.ResourcePlan; none: print the present one."
        ),
    ] = None,
    scheduler: Scheduler = DEFAULT_SCHEDULER,
    kubernetes: Annotated[
        str | None,
        typer.Option(
            help="Namespace of a cluster's StatefulSets of engines, instead of `treadle up`."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")
    ] = False,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for open trajectories to close.")
    ] = 0.0,
    start_timeout: Annotated[
        float,
        typer.Option(
            min=1, help="Seconds that an engine may take until it is measured; then all goes back."
        ),
    ] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Change the engines of a mesh that is running to a resource plan, between training steps."""
    from treadle_cli.resources.command import run_apply

    how = (dry_run, drain, start_timeout)
    exits.run(lambda _: run_apply(plan, scheduler, kubernetes, *how, _shown(as_json), as_json))


def _shown(as_json: bool) -> Console:
    """Return where a command shows its progress; stdout is for one JSON object with --json."""
    return exits.err if as_json else Console()
