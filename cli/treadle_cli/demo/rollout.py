"""Play the demo's work once on a mesh, show it while it runs, and keep the results.

`treadle demo` calls `play` for each arm and epoch; `treadle rollout` (`run_attached`) calls it once
on a mesh that already runs, under whatever policy it has. On a terminal the display redraws in
place, otherwise it prints a line every few seconds. Nothing waits for it.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from treadle import Client, Prompt, RolloutEvent, Sampling, Timeouts
from treadle.certificates import open_channel
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc
from treadle.environments import Chat, EnvManager
from treadle.scheduler.v1 import scheduler_pb2

from treadle_cli.demo.agents import ANSWER_TOKENS, DemoEnvironment, make_prompts, read_chat
from treadle_cli.demo.collect import CollectedFacts, collect_facts, trajectory_records
from treadle_cli.exits import UsageProblem, cell, printable
from treadle_cli.mesh.mesh import Board
from treadle_cli.mesh.scheduler import own_certificates, reach_scheduler
from treadle_cli.report.drawing import render_run
from treadle_cli.report.records import PlayRecord, Run, RunRecord, TrajectoryRecord, write_run

POLL_S = 1.0  # between requests to the sidecars
POLL_TIMEOUT_S = 2.0
LEAST_PART_FOR_ESTIMATE = 0.1  # share of turns: before that an estimate of the time left is a guess
PLAIN_LINE_S = 10.0  # between lines where there is no terminal
CLEANUP_S = 2.0  # after Ctrl-C the mesh ends too: no need to close every trajectory
CALL_S = 10.0
ARM = "rollout"


class LiveBoard(Board):
    """Display of one rollout, an async context manager, which passes its events to `on_event`."""

    def __init__(
        self,
        console: Console,
        title: str,
        prompts: Sequence[Prompt],
        samples: int,
        sidecars: Mapping[str, str],
    ) -> None:
        super().__init__(console)
        self._title, self._total, self._sidecars = title, len(prompts) * samples, sidecars
        self._turn_limits = {prompt.id: prompt.data.turns for prompt in prompts}
        columns = (
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
        )
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._bar = self._progress.add_task(title, total=self._total, left="")
        self._loads: dict[str, engine_pb2.Load | None] = {}
        self._tokens: dict[str, int] = {}
        self._part_done: dict[tuple[str, int], float] = {}
        self._closed = 0
        self._started_s = time.monotonic()
        self._live = Live(get_renderable=self._picture, console=console, refresh_per_second=4)

    async def __aenter__(self) -> Self:
        self._started_s = time.monotonic()
        if self.console.is_terminal:
            self._live.start()
        self._polling = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._polling.cancel()
        await asyncio.wait([self._polling])
        if self.console.is_terminal:
            self._live.stop()
        elif kind is None:
            self._print_line()

    def on_event(self, event: RolloutEvent) -> None:
        """Update the display from an event of the client."""
        if event.trajectory_id:
            self._tokens[event.trajectory_id] = event.gen_tokens
        if event.kind == "settled":
            return
        closed = event.kind == "closed"
        turns_done = event.turns / self._turn_limits[event.prompt_id]
        self._part_done[event.prompt_id, event.sample] = 1.0 if closed else min(turns_done, 0.99)
        self._closed += closed
        self._progress.update(self._bar, completed=self._closed, left=self._left())

    def _left(self) -> str:
        """Return the time left, roughly an upper bound: as if every trajectory used all its
        turns."""
        part = sum(self._part_done.values()) / self._total
        if part < LEAST_PART_FOR_ESTIMATE:
            return ""
        left_s = (time.monotonic() - self._started_s) * (1 - part) / part
        return f"about {left_s:.0f} s left"

    def _picture(self) -> Group:
        return Group(
            self._progress,
            *[Text.assemble("  ", figure, style="dim") for figure in self._figures()],
        )

    def _figures(self) -> list[Text]:
        tokens = sum(self._tokens.values())
        tokens_per_s = tokens / max(time.monotonic() - self._started_s, 1e-3)
        return [Text(f"{tokens} tokens, {tokens_per_s:.0f} tok/s")] + [
            Text.assemble(f"{printable(engine_id)} ", ("lost", "red"))
            if load is None
            else cell(
                f"{engine_id} {load.running_steps}/{load.slot_limit} running, "
                f"{load.waiting_steps} waiting"
            )
            for engine_id, load in self._loads.items()
        ]

    def _print_line(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        engines = " · ".join(figure.plain for figure in self._figures())
        line = (
            f"{self._title}: {self._closed}/{self._total} trajectories after {elapsed_s:.0f} "
            f"s; {engines}"
        )
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    async def _poll(self) -> None:
        """Request the sidecars' loads until cancelled."""
        printed_s = time.monotonic()
        certificates = own_certificates()
        channels = {
            name: open_channel(at, "sidecar", certificates) for name, at in self._sidecars.items()
        }
        try:
            while True:
                for engine_id, channel in channels.items():
                    self._loads[engine_id] = await _load(channel)
                if not self.console.is_terminal and time.monotonic() - printed_s >= PLAIN_LINE_S:
                    printed_s = time.monotonic()
                    self._print_line()
                await asyncio.sleep(POLL_S)
        finally:
            for channel in channels.values():
                await channel.close()


async def _load(channel: grpc.aio.Channel) -> engine_pb2.Load | None:
    """Return the load of an engine; None where it or its sidecar is gone."""
    stub = engine_pb2_grpc.EngineServiceStub(channel)
    try:
        answer = await stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=POLL_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    load: engine_pb2.Load = answer.load
    return load if load.engine_healthy else None


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
    engines, policy = await _read_mesh(scheduler)
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


async def _read_mesh(scheduler: str) -> tuple[list[scheduler_pb2.RegisteredEngine], str]:
    """Return the engines of the mesh, and its policy in words."""
    async with reach_scheduler(scheduler) as stub:
        try:
            engines = await stub.ListEngines(scheduler_pb2.ListEnginesRequest(), timeout=CALL_S)
            policy = (await stub.GetPolicy(scheduler_pb2.GetPolicyRequest(), timeout=CALL_S)).policy
        except grpc.aio.AioRpcError as error:
            raise UsageProblem(
                f"the scheduler at {scheduler} does not answer: {error.details()}"
            ) from error
    ordering = scheduler_pb2.Ordering.Name(policy.ordering).removeprefix("ORDERING_")
    placement = scheduler_pb2.PlacementRule.Name(policy.placement).removeprefix("PLACEMENT_RULE_")
    words = f"{ordering}, {placement}".lower().replace("_", " ")
    return list(engines.engines), f"{words}, migrate {policy.migrate}, preempt {policy.preempt}"
