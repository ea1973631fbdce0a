"""Read transcripts from trace files, transcript files and folders of finished runs; write runs as
trace files, and transcripts as the facts that a mesh publishes.

Invariant: nothing is made up. A run keeps token ids; they become texts where its model's tokenizer
is there, and counts where it is not. A trajectory that did not end by itself is censored. Facts
hold the texts of a transcript as token ids: whoever plays recorded transcripts to a predictor
service needs them, i.e. its figures and its tests.
"""

import gzip
import itertools
import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from treadle.common.v1.tokens_pb2 import TokenIds
from treadle.scheduler.v1 import scheduler_pb2
from treadle.telemetry.v1 import facts_pb2
from treadle_learned.transcript import Transcript, Turn, read_transcripts, write_transcripts
from treadle_runtime.facts import make_fact
from treadle_sidecar.convert import PROMPT_SHARE, ends
from treadle_sim.workloads.workload import Step, TrajectoryWork, read_traces, write_traces

from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.engines import DEFAULT_MODEL, default_model_folder
from treadle_cli.report.records import Run, TrajectoryRecord, read_run

ENDED = "finished"  # any other outcome: it was cut, and would have gone on


def read_source(path: Path, tokenizer: Path | None = None) -> list[Transcript]:
    """Return the transcripts of one source. tokenizer: folder of a run's model, where it is
    elsewhere. Raises UsageProblem, RecordError, TraceFileError, LearnedError."""
    if path.is_dir():
        run = read_run(path)
        return transcripts_of_run(run, tokenizer_of(run.record.model, tokenizer))
    if not path.exists():
        raise UsageProblem(
            f"{path} is not there: name trace files, transcript files or folders of finished runs"
        )
    if _holds_transcripts(path):
        return read_transcripts(path)
    return transcripts_of_works(read_traces(path), path.name)


def harvest(sources: Iterable[Path], out: Path, tokenizer: Path | None = None) -> dict[str, int]:
    """Write the transcripts of all sources to one file, and count them; tuples are questions with
    their answers. Raises what `read_source` raises, UsageProblem for a trajectory in two sources,
    OSError."""
    found: dict[str, Transcript] = {}
    for source in sources:
        for transcript in read_source(source, tokenizer):
            if transcript.trajectory_id in found:
                raise UsageProblem(
                    f"{source}: trajectory {transcript.trajectory_id!r} is in another source too"
                )
            found[transcript.trajectory_id] = transcript
    if not found:
        raise UsageProblem("no source holds a trajectory that sampled anything")
    transcripts = list(found.values())
    write_transcripts(transcripts, out)
    return {
        "trajectories": len(transcripts),
        "prompts": len({transcript.prompt_id for transcript in transcripts}),
        "tuples": sum(len(transcript.turns) for transcript in transcripts),
        "censored": sum(transcript.censored for transcript in transcripts),
        "with_text": sum(transcript.has_text for transcript in transcripts),
    }


def transcripts_of_works(
    works: Sequence[TrajectoryWork], rollout_id: str = "traces"
) -> list[Transcript]:
    """Return the trajectories of a workload as one rollout."""
    return [
        Transcript(
            f"{rollout_id}/{work.prompt_id}#{work.sample}",
            rollout_id,
            work.prompt_id,
            work.prompt_tokens,
            tuple(
                Turn(step.gen_tokens, step.obs_tokens, step.text, step.obs_text)
                for step in work.steps
            ),
            work.censored,
            work.prompt,
        )
        for work in works
    ]


def transcripts_of_run(run: Run, tokenizer: Tokenizer | None = None) -> list[Transcript]:
    """Return each play of a run as a rollout, without trajectories that sampled nothing. Prompts of
    another seed are other prompts."""
    return [
        _transcript(run, record, tokenizer) for record in run.trajectories if any(record.loss_mask)
    ]


def _transcript(run: Run, record: TrajectoryRecord, tokenizer: Tokenizer | None) -> Transcript:
    def decode(ids: list[int]) -> str:
        return "" if tokenizer is None else str(tokenizer.decode(ids, skip_special_tokens=True))

    pairs = zip(record.loss_mask, record.token_ids, strict=True)
    spans = [
        [token for _, token in each] for _, each in itertools.groupby(pairs, lambda pair: pair[0])
    ]
    prompt = [] if record.loss_mask[0] else spans.pop(0)
    sampled_and_answered: Iterable[tuple[list[int], list[int]]] = itertools.zip_longest(
        spans[::2], spans[1::2], fillvalue=[]
    )
    rollout_id = f"{run.record.run_id}/{record.arm}-{record.epoch}"
    return Transcript(
        f"{rollout_id}/{record.trajectory_id}",
        rollout_id,
        f"{run.record.seed}/{record.prompt_id}",
        len(prompt),
        tuple(
            Turn(len(ids), len(answer), decode(ids), decode(answer))
            for ids, answer in sampled_and_answered
        ),
        record.outcome != ENDED,
        decode(prompt),
        weight_version=record.version_spans[0].weight_version if record.version_spans else "",
    )


def tokenizer_of(model: str, named: Path | None = None) -> Tokenizer | None:
    """Return the tokenizer of a run's model, or of the folder `named` instead; None where it is not
    on this machine. Raises UsageProblem."""
    if named is not None and not (named / "tokenizer.json").is_file():
        raise UsageProblem(
            f"--tokenizer {named}: holds no tokenizer.json; name the folder of the run's model"
        )
    own = default_model_folder() if model == DEFAULT_MODEL else Path(model)
    file = (named or own) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def _holds_transcripts(path: Path) -> bool:
    """Return whether the first line is a transcript; `read_traces` reports what the line of another
    file must have."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            line = json.loads(next((line for line in lines if line.strip()), b"{}"))
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error):
        return False
    return isinstance(line, dict) and "turns" in line and "steps" not in line


def write_run(folder: Path, out: Path) -> int:
    """Write the trajectories of a run that sampled anything as a trace file (docs/traces.md), and
    count them. The samples of a prompt are numbered over all plays. Raises RecordError, OSError."""
    run = read_run(folder)
    sampled = [record for record in run.trajectories if any(record.loss_mask)]
    write_traces(out, works_of_run(run, sampled, tokenizer_of(run.record.model)))
    return len(sampled)


def works_of_run(
    run: Run, records: Iterable[TrajectoryRecord], tokenizer: Tokenizer | None = None
) -> list[TrajectoryWork]:
    """Return the work of trajectories that sampled something, with texts where there is a
    tokenizer."""
    numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    return [
        _work(record, _transcript(run, record, tokenizer), next(numbers[record.prompt_id]))
        for record in records
    ]


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


Tokenize = Callable[[str], Sequence[int]]


def facts_of(
    transcript: Transcript, tokenize: Tokenize, *, close: bool = True, most: int = 1 << 20
) -> Iterator[facts_pb2.Fact]:
    """Yield the facts of a transcript: opened, one fact for each step, closed. most: ids of each
    output and observation; the prompt may have PROMPT_SHARE times as many."""
    known: dict[str, Any] = {
        key: getattr(transcript, key)
        for key in ("trajectory_id", "rollout_id", "prompt_id", "prompt_tokens")
    }
    yield make_fact("scheduler", trajectory_opened=facts_pb2.TrajectoryOpened(**known))
    context_tokens = transcript.prompt_tokens
    for number, turn in enumerate(transcript.turns):
        tokens = facts_pb2.StepTokens(output=_ids(tokenize(turn.text), most))
        if number:
            before = transcript.turns[number - 1]
            tokens.observation.CopyFrom(_ids(tokenize(before.obs_text), most))
            tokens.observation_tokens = before.obs_tokens
        else:
            tokens.prompt.CopyFrom(_ids(tokenize(transcript.prompt), PROMPT_SHARE * most))
        context_tokens += tokens.observation_tokens
        finished = facts_pb2.StepFinished(
            step=_step(transcript, number),
            context_tokens=context_tokens,
            output_tokens=turn.gen_tokens,
            tokens=tokens,
        )
        yield make_fact("sidecar/e0", step_finished=finished)
        context_tokens += turn.gen_tokens
    if close:
        outcome = (
            scheduler_pb2.OUTCOME_TRUNCATED
            if transcript.censored
            else scheduler_pb2.OUTCOME_FINISHED
        )
        known |= {"gen_tokens": transcript.gen_tokens, "turns": len(transcript.turns)}
        closed = facts_pb2.TrajectoryClosed(**known, outcome=outcome)
        yield make_fact("scheduler", trajectory_closed=closed)


def prompt_started(
    transcript: Transcript, tokenize: Tokenize, *, most: int = 1 << 20
) -> facts_pb2.Fact:
    """Return the fact that the first step has started, with the prompt. most: as in `facts_of`."""
    prompt = _ids(tokenize(transcript.prompt), PROMPT_SHARE * most)
    started = facts_pb2.StepStarted(step=_step(transcript, 0), attempt=1, prompt=prompt)
    return make_fact("sidecar/e0", step_started=started)


def _step(transcript: Transcript, turn: int) -> facts_pb2.StepRef:
    name = transcript.trajectory_id
    return facts_pb2.StepRef(trajectory_id=name, turn=turn, ticket_id=f"{name}-{turn}")


def _ids(ids: Sequence[int], most: int) -> TokenIds:
    return TokenIds(int32_le=ends(array("i", ids), most).tobytes())
