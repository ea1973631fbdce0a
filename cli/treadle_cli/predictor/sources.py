"""Where transcripts come from: trace files, transcript files, folders of finished runs.

Invariant: nothing is made up. A run keeps token ids; they are texts again where its model's tokenizer is at hand, and
counts where it is not. What did not end by itself is censored.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from treadle_learned.transcript import Transcript, Turn, read_transcripts
from treadle_sim.workloads.workload import TrajectoryWork, read_traces

from treadle_cli.mesh.engines import DEFAULT_MODEL, default_model_folder
from treadle_cli.problems import UsageProblem
from treadle_cli.report.records import Run, TrajectoryRecord, read_run

ENDED = "finished"  # any other outcome: it was cut, and would have gone on


def read_source(path: Path, tokenizer: Path | None = None) -> list[Transcript]:
    """All of one source. `tokenizer`: folder of the model that a run was of, where it is not the run's own. Raises
    UsageProblem, RecordError, TraceFileError, TranscriptFileError."""
    if path.is_dir():
        run = read_run(path)
        return transcripts_of_run(run, tokenizer_of(run.record.model, tokenizer))
    if not path.exists():
        raise UsageProblem(f"{path} is not there: name trace files, transcript files or folders of finished runs")
    if _holds_transcripts(path):
        return read_transcripts(path)
    return transcripts_of_works(read_traces(path), path.name)


def transcripts_of_works(works: Sequence[TrajectoryWork], rollout_id: str = "traces") -> list[Transcript]:
    """As a rollout of their own."""
    return [
        Transcript(
            f"{rollout_id}/{work.prompt_id}#{work.sample}",
            rollout_id,
            work.prompt_id,
            work.prompt_tokens,
            tuple(Turn(step.gen_tokens, step.obs_tokens, step.text, step.obs_text) for step in work.steps),
            work.censored,
            work.prompt,
        )
        for work in works
    ]


def transcripts_of_run(run: Run, tokenizer: Tokenizer | None = None) -> list[Transcript]:
    """Each arm as a rollout; what sampled nothing is left out. Prompts of another seed are other prompts."""
    found = []
    for record in run.trajectories:
        spans = [(sampled, list(ids)) for sampled, ids in _spans(record)]
        if not any(sampled for sampled, _ in spans):
            continue
        prompt = [] if spans[0][0] else spans.pop(0)[1]
        found.append(
            Transcript(
                run_id_of(run, record),
                f"{run.record.run_id}/{record.arm}",
                f"{run.record.seed}/{record.prompt_id}",
                len(prompt),
                tuple(_turns(spans, tokenizer)),
                record.outcome != ENDED,
                _text(tokenizer, prompt),
                weight_version=record.version_spans[0].weight_version if record.version_spans else "",
            )
        )
    return found


def run_id_of(run: Run, record: TrajectoryRecord) -> str:
    """What a trajectory is called among those of many runs."""
    return f"{run.record.run_id}/{record.arm}/{record.trajectory_id}"


def _spans(record: TrajectoryRecord) -> list[tuple[bool, list[int]]]:
    """Tokens that were sampled one after the other, and those between them."""
    pairs = zip(record.loss_mask, record.token_ids, strict=True)
    return [(bool(mask), [token for _, token in each]) for mask, each in itertools.groupby(pairs, lambda pair: pair[0])]


def _turns(spans: Sequence[tuple[bool, list[int]]], tokenizer: Tokenizer | None) -> list[Turn]:
    turns = []
    for at in range(0, len(spans), 2):
        said, answer = spans[at][1], spans[at + 1][1] if at + 1 < len(spans) else []
        turns.append(Turn(len(said), len(answer), _text(tokenizer, said), _text(tokenizer, answer)))
    return turns


def _text(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    return "" if tokenizer is None else str(tokenizer.decode(list(ids), skip_special_tokens=True))


def tokenizer_of(model: str, named: Path | None = None) -> Tokenizer | None:
    """Of a run's model, or of the folder named instead; None where it is not on this machine. Raises UsageProblem."""
    if named is not None and not (named / "tokenizer.json").is_file():
        raise UsageProblem(f"--tokenizer {named}: holds no tokenizer.json; name the folder of the run's model")
    own = default_model_folder() if model == DEFAULT_MODEL else Path(model)
    file = (named or own) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def _holds_transcripts(path: Path) -> bool:
    """By its first line; what is neither is left to `read_traces`, which says what a line must have."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            line = json.loads(next((line for line in lines if line.strip()), b"{}"))
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error):
        return False
    return isinstance(line, dict) and "turns" in line and "steps" not in line
