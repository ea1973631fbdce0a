"""Read a run of `treadle demo` or `treadle rollout` as a logged step, with its engines' speed as
the run shows it.

The work is that of one play: the baseline's of the repeat that the report shows. A run does not
hold the curve of its engines, so it is fitted to the play's own spans: seconds a token of each turn
against how many trajectories decoded beside it, and seconds of each prefill against what it had to
read.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from treadle_core.engine_queue.pace import non_negative_least_squares
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.fitting import DecodePoint, fit_decode
from treadle_sim.workloads.workload import TrajectoryWork

from treadle_cli.exits import UsageProblem
from treadle_cli.predictor.transcripts import works_of_run
from treadle_cli.report.records import PlayRecord, SpanRecord, TrajectoryRecord, read_run
from treadle_cli.simulate.logs import Log, Recorded

PINNED, TREADLE = "pinned-fcfs", "treadle"  # arms of the demo
SYSTEMS = {PINNED: "verl", TREADLE: "treadle"}  # the simulated system that does the same
LEAST_TOKENS = 8  # tokens of a turn: the seconds of shorter ones are mostly rounding
UNKNOWN_KV_TOKENS = 1 << 30  # a run does not record what its engines hold: room for all


def read_run_log(folder: Path) -> Log:
    """Return a run as a logged step. Raises RecordError where the folder holds no run, UsageProblem
    where it holds nothing to simulate."""
    run = read_run(folder)
    if not run.compared:
        raise UsageProblem(f"--from-run {folder}: the run has no play that came to its end")
    play = run.compared[0]
    records = [each for each in run.of_play(play) if any(each.loss_mask)]
    if not records:
        raise UsageProblem(
            f"--from-run {folder}: no trajectory of its play {play.title} sampled a token"
        )
    works = works_of_run(run, records)
    points = _decode_points(records)
    if not points:
        raise UsageProblem(
            f"--from-run {folder}: it has no turn of {LEAST_TOKENS} tokens that shows an engine's "
            "speed"
        )
    decode = fit_decode(points)
    fixed_s, token_s = _fit_prefill(records, works)
    curve = StepCurve(decode.batch_sizes, decode.step_s, 0.0, fixed_s, token_s, 0.0)
    model = EngineModel(
        llm=run.record.model,
        accelerator="engine",
        gpus=1,
        slots=run.record.slots,
        kv_tokens=UNKNOWN_KV_TOKENS,
        kv_bytes_per_token=0,
        curve=curve,
        origin="fitted to the run",
    )
    return Log(
        name=run.record.run_id,
        works=tuple(works),
        way=SYSTEMS.get(play.arm, ""),
        recorded=tuple(_recorded(each) for each in run.compared),
        assumptions=(
            f"The work is that of {play.title}, epoch {play.epoch}: {len(works)} trajectories as "
            "they were sampled.",
            f"The engines' speed is fitted to {len(points)} turns of that play; half of these are "
            f"within {decode.error.median:.0%} of it. KV always fits, and a move takes no longer "
            f"the more KV it has.",
        ),
        model=model,
        gpus=len(run.record.engines),
    )


def _recorded(play: PlayRecord) -> Recorded:
    return Recorded(play.title, play.makespan_s, SYSTEMS.get(play.arm, ""))


@dataclass(frozen=True)
class _Turn:
    """Work of an engine for one turn of a trajectory."""

    decodes: tuple[SpanRecord, ...]
    tokens: int


def _decode_points(records: Sequence[TrajectoryRecord]) -> list[DecodePoint]:
    """Return, for each turn of at least LEAST_TOKENS, the mean batch beside it, a whole number, and
    seconds a token."""
    decodes: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    for record in records:
        for span in record.spans:
            if span.kind == "decode":
                decodes[span.engine_id].append(span)
    points = []
    for record in records:
        for turn in _turns(record):
            own_s = sum(span.end_s - span.start_s for span in turn.decodes)
            if turn.tokens < LEAST_TOKENS or own_s <= 0.0:
                continue
            beside_s = sum(
                _overlap_s(span, other)
                for span in turn.decodes
                for other in decodes[span.engine_id]
            )
            points.append(
                DecodePoint(
                    max(1.0, float(round(beside_s / own_s))), 0.0, own_s / (turn.tokens - 1)
                )
            )
    return points


def _turns(record: TrajectoryRecord) -> list[_Turn]:
    sampled = [len(list(each)) for kind, each in itertools.groupby(record.loss_mask) if kind]
    return [
        _Turn(
            tuple(span for span in record.spans if span.kind == "decode" and span.turn == at),
            tokens,
        )
        for at, tokens in enumerate(sampled)
    ]


def _overlap_s(one: SpanRecord, other: SpanRecord) -> float:
    return max(0.0, min(one.end_s, other.end_s) - max(one.start_s, other.start_s))


def _fit_prefill(
    records: Sequence[TrajectoryRecord], works: Sequence[TrajectoryWork]
) -> tuple[float, float]:
    """Return the seconds of any prefill, and of each new token. A prompt is new to its first sample
    on an engine alone."""
    rows: list[tuple[float, float]] = []
    seconds: list[float] = []
    seen: set[tuple[str, str]] = set()
    spans = [
        (span, work)
        for record, work in zip(records, works, strict=True)
        for span in record.spans
        if span.kind == "prefill"
    ]
    for span, work in sorted(spans, key=lambda each: each[0].start_s):
        if span.turn == 0:
            key = (work.prompt_id, span.engine_id)
            new = 1 if key in seen else work.prompt_tokens
            seen.add(key)
        else:
            new = 1 + (work.steps[span.turn - 1].obs_tokens if span.turn <= len(work.steps) else 0)
        rows.append((1.0, float(new)))
        seconds.append(max(0.0, span.end_s - span.start_s))
    if not rows:
        return 0.0, 0.0
    fixed_s, token_s = non_negative_least_squares(np.array(rows), np.array(seconds))
    return float(fixed_s), float(token_s)
