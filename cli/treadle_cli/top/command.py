"""Run `treadle top`: a view that refreshes, or one snapshot."""

import asyncio
import json
import time
from typing import Annotated

import typer
from rich.console import Console

from treadle_cli import exits
from treadle_cli.exits import UsageProblem
from treadle_cli.options import DEFAULT_SCHEDULER, AsJson, Scheduler

REFRESH_S = 1.0


def top(
    scheduler: Scheduler = DEFAULT_SCHEDULER,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a mesh while it runs, once a second until Ctrl-C: engines, rollouts and their straggler
    tax, moves, and the trajectories with the longest way to go."""
    exits.run(lambda _: run_top(scheduler, once, as_json, Console()))


async def run_top(scheduler: str, once: bool, as_json: bool, out: Console) -> int:
    """Show the mesh at `scheduler`, and return the exit code. Raises UsageProblem, TreadleError."""
    import grpc.aio
    from rich.live import Live

    from treadle_cli.scheduler import own_certificates, reach_scheduler
    from treadle_cli.top.screen import Screen
    from treadle_cli.top.snapshot import Watcher

    if as_json and not once:
        raise UsageProblem("--json prints one snapshot: give --once with it")
    if not once and not out.is_terminal:
        raise UsageProblem(
            "treadle top needs a terminal: give --once, or --once --json, where there is none"
        )
    async with reach_scheduler(scheduler) as stub:
        watcher = Watcher(scheduler, stub, own_certificates())
        snapshot = await watcher.look()
        if once:
            typer.echo(json.dumps(snapshot.as_json())) if as_json else out.print(Screen(snapshot))
            return 0
        answered_s = time.monotonic()
        with Live(Screen(snapshot), console=out, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                try:
                    snapshot = await watcher.look()
                    answered_s = time.monotonic()
                    live.update(Screen(snapshot), refresh=True)
                except (
                    grpc.aio.AioRpcError
                ):  # the scheduler restarts, or another one leads: the last state stays
                    live.update(Screen(snapshot, time.monotonic() - answered_s), refresh=True)
