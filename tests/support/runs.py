"""A small run made by hand, with times that are easy to add up."""

from dataclasses import replace

from treadle import VersionSpan
from treadle_cli.report.records import PlayRecord, Run, RunRecord, SpanRecord, TrajectoryRecord


def trajectory(
    arm: str, prompt_id: str, sample: int, gen_tokens: int, finished_s: float, *spans: SpanRecord
) -> TrajectoryRecord:
    """A finished trajectory that opened at 0 s, with two prompt tokens before `gen_tokens` sampled
    ones."""
    return TrajectoryRecord(
        arm=arm,
        trajectory_id=f"t-{arm}-{prompt_id}-{sample}",
        prompt_id=prompt_id,
        sample=sample,
        task="lake",
        opened_s=0.0,
        finished_s=finished_s,
        token_ids=tuple(range(gen_tokens + 2)),
        logprobs=(0.0, 0.0, *[-0.5] * gen_tokens),
        loss_mask=(0, 0, *[1] * gen_tokens),
        version_spans=(VersionSpan("0", 2, gen_tokens + 2),),
        reward=1.0,
        outcome="finished",
        error="",
        turns=1,
        gen_tokens=gen_tokens,
        preemptions=0,
        migrations=sum(span.kind == "migration" for span in spans),
        lost_engines=0,
        spans=spans,
    )


def span(
    kind: str, start_s: float, end_s: float, engine_id: str = "engine-0", turn: int = 0
) -> SpanRecord:
    """One span."""
    return SpanRecord(kind, start_s, end_s, engine_id, turn)


def small_run() -> Run:
    """Two arms play two trajectories once. The second ends later and queues less; one of them moves
    behind a tool."""
    queued = (span("queue", 0, 6), span("prefill", 6, 7), span("decode", 7, 10))
    called = (span("prefill", 0, 1), span("decode", 1, 3), span("tool", 3, 4, ""))
    moved = (
        *(span("queue", 0, 1), span("decode", 1, 5), span("tool", 5, 7, "")),
        *(span("migration", 5.5, 6.5, "engine-1"), span("decode", 8, 12, "engine-1", 1)),
    )
    trajectories = (
        trajectory("pinned-fcfs", "lake-0", 0, 40, 10.0, *queued),
        trajectory("pinned-fcfs", "lake-1", 0, 10, 4.0, *called),
        replace(trajectory("treadle", "lake-0", 0, 40, 12.0, *moved), lost_engines=1, turns=2),
        trajectory("treadle", "lake-1", 0, 10, 4.0, span("decode", 0, 4, "engine-1")),
    )
    plays = (
        PlayRecord("pinned-fcfs", "Pinned FCFS", "first come first served", 10.0),
        PlayRecord(
            "treadle",
            "Treadle",
            "longest first",
            12.0,
            engine_losses=("engine-0 was killed by SIGKILL at 7.5 s",),
        ),
    )
    record = RunRecord(
        run_id="20260101-000000-abcd",
        started_at="2026-01-01T00:00:00+0000",
        seed=0,
        model="SmolLM2-135M-Instruct",
        engines=("engine-0", "engine-1"),
        slots=2,
        machine="2 cores, 23 GiB",
        conditions=("Same seeds.",),
        plays=plays,
    )
    return Run(record, trajectories)
