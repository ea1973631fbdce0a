"""Read from a mesh the ledger and the decisions of a trajectory, and the recorded steps of its
whole rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
from rich.console import Console
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle.types import seconds, words_of
from treadle_core.model import DEFAULT_PREFILL_TOKENS_PER_S, LEDGER_PARTS, DecodeCurve, Ledger
from treadle_core.state import Decision
from treadle_sim.cluster import Cluster
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.workloads.workload import Step, TrajectoryWork

from treadle_cli.explain.explanation import Explanation, Fate
from treadle_cli.explain.replay import MOST_REPLAYED, compare
from treadle_cli.scheduler import reach_scheduler

CALL_S = 10.0
MOST_CALLS = 16  # most requests at once
PAGE = 1_000
UNKNOWN_KV_TOKENS = 1 << 30  # where an engine does not report what it holds: room for all
TOOL_S = 1e-3  # between two steps less is no tool call: a long turn continues in another call
STATES = words_of(pb.TrajectoryState)


async def explain_live(trajectory_id: str, scheduler: str, progress: Console) -> Explanation:
    """Explain a trajectory of the mesh at `scheduler`. Raises TreadleError, UsageProblem."""
    async with reach_scheduler(scheduler) as stub:
        asked = await _history(stub, trajectory_id)
        rollout = (
            await _rollout(stub, asked.trajectory.rollout_id)
            if asked.trajectory.rollout_id
            else [asked]
        )
        engines = (await stub.ListEngines(pb.ListEnginesRequest(), timeout=CALL_S)).engines
    with progress.status("playing the rollout under other policies"):
        return await asyncio.to_thread(
            _explain, asked, rollout, [engine.info for engine in engines]
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

    async def ask(name: str) -> None:
        async with turns:
            try:
                known[name] = await _history(stub, name)
            except grpc.aio.AioRpcError as failure:
                if failure.code() is not grpc.StatusCode.NOT_FOUND:  # forgotten meanwhile
                    raise

    async with asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(ask(name))
    return [known[name] for name in names if name in known]


def _explain(
    asked: pb.GetTrajectoryResponse,
    rollout: Sequence[pb.GetTrajectoryResponse],
    infos: Sequence[engine_pb2.EngineInfo],
) -> Explanation:
    t = asked.trajectory
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
        decisions=[_decision(each, opened_s) for each in asked.decisions],
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


def _end_s(said: pb.GetTrajectoryResponse) -> float:
    t = said.trajectory
    return t.opened_at.ToNanoseconds() / 1e9 + seconds(t.ledger.wall)


def _decision(message: pb.Decision, opened_s: float) -> Decision:
    at_s = opened_s + seconds(message.since_opening)
    return Decision(at_s, message.kind, message.engine_id, "{}", (message.reason,))


def _work(said: pb.GetTrajectoryResponse) -> TrajectoryWork:
    """Return the recorded steps, those of one long turn together. What came before a restart of the
    scheduler is one step."""
    t, steps = said.trajectory, list(said.steps)
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
