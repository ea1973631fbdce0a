"""From what the client and the bus say to what the run's folder keeps. Pure."""

from collections.abc import Mapping, Sequence

from treadle import TrajectoryResult
from treadle.telemetry.v1.facts_pb2 import MigrationEnded

from treadle_cli.demo.facts import Heard
from treadle_cli.demo.forecasts import forecasts_of
from treadle_cli.records import SpanRecord, TrajectoryRecord, VersionSpanRecord


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
