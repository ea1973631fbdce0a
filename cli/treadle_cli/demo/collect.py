"""From what the client and the bus say to what the run's folder keeps. Pure.

Listens to the mesh's facts for what no client sees: migrations, lost engines and forecasts.

A plain core subscription, not a durable one: the listener is there before the arm starts and forgets with it.

Forecasts beside the steps they are about: when each was asked for, when it came, and when the next step was in an
engine's queue. Pure."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats
from google.protobuf.message import DecodeError
from nats.aio.msg import Msg
from treadle import TrajectoryResult
from treadle.telemetry.v1.facts_pb2 import Fact, MigrationEnded, TrajectoryPredicted

from treadle_cli.report.records import ForecastRecord, SpanRecord, TrajectoryRecord, VersionSpanRecord


@dataclass
class StepTimes:
    """Unix time, by (trajectory, turn): when a step was first queued at an engine, and when it last ended there."""

    queued_s: dict[tuple[str, int], float] = field(default_factory=dict)
    ended_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def take(self, fact: Fact) -> None:
        """Keeps what a fact says of a step."""
        time_s = fact.time.ToMicroseconds() / 1e6
        if fact.HasField("step_queued"):
            step = fact.step_queued.step
            self.queued_s.setdefault((step.trajectory_id, step.turn), time_s)
        elif fact.HasField("step_finished"):
            step = fact.step_finished.step
            self.ended_s[step.trajectory_id, step.turn] = time_s


def forecasts_of(
    told: Iterable[tuple[float, TrajectoryPredicted]],
    steps: StepTimes,
    opened_s: Mapping[str, float],
    started_s: float,
) -> dict[str, tuple[ForecastRecord, ...]]:
    """By trajectory. told: forecasts with the unix time at which they came; opened_s: unix time by trajectory, when the
    first was asked for; started_s: unix time from which records count. A forecast of which it is not known what it
    followed is left out."""
    found: dict[str, list[ForecastRecord]] = {}
    for came_s, forecast in told:
        name, turn = forecast.trajectory_id, forecast.turn
        asked_s = steps.ended_s.get((name, turn - 1)) if turn else opened_s.get(name)
        if asked_s is None:
            continue
        queued_s = steps.queued_s.get((name, turn))
        found.setdefault(name, []).append(
            ForecastRecord(
                turn=turn,
                model_version=forecast.model_version,
                learned=forecast.learned,
                asked_s=asked_s - started_s,
                came_s=came_s - started_s,
                next_queued_s=None if queued_s is None else queued_s - started_s,
            )
        )
    return {name: tuple(records) for name, records in found.items()}


ALL_FACTS = "treadle.facts.>"


@dataclass
class Heard:
    """What was said during an arm, in the order of arrival; a fact that arrives twice is here once."""

    migrations: list[MigrationEnded] = field(default_factory=list)
    lost_engines: list[tuple[float, str, str]] = field(default_factory=list)  # unix time, engine id, reason
    forecasts: list[tuple[float, TrajectoryPredicted]] = field(default_factory=list)  # with unix time
    steps: StepTimes = field(default_factory=StepTimes)
    seen: set[str] = field(default_factory=set)

    def take(self, fact: Fact) -> None:
        """Keeps what the report needs."""
        if fact.fact_id in self.seen:
            return
        self.seen.add(fact.fact_id)
        self.steps.take(fact)
        if fact.HasField("migration_ended"):
            self.migrations.append(fact.migration_ended)
        elif fact.HasField("engine_lost"):
            self.lost_engines.append(
                (fact.time.ToMicroseconds() / 1e6, fact.engine_lost.engine_id, fact.engine_lost.reason)
            )
        elif fact.HasField("trajectory_predicted"):
            self.forecasts.append((fact.time.ToMicroseconds() / 1e6, fact.trajectory_predicted))


@asynccontextmanager
async def listening(nats_url: str, note: Callable[[str], None]) -> AsyncIterator[Heard]:
    """Collects facts until the block ends, those still on the way included."""
    heard = Heard()
    client = await nats.connect(nats_url)

    async def on_message(message: Msg) -> None:
        fact = Fact()
        try:
            fact.ParseFromString(message.data)
        except DecodeError:
            note(f"a fact on {message.subject} is none that this version knows")
            return
        heard.take(fact)

    await client.subscribe(ALL_FACTS, cb=on_message)
    await client.flush()
    try:
        yield heard
    finally:
        await client.drain()


def trajectory_records(
    arm: str,
    started_s: float,
    results: Sequence[TrajectoryResult],
    opened_s: Mapping[tuple[str, int], float],
    tasks: Mapping[str, str],
    heard: Heard,
) -> list[TrajectoryRecord]:
    """One record a result. started_s, opened_s: unix time; opened_s by (prompt, sample); tasks: kind by prompt."""
    opened_by_id = {r.trajectory_id: opened_s.get((r.prompt_id, r.sample), started_s) for r in results}
    forecasts = forecasts_of(heard.forecasts, heard.steps, opened_by_id, started_s)
    moves: dict[str, list[MigrationEnded]] = {}
    for migration in heard.migrations:
        moves.setdefault(migration.trajectory_id, []).append(migration)
    records = []
    for result in results:
        opened = opened_by_id[result.trajectory_id] - started_s
        own_moves = moves.get(result.trajectory_id, [])
        records.append(
            TrajectoryRecord(
                arm=arm,
                trajectory_id=result.trajectory_id,
                prompt_id=result.prompt_id,
                sample=result.sample,
                task=tasks[result.prompt_id],
                opened_s=opened,
                finished_s=opened + result.elapsed_s,
                token_ids=tuple(result.tokens),
                logprobs=tuple(result.logprobs),
                loss_mask=tuple(result.loss_mask),
                version_spans=tuple(
                    VersionSpanRecord(span.weight_version, span.start_token, span.end_token)
                    for span in result.version_spans
                ),
                reward=result.reward,
                outcome=result.outcome,
                error=result.error,
                turns=len(result.steps),
                gen_tokens=sum(result.loss_mask),
                preemptions=sum(step.preemptions for step in result.steps),
                migrations=sum(migration.moved for migration in own_moves),
                lost_engines=sum(len(step.engine_ids) - 1 for step in result.steps),
                spans=_spans(result, own_moves, started_s),
                forecasts=forecasts.get(result.trajectory_id, ()),
            )
        )
    return records


def failed_migrations(migrations: Sequence[MigrationEnded]) -> tuple[str, ...]:
    """One line each: from where to where, and why not."""
    return tuple(
        f"{m.trajectory_id} stayed on {m.source_engine_id}: {m.failure_reason or 'no reason given'}"
        for m in migrations
        if not m.moved
    )


def _spans(result: TrajectoryResult, moves: Sequence[MigrationEnded], started_s: float) -> tuple[SpanRecord, ...]:
    spans = [
        SpanRecord(span.kind, span.start_s - started_s, span.end_s - started_s, span.engine_id, span.turn)
        for span in result.spans
    ]
    for move in moves:
        if not move.moved:
            continue
        start_s = move.started_at.ToMicroseconds() / 1e6 - started_s
        length_s = move.elapsed.ToMicroseconds() / 1e6
        turn = max((span.turn for span in spans if span.start_s <= start_s and span.kind != "migration"), default=0)
        spans.append(SpanRecord("migration", start_s, start_s + length_s, move.target_engine_id, turn))
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s)))
