"""Collect the mesh's facts during a play, and make the records of its trajectories.

The client sees its own steps; only the facts show migrations, forecasts and when a step entered an
engine's queue. The subscription is a plain one, not durable: it starts before the play and ends
with it.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats
from google.protobuf.message import DecodeError
from nats.aio.msg import Msg
from treadle import TrajectoryResult
from treadle.telemetry.v1.facts_pb2 import Fact, MigrationEnded, TrajectoryPredicted
from treadle_runtime.fields import seconds

from treadle_cli.report.records import ForecastRecord, SpanRecord, TrajectoryRecord

ALL_FACTS = "treadle.facts.>"


@dataclass
class CollectedFacts:
    """The facts that the report needs, in the order of arrival; a fact that arrives twice counts
    once.

    forecasts: with the unix time of each. queued_s, finished_s: unix time by (trajectory, turn),
    when a step first entered an engine's queue and when it last ended there.
    """

    migrations: list[MigrationEnded] = field(default_factory=list)
    forecasts: list[tuple[float, TrajectoryPredicted]] = field(default_factory=list)
    queued_s: dict[tuple[str, int], float] = field(default_factory=dict)
    finished_s: dict[tuple[str, int], float] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def add(self, fact: Fact) -> None:
        if fact.fact_id in self.seen:
            return
        self.seen.add(fact.fact_id)
        time_s = fact.time.ToMicroseconds() / 1e6
        match fact.WhichOneof("fact"):
            case "step_queued":
                step = fact.step_queued.step
                self.queued_s.setdefault((step.trajectory_id, step.turn), time_s)
            case "step_started":  # a step that did not wait has no StepQueued
                step, waited_s = fact.step_started.step, seconds(fact.step_started.queue_time)
                self.queued_s.setdefault((step.trajectory_id, step.turn), time_s - waited_s)
            case "step_finished":
                step = fact.step_finished.step
                self.finished_s[step.trajectory_id, step.turn] = time_s
            case "migration_ended":
                self.migrations.append(fact.migration_ended)
            case "trajectory_predicted":
                self.forecasts.append((time_s, fact.trajectory_predicted))

    def failed_migrations(self) -> tuple[str, ...]:
        """Return one line for each migration that did not happen, with its reason."""
        return tuple(
            f"{m.trajectory_id} stayed on {m.source_engine_id}: "
            f"{m.failure_reason or 'no reason given'}"
            for m in self.migrations
            if not m.moved
        )

    def forecast_records(
        self, opened_s: Mapping[str, float], started_s: float
    ) -> Mapping[str, list[ForecastRecord]]:
        """Return forecasts by trajectory, each with the times of the steps before and after it.

        opened_s: unix time at which each trajectory was opened, when its first forecast was
        requested. started_s: unix time from which the records count. A forecast whose step before
        it is unknown is left out.
        """
        found: defaultdict[str, list[ForecastRecord]] = defaultdict(list)
        for came_s, forecast in self.forecasts:
            name, turn = forecast.trajectory_id, forecast.turn
            asked_s = self.finished_s.get((name, turn - 1)) if turn else opened_s.get(name)
            if asked_s is None:
                continue
            queued_s = self.queued_s.get((name, turn))
            found[name].append(
                ForecastRecord(
                    turn=turn,
                    model_version=forecast.model_version,
                    learned=forecast.learned,
                    asked_s=asked_s - started_s,
                    came_s=came_s - started_s,
                    next_queued_s=None if queued_s is None else queued_s - started_s,
                )
            )
        return found


@asynccontextmanager
async def collect_facts(
    nats_url: str, note: Callable[[str], None]
) -> AsyncIterator[CollectedFacts]:
    """Collect facts until the block ends, those still in flight included."""
    facts = CollectedFacts()
    client = await nats.connect(nats_url)

    async def on_message(message: Msg) -> None:
        try:
            facts.add(Fact.FromString(message.data))
        except DecodeError:
            note(f"a message on {message.subject} is not a fact that this version knows")

    await client.subscribe(ALL_FACTS, cb=on_message)
    await client.flush()
    try:
        yield facts
    finally:
        await client.drain()


def trajectory_records(
    arm: str,
    epoch: int,
    started_s: float,
    results: Sequence[TrajectoryResult],
    opened_s: Mapping[tuple[str, int], float],
    tasks: Mapping[str, str],
    facts: CollectedFacts,
) -> list[TrajectoryRecord]:
    """Return one record for each result.

    started_s, opened_s: unix time; opened_s by (prompt, sample). tasks: kind of task by prompt.
    """
    opened_by_id = {
        r.trajectory_id: opened_s.get((r.prompt_id, r.sample), started_s) for r in results
    }
    forecasts = facts.forecast_records(opened_by_id, started_s)
    records = []
    for result in results:
        opened = opened_by_id[result.trajectory_id] - started_s
        moves = [
            move
            for move in facts.migrations
            if move.moved and move.trajectory_id == result.trajectory_id
        ]
        records.append(
            TrajectoryRecord(
                arm=arm,
                epoch=epoch,
                trajectory_id=result.trajectory_id,
                prompt_id=result.prompt_id,
                sample=result.sample,
                task=tasks[result.prompt_id],
                opened_s=opened,
                finished_s=opened + result.elapsed_s,
                token_ids=tuple(result.tokens),
                logprobs=tuple(result.logprobs),
                loss_mask=tuple(result.loss_mask),
                version_spans=tuple(result.version_spans),
                reward=result.reward,
                outcome=result.outcome,
                error=result.error,
                turns=len(result.steps),
                gen_tokens=sum(result.loss_mask),
                preemptions=sum(step.preemptions for step in result.steps),
                migrations=len(moves),
                lost_engines=sum(len(step.engine_ids) - 1 for step in result.steps),
                spans=_spans(result, moves, started_s),
                forecasts=tuple(forecasts.get(result.trajectory_id, ())),
            )
        )
    return records


def _spans(
    result: TrajectoryResult, moves: Sequence[MigrationEnded], started_s: float
) -> tuple[SpanRecord, ...]:
    """Return the client's spans and its migrations, each under the turn that ran when it began."""
    own = [
        SpanRecord(
            span.kind, span.start_s - started_s, span.end_s - started_s, span.engine_id, span.turn
        )
        for span in result.spans
    ]
    migrations = []
    for move in moves:
        start_s = move.started_at.ToMicroseconds() / 1e6 - started_s
        end_s = start_s + move.elapsed.ToMicroseconds() / 1e6
        turn = max((span.turn for span in own if span.start_s <= start_s), default=0)
        migrations.append(SpanRecord("migration", start_s, end_s, move.target_engine_id, turn))
    return tuple(sorted([*own, *migrations], key=lambda span: (span.start_s, span.end_s)))
