"""A finished run as a trace file (docs/traces.md): rollouts of one's own for the simulator and every bench."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from treadle_learned.transcript import Transcript
from treadle_sim.workloads.workload import Step, TrajectoryWork, write_traces

from treadle_cli.predictor.sources import run_id_of, tokenizer_of, transcripts_of_run
from treadle_cli.report.records import Run, TrajectoryRecord, read_run


def write_run(folder: Path, out: Path) -> int:
    """Writes the trajectories of a run and counts them. Raises RecordError, OSError."""
    run = read_run(folder)
    works = list(works_of_run(run, tokenizer_of(run.record.model)))
    write_traces(out, works)
    return len(works)


def works_of_run(run: Run, tokenizer: Tokenizer | None = None) -> Iterator[TrajectoryWork]:
    """All that sampled anything. A prompt's samples are numbered through: those of a second arm follow the first's.
    Texts where the model's tokenizer is at hand."""
    transcripts = {transcript.trajectory_id: transcript for transcript in transcripts_of_run(run, tokenizer)}
    samples: Counter[str] = Counter()
    for record in run.trajectories:
        transcript = transcripts.get(run_id_of(run, record))
        if transcript is not None:
            yield _work(record, transcript, samples[record.prompt_id])
            samples[record.prompt_id] += 1


def _work(record: TrajectoryRecord, transcript: Transcript, sample: int) -> TrajectoryWork:
    tools = [span for span in record.spans if span.kind == "tool"]
    return TrajectoryWork(
        prompt_id=record.prompt_id,
        sample=sample,
        prompt_tokens=transcript.prompt_tokens,
        steps=tuple(
            Step(
                turn.gen_tokens,
                turn.obs_tokens,
                sum(span.end_s - span.start_s for span in tools if span.turn == at),
                turn.text,
                turn.obs_text,
            )
            for at, turn in enumerate(transcript.turns)
        ),
        reward=record.reward,
        censored=transcript.censored,
        prompt=transcript.prompt,
    )
