"""One rollout of the demo's work against whatever mesh listens at an address.

`treadle rollout`: the demo's work on a mesh that runs already, under whatever policy it has."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from rich.console import Console
from treadle import Client, Prompt, RolloutEvent, Timeouts, TrajectoryResult
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from treadle_cli.demo.agents import Player
from treadle_cli.demo.chatml import ChatML
from treadle_cli.demo.collect import Heard, failed_migrations, listening, trajectory_records
from treadle_cli.demo.live import LiveBoard
from treadle_cli.demo.tasks import make_prompts
from treadle_cli.problems import UsageProblem
from treadle_cli.report.records import ArmRecord, RunRecord, TrajectoryRecord, write_summary, write_trajectories
from treadle_cli.report.render import render

CLEANUP_S = 2.0  # after Ctrl-C the mesh ends too: nobody needs to wait for every trajectory's goodbye


@dataclass(frozen=True)
class Work:
    """What is played. arm: the name that its records carry. tool_latency_s: see Player."""

    arm: str
    prompts: Sequence[Prompt]
    samples: int
    chat: ChatML
    tool_latency_s: float


@dataclass(frozen=True)
class Played:
    """What came of it. started_s: unix time; opened_s: unix time by (prompt, sample)."""

    work: Work
    started_s: float
    results: Sequence[TrajectoryResult]
    opened_s: dict[tuple[str, int], float]

    def records(self, heard: Heard) -> list[TrajectoryRecord]:
        """As the run's folder keeps them, with what the bus told."""
        kinds = {prompt.id: str(prompt.data.kind) for prompt in self.work.prompts}
        return trajectory_records(self.work.arm, self.started_s, self.results, self.opened_s, kinds, heard)


async def play(scheduler: str, work: Work, display: LiveBoard) -> Played:
    """Runs all samples of all prompts at once and shows them. TreadleError where the rollout cannot be made."""
    opened_s: dict[tuple[str, int], float] = {}

    def on_event(event: RolloutEvent) -> None:
        if event.kind == "opened":
            opened_s[event.prompt_id, event.sample] = event.time_s
        display.on_event(event)

    async with Client(scheduler, timeouts=Timeouts(cleanup_s=CLEANUP_S)) as client, display:
        started_s = time.time()
        player = Player(work.chat, work.tool_latency_s)
        rollout = await client.rollout(work.prompts, player, samples_per_prompt=work.samples, on_event=on_event)
    return Played(work, started_s, rollout.trajectories, opened_s)


ASK_TIMEOUT_S = 10.0
ARM = "rollout"


@dataclass(frozen=True)
class AttachPlan:
    """What to run where. nats_url: empty where migrations need not show. model_path: folder with the tokenizer."""

    scheduler: str
    nats_url: str
    model_path: str
    folder: Path
    prompts: int
    samples: int
    seed: int
    tool_latency_s: float


async def run_attached(plan: AttachPlan, console: Console, hurry: asyncio.Event) -> int:
    """Runs the work once and draws the report; the exit code is 1 where a trajectory failed. `hurry` is unused."""
    chat = ChatML.of_model(plan.model_path)
    engines, policy = await _ask(plan.scheduler)
    if not engines:
        raise UsageProblem(f"the scheduler at {plan.scheduler} knows no engine: start a sidecar that names it")
    prompts = make_prompts(chat, plan.prompts, plan.seed)
    sidecars = {engine.info.engine_id: engine.info.address for engine in engines}
    display = LiveBoard(console, ARM, prompts, plan.samples, sidecars)
    started_at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    hearing = listening(plan.nats_url, display.note) if plan.nats_url else contextlib.nullcontext(Heard())
    async with hearing as heard:
        played = await play(plan.scheduler, Work(ARM, prompts, plan.samples, chat, plan.tool_latency_s), display)
    records = played.records(heard)
    arm = ArmRecord(
        arm=ARM,
        title="Rollout",
        policy=policy,
        makespan_s=max(record.finished_s for record in records),
        failed_migrations=failed_migrations(heard.migrations),
    )
    record = RunRecord(
        run_id=plan.folder.name,
        started_at=started_at,
        seed=plan.seed,
        model=engines[0].info.model,
        engines=tuple(sidecars),
        slots=engines[0].info.slot_limit,
        machine=f"mesh at {plan.scheduler}",
        conditions=("One rollout on a mesh that was running, warm or not.",),
        arms=(arm,),
    )
    write_trajectories(plan.folder, records)
    write_summary(plan.folder, record, [])
    render(plan.folder, console)
    return 1 if any(record.outcome == "failed" for record in records) else 0


async def _ask(scheduler: str) -> tuple[list[scheduler_pb2.RegisteredEngine], str]:
    """The engines of the mesh, and its policy in words."""
    async with grpc.aio.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        try:
            engines = await stub.ListEngines(scheduler_pb2.ListEnginesRequest(), timeout=ASK_TIMEOUT_S)
            policy = (await stub.GetPolicy(scheduler_pb2.GetPolicyRequest(), timeout=ASK_TIMEOUT_S)).policy
        except grpc.aio.AioRpcError as error:
            raise UsageProblem(f"the scheduler at {scheduler} does not answer: {error.details()}") from error
    ordering = scheduler_pb2.Ordering.Name(policy.ordering).removeprefix("ORDERING_").lower().replace("_", " ")
    placement = (
        scheduler_pb2.PlacementRule.Name(policy.placement).removeprefix("PLACEMENT_RULE_").lower().replace("_", " ")
    )
    return list(engines.engines), f"{ordering}, {placement}, migrate {policy.migrate}, preempt {policy.preempt}"
