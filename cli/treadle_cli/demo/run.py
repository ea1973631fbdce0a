"""Run `treadle demo` from start to report: one mesh, and epochs of the same prompts, as a training
run has them.

The baseline plays epoch 0, which teaches the predictor and is compared with nothing. Treadle and
the baseline play each later epoch, with the same prompts, sampling seeds and environment seeds;
other epochs have other sampling seeds. Treadle plays first, so that its predictor has seen no
sample of the epoch. The control plane, where the history is, stays; the KV of all engines is
flushed before each play. Each engine generates a few tokens and each environment opens once before
the first play, so that no play pays for being first; no predictor learns from that. However the
demo ends, no process remains, and finished trajectories are on disk.
"""

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from rich.console import Console
from treadle import Prompt
from treadle.certificates import FOLDER_VARIABLE
from treadle.environments import Chat
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.tools.v1 import tools_pb2, tools_pb2_grpc
from treadle_runtime.http.sglang import EngineClient, Limits, open_session

from treadle_cli.demo.agents import make_prompts, read_chat
from treadle_cli.demo.rollout import LiveBoard, Work, play, report_run, time_stamp
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.checks import OtherPrograms
from treadle_cli.mesh.engines import Engine, EnginePlan
from treadle_cli.mesh.mesh import Mesh, MeshPlan, StartBoard
from treadle_cli.mesh.services import open_tree
from treadle_cli.report.records import (
    PlayRecord,
    Run,
    RunRecord,
    TrajectoryRecord,
    write_trajectories,
)

WARM_TOKENS = 8
WARM_BATCHES = (1, 4)  # both ends of the batch sizes that an arm starts with
ENGINE_TIMEOUT_S = 120.0
TOOLS_TIMEOUT_S = (
    120.0  # bounded by the imports of gymnasium and reasoning-gym beside two busy engines
)


@dataclass(frozen=True)
class Arm:
    """One way to run the same work. policy_text: the policy in words, for the report."""

    name: str
    title: str
    policy_text: str
    policy: pb.Policy


PINNED_FCFS = Arm(
    "pinned-fcfs",
    "Pinned FCFS",
    "placed round-robin when opened, never moved, steps in the order they arrive (an engine's own "
    "queue)",
    pb.Policy(
        # ORDERING_FCFS orders by the opening of the trajectory, which no plain engine does; this
        # orders by step.
        ordering=pb.ORDERING_ROUND_ROBIN,
        objective=pb.OBJECTIVE_MAKESPAN,
        placement=pb.PLACEMENT_RULE_PINNED,
    ),
)
TREADLE = Arm(
    "treadle",
    "Treadle",
    "longest predicted work first with preemption, planned placement, migration, KV reserved for "
    "started trajectories",
    pb.Policy(
        ordering=pb.ORDERING_PROGRESSIVE,
        objective=pb.OBJECTIVE_MAKESPAN,
        placement=pb.PLACEMENT_RULE_PLANNED,
        migrate=True,
        preempt=True,
        reserve=True,
    ),
)


def plan_plays(repeats: int) -> list[tuple[int, Arm]]:
    """Return the epoch and the arm of each play, in order."""
    return [
        (0, PINNED_FCFS),
        *((epoch, arm) for epoch in range(1, repeats + 1) for arm in (TREADLE, PINNED_FCFS)),
    ]


async def run_demo(
    engines: EnginePlan,
    work: Work,
    repeats: int,
    folder: Path,
    console: Console,
    hurry: asyncio.Event,
    *,
    keep_logs: bool,
) -> int:
    """Play all epochs, draw the report in `folder`, and return the exit code: 1 where a trajectory
    failed."""
    # of a mesh elsewhere; this one is plaintext on the loopback interface
    os.environ.pop(FOLDER_VARIABLE, None)
    logs, state = folder / "logs", folder / "state"
    started_at = time_stamp()
    plays: list[PlayRecord] = []
    records: list[TrajectoryRecord] = []
    try:
        async with open_tree(logs, hurry, engines) as tree:
            with StartBoard(console) as board:
                mesh = await Mesh.start(MeshPlan(engines, state), tree, board)
                chat = read_chat(mesh.model_path)
                prompts = make_prompts(chat, work.prompts, work.seed)
                with board.part("warm-up"):
                    await warm_engines(mesh.engines, prompts[0].tokens)
                with board.part("tools' sandboxes"):
                    await _warm_tools(mesh.where.services["tools"], prompts)
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(mesh.until_broken())
                for epoch, arm in plan_plays(repeats):
                    played, own_records = await _play(mesh, arm, epoch, work, chat, console)
                    plays.append(played)
                    records += own_records
                    write_trajectories(folder, records)
                watch.cancel()
    finally:
        shutil.rmtree(state, ignore_errors=True)
    run = Run(_run_record(engines, work, folder.name, started_at, plays), tuple(records))
    code = report_run(folder, run, console)
    if not keep_logs:
        shutil.rmtree(logs, ignore_errors=True)
    return code


async def warm_engines(engines: Sequence[Engine], token_ids: list[int]) -> None:
    """Generate WARM_TOKENS on each engine, alone and as a batch: the first batch of a fresh engine
    is slow."""
    limits = Limits(silence_s=ENGINE_TIMEOUT_S)
    async with open_session(engines[0].key) as session:
        clients = [EngineClient(engine.url, session, limits) for engine in engines]
        for batch in WARM_BATCHES:
            sampling = {"max_new_tokens": WARM_TOKENS, "ignore_eos": True}
            body = {"input_ids": [token_ids] * batch, "sampling_params": sampling}
            await asyncio.gather(*[client.generate_whole(body) for client in clients])


async def _play(
    mesh: Mesh, arm: Arm, epoch: int, work: Work, chat: Chat, console: Console
) -> tuple[PlayRecord, list[TrajectoryRecord]]:
    prompts = make_prompts(chat, work.prompts, work.seed, epoch)
    display = LiveBoard(
        console, f"Epoch {epoch}, {arm.title}", prompts, work.samples, mesh.where.sidecars
    )
    mesh.board = display
    await mesh.forget_caches()
    await mesh.set_policy(arm.policy)
    others = OtherPrograms()
    played = await play(
        mesh.where.scheduler, mesh.nats_url, arm.name, work, chat, prompts, display, epoch
    )
    record = PlayRecord(
        arm=arm.name,
        epoch=epoch,
        title=arm.title,
        policy=arm.policy_text,
        makespan_s=played.makespan_s,
        other_programs_share=others.share(),
        engine_losses=tuple(
            f"{death.engine_id} {death.how} at {death.time_s - played.started_s:.1f} s; "
            "its trajectories went on elsewhere"
            for death in mesh.engine_deaths
            if death.time_s >= played.started_s
        ),
        failed_migrations=played.failed_migrations,
    )
    return record, played.records


async def _warm_tools(address: str, prompts: Iterable[Prompt]) -> None:
    """Open and close one session of each environment, whose libraries are imported at first use.

    Raises UsageProblem where the sandbox is not available.
    """
    openings = {prompt.data.environment: prompt.data.arguments for prompt in prompts}
    async with grpc.aio.insecure_channel(address) as channel:
        tools = tools_pb2_grpc.ToolsServiceStub(channel)
        for name, arguments in openings.items():
            opening = tools_pb2.OpenSessionRequest(
                request_id=uuid.uuid4().hex, tool=name, arguments_json=json.dumps(arguments)
            )
            try:
                opened = await tools.OpenSession(opening, timeout=TOOLS_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise UsageProblem(
                    f"the tools service cannot open {name}: {error.details()}"
                ) from error
            closing = tools_pb2.CloseSessionRequest(
                request_id=uuid.uuid4().hex, session_id=opened.session.session_id
            )
            await tools.CloseSession(closing, timeout=TOOLS_TIMEOUT_S)


def _run_record(
    engines: EnginePlan, work: Work, run_id: str, started_at: str, plays: list[PlayRecord]
) -> RunRecord:
    memory_gib = psutil.virtual_memory().total / 2**30
    where = (
        "each pinned to a core of its own with one thread, so that an idle engine does not speed "
        "up the other"
        if engines.cores
        else "on GPUs"
    )
    return RunRecord(
        run_id=run_id,
        started_at=started_at,
        seed=work.seed,
        model=engines.model,
        engines=tuple(engines.engine_ids),
        slots=engines.slots,
        machine=f"{len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB",
        conditions=(
            f"Same engines for both arms, {where}.",
            "In an epoch both arms have the same prompts, sampling seeds and environment seeds; "
            "another epoch samples with other seeds. Treadle plays an epoch first, so that its "
            "predictor knows no sample of it.",
            "The baseline plays epoch 0, from which the predictor learns as from the first epoch "
            "of a training run; it is compared with nothing. Each play begins with flushed KV "
            "caches, in the engines and in shared storage.",
            f"Each tool call takes {work.tool_latency_s:g} s longer (--tool-latency), like a call "
            "across a network: "
            "FrozenLake answers in milliseconds, and no KV can move in that time.",
            "The services and the agents' own code share the cores with the engines, in both arms.",
        ),
        plays=tuple(plays),
    )
