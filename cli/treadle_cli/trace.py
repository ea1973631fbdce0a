"""Run `treadle trace`: draw the report of a finished run again, or write the run in another format.

Chrome trace events are what https://ui.perfetto.dev and chrome://tracing show. A process of each
play has a track for each lane of an engine: as many as steps were there at once, and one for tools.
A slice is a part of a step; an arrow leads from the engine that a trajectory left to the one that
it moved to.
"""

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from treadle_cli import exits
from treadle_cli.exits import UsageProblem
from treadle_cli.options import AsJson, choose_console
from treadle_cli.predictor.transcripts import write_run
from treadle_cli.report.records import PlayRecord, Run, SpanRecord, TrajectoryRecord, read_run

MICROSECONDS = 1e6  # a second, the unit of the format
TOOLS = "tools"


def trace(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, runs/<id>.")],
    traces: Annotated[
        Path | None,
        typer.Option(
            help="Write the run's trajectories to this trace file (docs/traces.md) instead."
        ),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            help="Write the run's steps as Chrome trace events for ui.perfetto.dev instead."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the report of a finished run again, from its trajectories.jsonl and summary.json."""
    from treadle_cli.report.drawing import print_summary, render_run

    with exits.end_with_one_line():
        if perfetto is not None and traces is not None:
            raise UsageProblem("trace takes either --traces FILE or --perfetto FILE")
        if perfetto is not None:
            file, what, count = perfetto, "slices", write_perfetto(read_run(run), perfetto)
        elif traces is not None:
            file, what, count = traces, "trajectories", write_run(run, traces)
        else:
            render_run(run, choose_console(as_json))
            if as_json:
                print_summary(run)
            return
        typer.echo(
            json.dumps({"file": str(file), what: count}) if as_json else f"{file}: {count} {what}"
        )


def write_perfetto(run: Run, path: Path) -> int:
    """Write all plays of a run; return how many slices there are. Raises OSError."""
    events = [
        event
        for number, play in enumerate(run.record.plays, start=1)
        for event in _events(run, play, number)
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return sum(event["ph"] == "X" for event in events)


def _events(run: Run, play: PlayRecord, pid: int) -> Iterator[dict[str, Any]]:
    yield {
        "ph": "M",
        "pid": pid,
        "name": "process_name",
        "args": {"name": f"{play.title}, epoch {play.epoch}"},
    }
    spans = sorted(
        ((span, t) for t in run.of_play(play) for span in t.spans),
        key=lambda each: (each[0].start_s, each[0].end_s, each[1].trajectory_id),
    )
    lanes: dict[str, list[tuple[float, int]]] = {}  # when each lane is free again, by engine
    tracks: dict[tuple[str, int], int] = {}
    track_of: dict[int, int] = {}  # track of each span, by its identity
    for span, t in spans:
        if span.end_s <= span.start_s or span.kind == "migration":
            continue
        place = span.engine_id or TOOLS
        free = lanes.setdefault(place, [])
        lane = heapq.heappop(free)[1] if free and free[0][0] <= span.start_s else len(free)
        heapq.heappush(free, (span.end_s, lane))
        if (place, lane) not in tracks:
            tid = tracks[place, lane] = len(tracks) + 1
            yield {
                "ph": "M",
                "pid": pid,
                "tid": tid,
                "name": "thread_name",
                "args": {"name": f"{place} {lane}"},
            }
        track_of[id(span)] = tracks[place, lane]
        yield _slice(span, t, pid, tracks[place, lane])
    moves = [(span, t) for span, t in spans if span.kind == "migration"]
    for number, (move, t) in enumerate(moves):
        yield from _flow(move, t, pid, number, track_of)


def _slice(span: SpanRecord, t: TrajectoryRecord, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": span.start_s * MICROSECONDS,
        "dur": (span.end_s - span.start_s) * MICROSECONDS,
        "name": f"{span.kind} {t.prompt_id}#{t.sample}",
        "cat": span.kind,
        "args": {"trajectory_id": t.trajectory_id, "turn": span.turn},
    }


def _flow(
    move: SpanRecord, t: TrajectoryRecord, pid: int, number: int, track_of: dict[int, int]
) -> Iterator[dict[str, Any]]:
    """Yield the arrow from the last slice before a move to the first one after it on another
    engine."""
    steps = [
        span for span in t.spans if span.kind in ("prefill", "decode") and span.end_s > span.start_s
    ]
    before = [span for span in steps if span.start_s <= move.start_s]
    after = [
        span for span in steps if span.start_s >= move.end_s and span.engine_id == move.engine_id
    ]
    if not before or not after:
        return
    ends = (
        ("s", max(before, key=lambda span: span.end_s)),
        ("f", min(after, key=lambda span: span.start_s)),
    )
    for phase, span in ends:
        flow = {
            "ph": phase,
            "pid": pid,
            "tid": track_of[id(span)],
            "id": f"{pid}.{number}",
            "name": "move",
            "cat": "move",
        }
        yield {**flow, "ts": span.start_s * MICROSECONDS, **({"bp": "e"} if phase == "f" else {})}
