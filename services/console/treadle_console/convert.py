"""Convert facts to calls of `Mesh`, and answers of the other services to what a page shows.

Other programs chose what a fact or an answer names (ids, tools, reasons): it stays text, here and
in the page.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from treadle.common.v1.estimate_pb2 import Quantiles
from treadle.rollout.v1 import rollout_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.telemetry.v1 import facts_pb2
from treadle.tools.v1 import tools_pb2
from treadle.types import words_of
from treadle_runtime.fields import seconds

from treadle_console.state import Mesh

LEDGER_PARTS = (
    "held",
    "queue",
    "prefill",
    "decode",
    "preempted",
    "move",
    "tool",
    "weights",
    "control",
)
OUTCOMES: Mapping[int, str] = words_of(pb.Outcome)
POLICY_WORDS = {
    "ordering": words_of(pb.Ordering),
    "objective": words_of(pb.Objective),
    "placement": words_of(pb.PlacementRule),
}


def take_fact(mesh: Mesh, fact: facts_pb2.Fact) -> None:
    """Apply a fact to the mesh; a kind that the page does not show changes nothing."""
    take = _TAKES.get(fact.WhichOneof("fact") or "")
    if take is not None:
        take(mesh, milliseconds(fact.time), fact)


def to_json(value: dict[str, Any]) -> str:
    """Return JSON for a page. A number that JSON does not know, such as a NaN from elsewhere,
    becomes null."""
    dump = partial(json.dumps, allow_nan=False, separators=(",", ":"))
    try:
        return dump(value)
    except ValueError:
        return dump(_without_nan(value))


def _without_nan(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: _without_nan(each) for name, each in value.items()}
        case list() | tuple():
            return list(map(_without_nan, value))
    return value


def milliseconds(message: Duration | Timestamp) -> int:
    """Return the milliseconds of a Duration, or those since the epoch of a Timestamp."""
    return round(1e3 * seconds(message))


def _opened(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said = fact.trajectory_opened
    mesh.trajectory_opened(now_ms, said.trajectory_id, said.prompt_id, said.sample, said.rollout_id)


def _closed(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said = fact.trajectory_closed
    ledger_s = ledger_of(said.ledger)
    outcome = OUTCOMES.get(said.outcome, "failed")
    names = (said.prompt_id, said.sample, said.rollout_id)
    mesh.trajectory_closed(
        now_ms, said.trajectory_id, names, outcome, said.gen_tokens, said.turns, ledger_s
    )


def _predicted(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said = fact.trajectory_predicted
    mesh.trajectory_predicted(
        now_ms, said.trajectory_id, said.turn, _quantiles(said.remaining_tokens)
    )


def _queued(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said, step = fact.step_queued, fact.step_queued.step
    mesh.step_queued(now_ms, step.trajectory_id, step.ticket_id, step.engine_id, said.priority)


def _started(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said, step = fact.step_started, fact.step_started.step
    waited_ms = milliseconds(said.queue_time)
    mesh.step_started(now_ms, step.trajectory_id, step.ticket_id, step.engine_id, waited_ms)


def _preempted(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said = fact.step_preempted
    mesh.step_preempted(now_ms, said.step.trajectory_id, said.output_tokens, said.by_ticket_id)


def _finished(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said, step = fact.step_finished, fact.step_finished.step
    ended_ms = (
        milliseconds(said.timing.finished_at) if said.timing.HasField("finished_at") else now_ms
    )
    read_ms = milliseconds(said.timing.prefill)
    mesh.step_finished(ended_ms, step.trajectory_id, step.turn, said.output_tokens, read_ms)


def _tool_started(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    mesh.tool_started(now_ms, fact.tool_started.trajectory_id, fact.tool_started.tool)


def _tool_finished(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said, timing = fact.tool_finished, fact.tool_finished.timing
    ok = said.status == tools_pb2.RESULT_STATUS_OK
    parts = (seconds(part) for part in (timing.queue, timing.overhead, timing.execution))
    mesh.tool_finished(now_ms, said.trajectory_id, said.tool, ok, *parts)


def _moved(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said = fact.migration_ended
    began_ms = milliseconds(said.started_at) if said.HasField("started_at") else 0
    ends = (said.source_engine_id, said.target_engine_id)
    reason = said.failure_reason.lower().replace("_", " ")
    mesh.migration_ended(
        now_ms, said.trajectory_id, *ends, said.moved, reason, said.prefix_tokens, began_ms
    )


def _joined(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    mesh.engine_joined(now_ms, fact.engine_joined.info.engine_id, fact.engine_joined.info.model)


def _lost(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    mesh.engine_lost(now_ms, fact.engine_lost.engine_id, fact.engine_lost.reason)


def _weights(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    mesh.weights_updated(
        now_ms, fact.weights_updated.engine_id, fact.weights_updated.weight_version
    )


def _settled(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    mesh.group_settled(now_ms, fact.group_settled.rollout_id, fact.group_settled.prompt_id)


def _planned(mesh: Mesh, now_ms: int, fact: facts_pb2.Fact) -> None:
    said = fact.plan_made
    engines = [
        {
            "id": each.engine_id,
            "trajectories": each.trajectories,
            "predicted_s": seconds(each.predicted_time),
        }
        for each in said.engines
    ]
    plan = {
        "trajectories": said.trajectories,
        "makespan_s": seconds(said.predicted_makespan),
        "bound_s": seconds(said.lower_bound),
        "solve_s": seconds(said.solve_time),
        "engines": engines,
    }
    mesh.plan_made(now_ms, plan)


_TAKES: dict[str, Callable[[Mesh, int, facts_pb2.Fact], None]] = {
    "trajectory_opened": _opened,
    "trajectory_closed": _closed,
    "trajectory_predicted": _predicted,
    "step_queued": _queued,
    "step_started": _started,
    "step_preempted": _preempted,
    "step_finished": _finished,
    "tool_started": _tool_started,
    "tool_finished": _tool_finished,
    "migration_ended": _moved,
    "engine_joined": _joined,
    "engine_lost": _lost,
    "weights_updated": _weights,
    "group_settled": _settled,
    "plan_made": _planned,
}
KINDS = tuple(_TAKES)


def engine_view(engine: pb.RegisteredEngine) -> dict[str, Any]:
    """Return an engine's row in the table of engines."""
    info, load = engine.info, engine.load
    return {
        "id": info.engine_id,
        "address": info.address,
        "model": info.model,
        "version": load.weight_version or info.weight_version,
        "slots": load.slot_limit or info.slot_limit,
        "running": load.running_steps,
        "waiting": load.waiting_steps,
        "kv_used": load.kv_tokens_used,
        "kv_capacity": load.kv_tokens_capacity or info.kv_tokens_capacity,
        "tokens_per_s": round(load.decode_tokens_per_s, 1),
        "oldest_wait_s": round(load.oldest_wait_s, 1),
        "healthy": load.engine_healthy,
        "measured": load.HasField("measured_at"),
        "paused": load.paused,
        "asleep": list(load.asleep_tags),
        "trajectories": engine.trajectories,
        "draining": engine.draining,
        "empty": not (engine.trajectories or load.running_steps or load.waiting_steps),
        "accelerators": info.tensor_parallel,
        "tags": list(info.hardware_tags),
    }


def job_view(job: pb.JobUse) -> dict[str, Any]:
    """Return a job's row in the table of jobs."""
    numbers = (
        "weight",
        "clients",
        "share",
        "live_tickets",
        "kv_tokens",
        "open_trajectories",
        "waiting_steps",
    )
    return {"job": job.job, **{name: getattr(job, name) for name in numbers}}


def policy_view(policy: pb.Policy) -> dict[str, Any]:
    """Return a policy in words."""
    words = {name: known.get(getattr(policy, name), "") for name, known in POLICY_WORDS.items()}
    return words | {name: getattr(policy, name) for name in ("migrate", "preempt", "reserve")}


def weights_view(weights: pb.Weights) -> dict[str, Any]:
    """Return the desired weights, and the state of each engine's weights."""
    states = words_of(pb.WeightsState)
    engines = [
        {"id": each.engine_id, "state": states.get(each.state, ""), "error": each.error}
        for each in weights.engines
    ]
    return {"version": weights.weight_version, "engines": engines}


def resources_view(said: tools_pb2.GetResourcesResponse) -> dict[str, Any]:
    """Return what the tools service has, and how many actions wait and run."""
    breakers = words_of(tools_pb2.BreakerState)
    return {
        "resources": [
            {name: getattr(each, name) for name in ("dimension", "capacity", "held", "waiting")}
            for each in said.resources
        ],
        "providers": [
            {"name": each.name, "breaker": breakers.get(each.breaker, "")}
            for each in said.providers
        ],
        "waiting": said.actions_waiting,
        "running": said.actions_running,
    }


def shaping_view(said: rollout_pb2.GetShapingResponse) -> dict[str, Any]:
    """Return what one rollout trained beside what it sampled."""
    numbers = (
        "sampled",
        "trained",
        "sampled_tokens",
        "trained_tokens",
        "kept_fraction",
        "kept_verdict",
    )
    view: dict[str, Any] = {name: getattr(said, name) for name in numbers}
    pairs = {"sampled": list(said.length.sampled), "trained": list(said.length.trained)}
    return view | {"drops": dict(said.drops), "alarms": list(said.alarms), "lengths": pairs}


def standing_of(trajectory: pb.Trajectory) -> tuple[float, tuple[float, float, float] | None]:
    """Return a trajectory's priority, and the quantiles of its remaining tokens; None where nothing
    is predicted."""
    known = trajectory.HasField("predicted_remaining_tokens")
    return trajectory.priority, _quantiles(trajectory.predicted_remaining_tokens) if known else None


def history_view(said: pb.GetTrajectoryResponse) -> dict[str, Any]:
    """Return a trajectory with its ledger, steps and decisions, for its own page."""
    t = said.trajectory
    return {
        "id": t.trajectory_id,
        "rollout": t.rollout_id,
        "prompt": t.prompt_id,
        "sample": t.sample,
        "state": words_of(pb.TrajectoryState).get(t.state, ""),
        "engine": t.engine_id,
        "turns": t.next_turn,
        "prompt_tokens": t.prompt_tokens,
        "context_tokens": t.context_tokens,
        "tokens": t.gen_tokens,
        "predicted": _quantiles(t.predicted_remaining_tokens),
        "predicted_by": t.prediction_model_version,
        "priority": t.priority,
        "migrations": t.migrations,
        "job": t.job_id,
        "open": not t.HasField("closed_at"),
        "ledger_s": ledger_of(t.ledger),
        "wall_s": seconds(t.ledger.wall),
        "decisions": [
            {
                "at_s": seconds(each.since_opening),
                "kind": each.kind,
                "engine": each.engine_id,
                "reason": each.reason,
            }
            for each in said.decisions
        ],
        "steps": [
            {
                "turn": each.turn,
                "context_tokens": each.context_tokens,
                "tokens": each.output_tokens,
                "tool_s": seconds(each.tool_time),
            }
            for each in said.steps
        ],
    }


def ledger_of(ledger: pb.Ledger) -> dict[str, float]:
    """Return the seconds of a ledger by part."""
    return {part: seconds(getattr(ledger, part)) for part in LEDGER_PARTS}


def _quantiles(said: Quantiles) -> tuple[float, float, float]:
    return round(said.p10, 1), round(said.p50, 1), round(said.p90, 1)
