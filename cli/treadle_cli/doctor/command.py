"""Run `treadle doctor`: check a machine, SGLang servers and a mesh, and print what to change."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from treadle_cli import exits
from treadle_cli.options import DEFAULT_PORT, MOST_PORT, AsJson

if TYPE_CHECKING:
    from treadle_cli.doctor.findings import Finding

Urls = Annotated[
    list[str] | None, typer.Argument(help="SGLang servers to look at, e.g. http://127.0.0.1:30000.")
]


def doctor(
    urls: Urls = None,
    scheduler: Annotated[
        str, typer.Option(help="host:port of a mesh's scheduler, to look at the mesh too.")
    ] = "",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_PORT, help="Port that a mesh's scheduler would get on this machine."
        ),
    ] = DEFAULT_PORT,
    json_only: AsJson = False,
) -> None:
    """Check this machine, SGLang servers and a mesh, and say what to change. Exit code 1 where
    there is a problem."""
    exits.run(lambda _: run_doctor(urls or [], scheduler, port, json_only, Console()))


async def run_doctor(
    urls: list[str], scheduler: str, port: int, json_only: bool, out: Console
) -> int:
    """Check, print, and return the exit code. Raises UsageProblem for a bad URL."""
    from treadle_cli.doctor.machine import check_machine
    from treadle_cli.doctor.servers import check_servers, clean_urls, read_servers

    cleaned = clean_urls(urls)
    with nullcontext() if json_only else exits.err.status("looking"):
        findings = await asyncio.to_thread(lambda: list(check_machine(port)))
        findings += check_servers(await read_servers(cleaned))
        if scheduler:
            from treadle_cli.doctor.mesh import check_mesh

            findings += await check_mesh(scheduler)
    return report(findings, json_only, out)


def report(findings: list[Finding], json_only: bool, out: Console) -> int:
    """Print the findings; return the exit code, 1 where one is a problem."""
    from treadle_cli.doctor.findings import PROBLEM, as_json, count_levels, print_findings, worst

    if json_only:
        typer.echo(json.dumps(as_json(findings)))
    else:
        print_findings(findings, out)
        out.print(f"\n{count_levels(findings)}", highlight=False)
    return exits.FAILED if worst(findings) == PROBLEM else 0
