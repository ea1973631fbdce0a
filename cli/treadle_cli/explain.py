"""Run `treadle explain`: the time of a trajectory, the decisions about it, and its end under other
policies.

Of a mesh, the ledger and the decisions of the trajectory are read with the recorded steps of its
whole rollout; of a trace file, the rollout is simulated. The simulator then plays the rollout under
each policy.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import typer
from rich.console import Console
from rich.table import Table
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle.types import seconds, words_of
from treadle_core.controller import Controller
from treadle_core.model import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    LEDGER_PARTS,
    DecodeCurve,
    Ledger,
    Ordering,
    PlacementRule,
    Policy,
)
from treadle_core.state import Decision
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.outcome import Outcome
from treadle_sim.predictors import make_predictor
from treadle_sim.systems import STICKY, TREADLE, VERL, System, choose_cluster
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload

from treadle_cli import exits
from treadle_cli.exits import Terminal, UsageProblem, cell, printable
from treadle_cli.mesh.scheduler import reach_scheduler
from treadle_cli.options import (
    DEFAULT_SCHEDULER,
    Accelerator,
    AsJson,
    Gpus,
    Llm,
    Profile,
    Scheduler,
    SimulatedSlots,
    print_json,
)
from treadle_cli.simulate.request import Request, make_plan

MEANINGS = {
    "held_s": "a step waited in the scheduler for room or an engine",
    "queue_s": "a step waited at its engine before it first ran",
    "prefill_s": "an engine read the context",
    "decode_s": "an engine sampled tokens",
    "preempted_s": "a step was evicted until it ran again",
    "move_s": "a step waited until its KV had moved",
    "tool_s": "a tool ran between two steps",
    "weights_s": "a step waited as engines loaded weights",
    "control_s": "calls, the bus, and the client's own work",
}
SIMULATED = (
    "Simulated (docs/simulator.md): the recorded steps and tools of the rollout, all "
    "trajectories begun at once."
)
LEAST_SHOWN_S = 5e-4
_DECISION = ("kind", "engine_id", "reason")
FCFS = System(
    "fcfs",
    "first come, first served: trajectories in the order of opening, on the least loaded engine",
    Policy(ordering=Ordering.FCFS, placement=PlacementRule.STICKY, migrate=False, preempt=False),
)
POLICIES = (FCFS, STICKY, VERL, TREADLE)
PREDICTOR = "siblings"  # of Treadle: what the product's estimator learns while the rollout runs
MOST_REPLAYED = 4_096  # trajectories, which takes about a minute
CALL_S = 10.0
MOST_CALLS = 16  # most requests at once
PAGE = 1_000
UNKNOWN_KV_TOKENS = 1 << 30  # where an engine does not report what it holds: room for all
TOOL_S = 1e-3  # between two steps less is no tool call: a long turn continues in another call
STATES = words_of(pb.TrajectoryState)


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
            print_json(explanation.as_json())
        else:
            explanation.print(Terminal())
        return 0

    exits.run(run)


@dataclass(frozen=True, slots=True)
class Fate:
    """The seconds from the start of the rollout to the end of the trajectory, and of the rollout,
    under a policy."""

    policy: str
    title: str
    trajectory_s: float
    rollout_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Account of the time of one trajectory, with reasons.

    about: one line that names the trajectory. left: names the time that the ledger does not have.
    recorded: the time as it was; None where all of it is simulated. notes: what a reader must know.
    """

    trajectory_id: str
    about: str
    ledger: Ledger
    wall_s: float
    left: str
    decisions: Sequence[Decision]
    opened_s: float  # time on the clock of the decisions
    recorded: Fate | None
    policies: Sequence[Fate]
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {
            "trajectory_id": self.trajectory_id,
            "about": self.about,
            "wall_s": self.wall_s,
            "ledger": asdict(self.ledger),
            "left_s": self.wall_s - self.ledger.total_s,
            "left": self.left,
            "decisions": [
                {
                    "at_s": each.now_s - self.opened_s,
                    **{name: getattr(each, name) for name in _DECISION},
                }
                for each in self.decisions
            ],
            "recorded": asdict(self.recorded) if self.recorded is not None else None,
            "simulated": [asdict(fate) for fate in self.policies],
            "notes": list(self.notes),
        }

    def print(self, out: Console) -> None:
        """Print the explanation to a terminal."""
        about = printable(f"{self.trajectory_id}: {self.about}")
        out.print(about, style="bold", highlight=False, markup=False)
        out.print()
        out.print(self._ledger_table())
        if self.decisions:
            out.print()
            out.print(self._decision_table())
        if self.policies:
            out.print()
            out.print(self._policy_table())
        for note in (*([SIMULATED] if self.policies else []), *self.notes):
            out.print(printable(note), style="dim", highlight=False, markup=False)

    def _ledger_table(self) -> Table:
        table = _table("part", "seconds", "share", "")
        for name in LEDGER_PARTS:
            spent_s = getattr(self.ledger, name)
            table.add_row(name.removesuffix("_s"), *self._share(spent_s), MEANINGS[name])
        left_s = self.wall_s - self.ledger.total_s
        if abs(left_s) >= LEAST_SHOWN_S:
            table.add_row("", *self._share(left_s), cell(self.left))
        table.add_row("all", *self._share(self.wall_s), "", style="bold")
        return table

    def _share(self, spent_s: float) -> tuple[str, str]:
        return f"{spent_s:.3f}", f"{spent_s / self.wall_s:.1%}" if self.wall_s else ""

    def _decision_table(self) -> Table:
        table = _table("at", "decision", "engine", "")
        for each in self.decisions:
            told = map(cell, (each.kind, each.engine_id, each.reason))
            table.add_row(f"{each.now_s - self.opened_s:.3f}", *told)
        return table

    def _policy_table(self) -> Table:
        table = _table("policy", "this one ends", "the rollout ends", "")
        for fate in (*([self.recorded] if self.recorded is not None else []), *self.policies):
            ends = f"{fate.trajectory_s:.2f} s", f"{fate.rollout_s:.2f} s"
            table.add_row(cell(fate.policy), *ends, cell(fate.title))
        return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        numeric = name in ("seconds", "share", "at", "this one ends", "the rollout ends")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric)
    return table


def play(system: System, workload: Workload, cluster: Cluster) -> tuple[Outcome, Controller]:
    """Simulate the rollout under a policy; return its outcome, and the controller that decided."""
    predictor = make_predictor(PREDICTOR, workload) if system is TREADLE else None
    driver = Driver(
        # The controller keeps what it decided about a trajectory for as long as it keeps the
        # trajectory.
        *(
            workload,
            cluster,
            system.policy,
            replace(system.tuning, keep_closed_s=math.inf),
            predictor,
        ),
        call_tokens=system.call_tokens,
        paced=system.paced,
    )
    return driver.run(), driver.controller


def compare(works: Sequence[TrajectoryWork], cluster: Cluster, index: int) -> list[Fate]:
    """Return what each policy makes of the trajectory `index` of a rollout."""
    workload = Workload("recorded", tuple(works))
    return [_fate(system, play(system, workload, cluster)[0], index) for system in POLICIES]


def explain_trace(name: str, request: Request) -> Explanation:
    """Explain a trajectory of a trace file, which has no times but those of tools: all of it is
    simulated. name: as in PROMPT#SAMPLE. Raises UsageProblem."""
    plan = make_plan(replace(request, systems=TREADLE.name))
    works = plan.settings[0].workload.trajectories
    found = [
        at
        for at, work in enumerate(works)
        if name in (f"{work.prompt_id}#{work.sample}", work.prompt_id)
    ]
    if not found:
        raise UsageProblem(
            f"ID: {request.workload} has no trajectory {name!r}; name it PROMPT#SAMPLE"
        )
    index, cluster = found[0], choose_cluster(TREADLE, plan.settings[0])
    outcome, controller = play(TREADLE, plan.settings[0].workload, cluster)
    trajectory_id, work = f"t{index}", works[index]
    return Explanation(
        trajectory_id=f"{work.prompt_id}#{work.sample}",
        about=f"{len(work.steps)} turns, {work.gen_tokens} tokens; as simulated under Treadle on "
        f"{cluster.describe()}",
        ledger=outcome.ledgers[index],
        wall_s=outcome.times[index].finished_s,
        left="lost by the simulator",
        decisions=controller.history(trajectory_id)[0],
        opened_s=0.0,
        recorded=None,
        policies=[
            *(
                _fate(system, play(system, plan.settings[0].workload, cluster)[0], index)
                for system in POLICIES[:-1]
            ),
            _fate(TREADLE, outcome, index),
        ],
    )


def _fate(system: System, outcome: Outcome, index: int) -> Fate:
    return Fate(system.name, system.title, outcome.times[index].finished_s, outcome.makespan_s)


async def explain_live(trajectory_id: str, scheduler: str, progress: Console) -> Explanation:
    """Explain a trajectory of the mesh at `scheduler`. Raises TreadleError, UsageProblem."""
    async with reach_scheduler(scheduler) as stub:
        response = await _history(stub, trajectory_id)
        rollout = (
            await _rollout(stub, response.trajectory.rollout_id)
            if response.trajectory.rollout_id
            else [response]
        )
        engines = (await stub.ListEngines(pb.ListEnginesRequest(), timeout=CALL_S)).engines
    with progress.status("playing the rollout under other policies"):
        return await asyncio.to_thread(
            _explain, response, rollout, [engine.info for engine in engines]
        )


async def _history(
    stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub, trajectory_id: str
) -> pb.GetTrajectoryResponse:
    request = pb.GetTrajectoryRequest(trajectory_id=trajectory_id, history=True)
    return await stub.GetTrajectory(request, timeout=CALL_S)


async def _rollout(
    stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub, rollout_id: str
) -> list[pb.GetTrajectoryResponse]:
    """Return all trajectories of a rollout that the scheduler still knows, in the order of opening;
    none where there are more than MOST_REPLAYED."""
    names: list[str] = []
    request = pb.ListTrajectoriesRequest(rollout_id=rollout_id, page_size=PAGE)
    while True:
        page = await stub.ListTrajectories(request, timeout=CALL_S)
        names += [each.trajectory_id for each in page.trajectories]
        request.page_token = page.next_page_token
        if len(names) > MOST_REPLAYED:
            return []
        if not request.page_token:
            break
    turns, known = asyncio.Semaphore(MOST_CALLS), dict[str, pb.GetTrajectoryResponse]()

    async def read(name: str) -> None:
        async with turns:
            try:
                known[name] = await _history(stub, name)
            except grpc.aio.AioRpcError as failure:
                if failure.code() is not grpc.StatusCode.NOT_FOUND:  # forgotten meanwhile
                    raise

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(read(name))
    return [known[name] for name in names if name in known]


def _explain(
    response: pb.GetTrajectoryResponse,
    rollout: Sequence[pb.GetTrajectoryResponse],
    infos: Sequence[engine_pb2.EngineInfo],
) -> Explanation:
    t = response.trajectory
    is_open = not t.HasField("closed_at")
    opened_s = t.opened_at.ToNanoseconds() / 1e9
    begun = [each for each in rollout if each.trajectory.gen_tokens]
    names = [each.trajectory.trajectory_id for each in begun]
    notes, policies, recorded = [], list[Fate](), None
    if not rollout:
        notes.append(
            f"The rollout has more than {MOST_REPLAYED} trajectories, and is not played under "
            "other policies."
        )
    elif t.trajectory_id not in names:
        notes.append(
            "It has sampled nothing yet, so there is nothing to play under other policies."
        )
    elif not infos:
        notes.append("No engine is registered, so the rollout is not played under other policies.")
    else:
        index = names.index(t.trajectory_id)
        began_s = min(each.trajectory.opened_at.ToNanoseconds() / 1e9 for each in begun)
        ends_s = [_end_s(each) - began_s for each in begun]
        until = (
            "as it was"
            if all(each.trajectory.HasField("closed_at") for each in begun)
            else "until now"
        )
        recorded = Fate("recorded", until, ends_s[index], max(ends_s))
        policies = compare(
            [_work(each) for each in begun], Cluster(tuple(map(_model, infos))), index
        )
    state = "open" if is_open else STATES.get(t.state, "closed")
    return Explanation(
        trajectory_id=t.trajectory_id,
        about=f"sample {t.sample} of {t.prompt_id}, {state}; {t.next_turn} steps, {t.gen_tokens} "
        "tokens",
        ledger=Ledger(
            **{name: seconds(getattr(t.ledger, name.removesuffix("_s"))) for name in LEDGER_PARTS}
        ),
        wall_s=seconds(t.ledger.wall),
        left=_left(t, is_open),
        decisions=[_decision(each, opened_s) for each in response.decisions],
        opened_s=opened_s,
        recorded=recorded,
        policies=policies,
        notes=notes,
    )


def _left(t: pb.Trajectory, is_open: bool) -> str:
    if not is_open:
        return "not measured"
    if t.state == pb.TRAJECTORY_STATE_STEPPING:
        return f"not accounted for yet: a step is on {t.engine_id}"
    return "not accounted for yet: since the last step"


def _end_s(response: pb.GetTrajectoryResponse) -> float:
    t = response.trajectory
    return t.opened_at.ToNanoseconds() / 1e9 + seconds(t.ledger.wall)


def _decision(message: pb.Decision, opened_s: float) -> Decision:
    at_s = opened_s + seconds(message.since_opening)
    return Decision(at_s, message.kind, message.engine_id, "{}", (message.reason,))


def _work(response: pb.GetTrajectoryResponse) -> TrajectoryWork:
    """Return the recorded steps, those of one long turn together. What came before a restart of the
    scheduler is one step."""
    t, steps = response.trajectory, list(response.steps)
    found: list[Step] = []
    unknown = t.gen_tokens - sum(step.output_tokens for step in steps)
    rest_s = max(0.0, seconds(t.ledger.tool) - sum(seconds(step.tool_time) for step in steps))
    if unknown > 0:
        first = steps[0].context_tokens if steps else t.context_tokens
        before_s = seconds(steps[0].tool_time) if steps else 0.0
        found.append(Step(unknown, max(0, first - t.prompt_tokens - unknown), before_s + rest_s))
        rest_s = 0.0
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        observed, tool_s = 0, rest_s
        if following is not None:
            observed = max(0, following.context_tokens - step.context_tokens - step.output_tokens)
            tool_s = seconds(following.tool_time)
        found.append(Step(step.output_tokens, observed, tool_s))
    merged = [found[0]]
    for each in found[1:]:
        last = merged[-1]
        if last.obs_tokens == 0 and last.tool_s < TOOL_S:
            merged[-1] = Step(last.gen_tokens + each.gen_tokens, each.obs_tokens, each.tool_s)
        else:
            merged.append(each)
    return TrajectoryWork(t.prompt_id, t.sample, t.prompt_tokens, tuple(merged))


def _model(info: engine_pb2.EngineInfo) -> EngineModel:
    """Return the model of an engine from its registration, with a straight line as its curve."""
    curve, slots = info.decode_curve, max(1, info.slot_limit)
    if curve.base_s + curve.per_sequence_s <= 0:
        curve = engine_pb2.DecodeCurve(
            base_s=DecodeCurve().base_s, per_sequence_s=DecodeCurve().per_sequence_s
        )
    batches = (1.0, float(slots)) if slots > 1 else (1.0,)
    return EngineModel(
        llm=info.model,
        accelerator=info.hardware_tags[0] if info.hardware_tags else "engine",
        gpus=max(1, info.tensor_parallel),
        slots=slots,
        kv_tokens=info.kv_tokens_capacity or UNKNOWN_KV_TOKENS,
        kv_bytes_per_token=info.kv_bytes_per_token,
        curve=StepCurve(
            batch_sizes=batches,
            step_s=tuple(curve.base_s + curve.per_sequence_s * batch for batch in batches),
            per_kv_token_s=curve.per_kv_token_s,
            prefill_fixed_s=0.0,
            prefill_token_s=1.0 / (curve.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S),
            prefill_pair_s=curve.prefill_pair_s,
        ),
        host_kv_tokens=info.host_kv_tokens,
    )
