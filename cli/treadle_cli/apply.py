"""Run `treadle apply`: read a plan's file, apply it and print what was changed.

The plan goes to the resource service of a mesh, which its scheduler names; for a cluster this
process is that service itself, and the scheduler only reports which engines have registered.
"""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import grpc
import typer
from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console
from treadle.certificates import open_channel
from treadle.errors import TreadleError
from treadle.resources.v1 import resources_pb2 as pb
from treadle.resources.v1 import resources_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2
from treadle.types import duration
from treadle_runtime import errors

from treadle_cli import exits
from treadle_cli.exits import UsageProblem, printable
from treadle_cli.mesh.scheduler import own_certificates, reach_scheduler
from treadle_cli.options import DEFAULT_SCHEDULER, AsJson, Scheduler, choose_console
from treadle_cli.resources.servicer import ResourceServicer

CALL_S = 10.0
OVERHEAD_S = 600.0  # a change beside drain and starts: until stopped engines are gone, twice
CORRECTABLE = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
)

Apply = Callable[[pb.ApplyPlanRequest], Awaitable[pb.ApplyPlanResponse]]
Show = Callable[[], Awaitable[pb.GetResourcesResponse]]


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
    how, console = (dry_run, drain, start_timeout), choose_console(as_json)
    exits.run(lambda _: run_apply(plan, scheduler, kubernetes, *how, console, as_json))


async def run_apply(
    file: Path | None,
    scheduler: str,
    namespace: str | None,
    dry_run: bool,
    drain_s: float,
    start_s: float,
    out: Console,
    as_json: bool = False,
) -> int:
    """Dry run a plan, then apply it; without a file print the present plan. Returns the exit code:
    1 where the plan was rolled back. namespace: of a cluster; None: a mesh of `treadle up`.
    as_json: print the answer to the plan on stdout, as the contract has it, and all else on `out`.
    Raises UsageProblem, TreadleError."""
    plan = None if file is None else read_plan(file)
    try:
        async with open_resources(scheduler, namespace, out) as (change, show):
            if plan is None:
                shown = _json((await show()).plan)
                typer.echo(shown) if as_json else out.print(
                    shown, highlight=False, markup=False, soft_wrap=True
                )
                return 0
            request = pb.ApplyPlanRequest(
                plan=plan, drain=duration(drain_s), start_timeout=duration(start_s)
            )
            request.request_id, request.dry_run = uuid.uuid4().hex, True
            planned = await change(request)
            out.print(describe(planned), highlight=False, markup=False)
            if dry_run or not (planned.stop_engine_ids or planned.start):
                if as_json:
                    typer.echo(_json(planned))
                return 0
            with out.status("changing engines"):
                request.request_id, request.dry_run = uuid.uuid4().hex, False
                applied = await change(request)
    except TreadleError as error:
        raise (UsageProblem(error.message) if error.code in CORRECTABLE else error) from None
    except errors.TreadleError as error:
        raise UsageProblem(error.message) from None
    if applied.outcome == pb.APPLY_OUTCOME_ROLLED_BACK:
        failed = f"{applied.failed_engine_id} did not come up: {applied.problem}"
        outcome = f"rolled back, because {failed}"
    else:
        outcome = f"applied; started: {', '.join(applied.started_engine_ids) or 'none'}"
    out.print(printable(outcome), highlight=False, markup=False, soft_wrap=True)
    if as_json:
        typer.echo(_json(applied))
    return 1 if applied.outcome == pb.APPLY_OUTCOME_ROLLED_BACK else 0


def _json(message: Message) -> str:
    return json_format.MessageToJson(message, preserving_proto_field_name=True)


def read_plan(file: Path) -> pb.ResourcePlan:
    """Return the plan in a JSON file: a treadle.resources.v1.ResourcePlan. Raises UsageProblem."""
    try:
        return json_format.Parse(file.read_text(), pb.ResourcePlan())
    except (OSError, UnicodeDecodeError, json_format.ParseError) as error:
        raise UsageProblem(f"{file}: {error}") from None


def describe(planned: pb.ApplyPlanResponse) -> str:
    """Return what a plan changes, a line for each kind of change."""
    wanted = [
        f"{each.count} x {each.degree} {each.accelerator} with {each.slots} slots "
        f"{' '.join(each.flags)}".rstrip()
        for each in planned.start
    ]
    lines = (
        ("keep", planned.keep_engine_ids),
        ("stop", planned.stop_engine_ids),
        ("start", wanted),
    )
    return "\n".join(
        f"{verb}: {', '.join(map(printable, named)) or 'none'}" for verb, named in lines
    )


@asynccontextmanager
async def open_resources(
    scheduler: str, namespace: str | None, out: Console
) -> AsyncIterator[tuple[Apply, Show]]:
    """Yield how to apply a plan and how to show the present one, of a cluster or of the mesh at
    `scheduler` (host:port)."""
    async with reach_scheduler(scheduler) as stub:
        if namespace is not None:
            try:
                from treadle_cli.resources.kubernetes import KubernetesEngines
            except ModuleNotFoundError as error:
                raise UsageProblem(
                    f"{error.name} is not installed: pip install 'treadle[kubernetes]'"
                ) from None
            async with KubernetesEngines.connect(namespace) as engines:
                servicer = ResourceServicer(
                    engines, stub, lambda text: out.print(text, highlight=False, markup=False)
                )
                yield servicer.apply, servicer.show
            return
        found = await stub.GetDirectory(scheduler_pb2.GetDirectoryRequest(), timeout=CALL_S)
        if not found.resources_address:
            advice = "only `treadle up` starts engines; for a cluster give --kubernetes NAMESPACE"
            raise UsageProblem(
                f"--scheduler {scheduler}: this mesh takes no resource plans: {advice}"
            )
        async with open_channel(
            found.resources_address, "resources", own_certificates()
        ) as channel:
            calls = resources_pb2_grpc.ResourceServiceStub(channel)

            async def change(request: pb.ApplyPlanRequest) -> pb.ApplyPlanResponse:
                starts_s = 2 * request.start_timeout.ToTimedelta().total_seconds()
                timeout_s = request.drain.ToTimedelta().total_seconds() + starts_s + OVERHEAD_S
                return await calls.ApplyPlan(request, timeout=timeout_s)

            async def show() -> pb.GetResourcesResponse:
                return await calls.GetResources(pb.GetResourcesRequest(), timeout=CALL_S)

            yield change, show
