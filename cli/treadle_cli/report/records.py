"""Read and write the files of a run: trajectories.jsonl and summary.json.

Invariants: times are seconds from the start of the play, so that two plays share one axis;
token_ids, logprobs and loss_mask of a trajectory are equally long; a reader gets what was written.
The report is drawn from these files alone.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from treadle import VersionSpan

from treadle_cli.exits import UsageProblem

TRAJECTORIES_FILE = "trajectories.jsonl"
SUMMARY_FILE = "summary.json"
FORMAT_VERSION = 2


class RecordError(UsageProblem):
    """Raised where a file of a run is missing or is not what a run writes; the message names file
    and line."""


@dataclass(frozen=True)
class SpanRecord:
    """Part of a trajectory's wall time. kind: queue, prefill, decode, tool or migration."""

    kind: str
    start_s: float
    end_s: float
    engine_id: str
    turn: int


@dataclass(frozen=True)
class ForecastRecord:
    """A forecast of what was left after `turn` steps, requested when the last of them ended, or the
    trajectory was opened. learned: by a learned model. next_queued_s: when the next step was in an
    engine's queue, None where there was none."""

    turn: int
    model_version: str
    asked_s: float
    came_s: float
    next_queued_s: float | None
    learned: bool = False


@dataclass(frozen=True)
class TrajectoryRecord:
    """One trajectory of one play. loss_mask is 1 where the policy sampled, and logprobs are 0.0
    where it did not."""

    arm: str
    trajectory_id: str
    prompt_id: str
    sample: int
    task: str
    opened_s: float
    finished_s: float
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    version_spans: tuple[VersionSpan, ...]
    reward: float | None
    outcome: str
    error: str
    turns: int
    gen_tokens: int
    preemptions: int
    migrations: int
    lost_engines: int  # steps that continued elsewhere because their engine was lost
    spans: tuple[SpanRecord, ...]
    forecasts: tuple[ForecastRecord, ...] = ()
    epoch: int = 0

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.loss_mask):
            raise ValueError("token_ids, logprobs and loss_mask differ in length")


@dataclass(frozen=True)
class PlayRecord:
    """One play of the work by one arm: what the arm was and how it went. policy: in words. epoch:
    plays of one epoch have the same sampling seeds. engine_losses: "engine-1 was killed by SIGKILL
    at 12.3 s"."""

    arm: str
    title: str
    policy: str
    makespan_s: float
    epoch: int = 0
    other_programs_share: float = 0.0  # share of all cores' time during the play
    engine_losses: tuple[str, ...] = ()
    failed_migrations: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunRecord:
    """A run without its trajectories. conditions: short sentences on what was held equal, for the
    report's reader. plays: in the order in which they were played; the arm of the first is the
    baseline."""

    run_id: str
    started_at: str
    seed: int
    model: str
    engines: tuple[str, ...]
    slots: int
    machine: str
    conditions: tuple[str, ...]
    plays: tuple[PlayRecord, ...]
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Repeat:
    """The plays of one epoch that both arms played."""

    baseline: PlayRecord
    treadle: PlayRecord

    @property
    def ratio(self) -> float:
        """Return the baseline's makespan over Treadle's: above 1 Treadle was faster."""
        return self.baseline.makespan_s / self.treadle.makespan_s


@dataclass(frozen=True)
class Run:
    """A run in its files."""

    record: RunRecord
    trajectories: tuple[TrajectoryRecord, ...]

    def of_play(self, play: PlayRecord) -> list[TrajectoryRecord]:
        """Return the play's trajectories, first finished first."""
        own = (t for t in self.trajectories if (t.arm, t.epoch) == (play.arm, play.epoch))
        return sorted(own, key=lambda t: t.finished_s)

    @property
    def repeats(self) -> list[Repeat]:
        """Return the epochs that both arms played, in order."""
        plays = self.record.plays
        baselines = {play.epoch: play for play in plays if play.arm == plays[0].arm}
        others = [play for play in plays if play.arm != plays[0].arm]
        return [Repeat(baselines[play.epoch], play) for play in others if play.epoch in baselines]

    @property
    def median_repeat(self) -> Repeat | None:
        """Return the repeat of median ratio, the lower of two; None where only one arm played."""
        repeats = sorted(self.repeats, key=lambda repeat: repeat.ratio)
        return repeats[(len(repeats) - 1) // 2] if repeats else None

    @property
    def compared(self) -> tuple[PlayRecord, ...]:
        """Return the plays that a report shows: the median repeat, baseline first; all plays of a
        run without repeats."""
        median = self.median_repeat
        return self.record.plays if median is None else (median.baseline, median.treadle)


@dataclass(frozen=True)
class _Summary:
    """Fields of summary.json that are read."""

    run: RunRecord


_SUMMARY = TypeAdapter(_Summary)
_TRAJECTORY = TypeAdapter(TrajectoryRecord)


def write_run(folder: Path, run: Run) -> None:
    """Write both files, the summary without figures."""
    write_trajectories(folder, run.trajectories)
    write_summary(folder, run.record, [])


def write_trajectories(folder: Path, trajectories: Iterable[TrajectoryRecord]) -> None:
    """Write the trajectories, one JSON object a line."""
    with (folder / TRAJECTORIES_FILE).open("wb") as lines:
        for trajectory in trajectories:
            lines.write(_TRAJECTORY.dump_json(trajectory) + b"\n")


def write_summary(folder: Path, record: RunRecord, figures: Sequence[Mapping[str, Any]]) -> None:
    """Write summary.json. `figures` (report/accounting.py) are there for other programs; `read_run`
    does not need them."""
    (folder / SUMMARY_FILE).write_text(
        json.dumps({"run": asdict(record), "figures": figures}, indent=2) + "\n"
    )


def read_run(folder: Path) -> Run:
    """Return the run in a folder. Raises RecordError where a file is missing, from another format,
    or broken."""
    path = folder / SUMMARY_FILE
    try:
        record = _SUMMARY.validate_json(path.read_bytes()).run
    except FileNotFoundError as error:
        raise RecordError(
            f"{path} does not exist: {folder} is not the folder of a finished run"
        ) from error
    except ValidationError as error:
        raise RecordError(f"{path} is not a summary that this version writes: {error}") from error
    if record.format_version != FORMAT_VERSION:
        raise RecordError(
            f"{path} has format {record.format_version}; this version reads {FORMAT_VERSION}"
        )
    return Run(record, tuple(_read_trajectories(folder / TRAJECTORIES_FILE)))


def _read_trajectories(path: Path) -> Iterator[TrajectoryRecord]:
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError as error:
        raise RecordError(f"{path} does not exist") from error
    for number, line in enumerate(lines, start=1):
        try:
            yield _TRAJECTORY.validate_json(line)
        except ValidationError as error:
            raise RecordError(f"{path}, line {number}, is not a trajectory: {error}") from error
