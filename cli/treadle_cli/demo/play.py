"""Play the demo's work once on a mesh, and keep the results.

`treadle demo` calls `play` for each arm and epoch; `treadle rollout` (`run_attached`) calls it once
on a mesh that already runs, under whatever policy it has.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from rich.console import Console
from treadle import Client, Prompt, RolloutEvent, Sampling, Timeouts
from treadle.environments import Chat, EnvManager
from treadle.scheduler.v1 import scheduler_pb2

from treadle_cli.demo.agents import ANSWER_TOKENS, DemoEnvironment
from treadle_cli.demo.chatml import read_chat
from treadle_cli.demo.collect import CollectedFacts, collect_facts, trajectory_records
from treadle_cli.demo.live import LiveBoard
from treadle_cli.demo.tasks import make_prompts
from treadle_cli.exits import UsageProblem
from treadle_cli.report.page import render_run
from treadle_cli.report.records import PlayRecord, Run, RunRecord, TrajectoryRecord, write_run
from treadle_cli.scheduler import reach_scheduler

CLEANUP_S = 2.0  # after Ctrl-C the mesh ends too: no need to close every trajectory
ASK_TIMEOUT_S = 10.0
ARM = "rollout"


def time_stamp() -> str:
    """Return the time now, in the form of a run's record."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@dataclass(frozen=True)
class Work:
    """Work to play, from the command's options. tool_latency_s: see DemoEnvironment. job, weight:
    see Client."""

    prompts: int
    samples: int
    seed: int
    tool_latency_s: float
    job: str = ""
    weight: float | None = None


@dataclass(frozen=True)
class Played:
    """Results of a play. started_s: unix time. failed_migrations: one line each, with the
    reason."""

    started_s: float
    records: list[TrajectoryRecord]
    failed_migrations: tuple[str, ...]

    @property
    def makespan_s(self) -> float:
        """Return the seconds from the start to the end of the last trajectory."""
        return max(record.finished_s for record in self.records)


async def play(
    scheduler: str,
    nats_url: str,
    arm: str,
    work: Work,
    chat: Chat,
    prompts: Sequence[Prompt],
    display: LiveBoard,
    epoch: int = 0,
) -> Played:
    """Run all samples of all prompts at once and show them. nats_url: where it is empty, migrations
    do not show.

    arm, epoch: what the records carry. Raises TreadleError where the rollout cannot be made.
    """
    opened_s: dict[tuple[str, int], float] = {}

    def on_event(event: RolloutEvent) -> None:
        if event.kind == "opened":
            opened_s[event.prompt_id, event.sample] = event.time_s
        display.on_event(event)

    collecting = (
        collect_facts(nats_url, display.note)
        if nats_url
        else contextlib.nullcontext(CollectedFacts())
    )
    client = Client(
        scheduler, timeouts=Timeouts(cleanup_s=CLEANUP_S), job=work.job, weight=work.weight
    )
    async with collecting as facts, client, display:
        started_s = time.time()
        environment = DemoEnvironment([prompt.data for prompt in prompts], work.tool_latency_s)
        most_turns = max(prompt.data.turns for prompt in prompts)
        # How a turn is sampled depends on the turn: the environment decides it.
        manager = EnvManager(
            client,
            environment,
            chat=chat,
            sampling=Sampling(max_new_tokens=ANSWER_TOKENS),
            most_turns=most_turns,
        )
        rollout = await client.rollout(
            prompts, manager, samples_per_prompt=work.samples, on_event=on_event
        )
    tasks = {prompt.id: str(prompt.data.kind) for prompt in prompts}
    records = trajectory_records(
        arm, epoch, started_s, rollout.trajectories, opened_s, tasks, facts
    )
    return Played(started_s, records, facts.failed_migrations())


def report_run(folder: Path, run: Run, console: Console) -> int:
    """Write the run's files and draw its report; return the exit code of the command: 1 where a
    trajectory failed."""
    write_run(folder, run)
    render_run(folder, console)
    return 1 if any(trajectory.outcome == "failed" for trajectory in run.trajectories) else 0


async def run_attached(
    scheduler: str, nats_url: str, model_path: str, work: Work, folder: Path, console: Console
) -> int:
    """Run the work once, draw the report in `folder`, and return the exit code. model_path: holds
    the tokenizer."""
    chat = read_chat(model_path)
    engines, policy = await _ask(scheduler)
    if not engines:
        raise UsageProblem(
            f"the scheduler at {scheduler} has no engine: start a sidecar that names it"
        )
    prompts = make_prompts(chat, work.prompts, work.seed)
    sidecars = {engine.info.engine_id: engine.info.address for engine in engines}
    started_at = time_stamp()
    display = LiveBoard(console, ARM, prompts, work.samples, sidecars)
    played = await play(scheduler, nats_url, ARM, work, chat, prompts, display)
    record = RunRecord(
        run_id=folder.name,
        started_at=started_at,
        seed=work.seed,
        model=engines[0].info.model,
        engines=tuple(sidecars),
        slots=engines[0].info.slot_limit,
        machine=f"mesh at {scheduler}",
        conditions=(
            "One rollout on a mesh that was running before; its caches and its predictor may be "
            "warm.",
        ),
        plays=(
            PlayRecord(
                ARM,
                "Rollout",
                policy,
                played.makespan_s,
                failed_migrations=played.failed_migrations,
            ),
        ),
    )
    return report_run(folder, Run(record, tuple(played.records)), console)


async def _ask(scheduler: str) -> tuple[list[scheduler_pb2.RegisteredEngine], str]:
    """Return the engines of the mesh, and its policy in words."""
    async with reach_scheduler(scheduler) as stub:
        try:
            engines = await stub.ListEngines(
                scheduler_pb2.ListEnginesRequest(), timeout=ASK_TIMEOUT_S
            )
            policy = (
                await stub.GetPolicy(scheduler_pb2.GetPolicyRequest(), timeout=ASK_TIMEOUT_S)
            ).policy
        except grpc.aio.AioRpcError as error:
            raise UsageProblem(
                f"the scheduler at {scheduler} does not answer: {error.details()}"
            ) from error
    ordering = scheduler_pb2.Ordering.Name(policy.ordering).removeprefix("ORDERING_")
    placement = scheduler_pb2.PlacementRule.Name(policy.placement).removeprefix("PLACEMENT_RULE_")
    words = f"{ordering}, {placement}".lower().replace("_", " ")
    return list(engines.engines), f"{words}, migrate {policy.migrate}, preempt {policy.preempt}"
