"""`treadle predictor harvest`: trajectories of any source as one file of transcripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from treadle_learned.transcript import Transcript, write_transcripts

from treadle_cli.predictor.sources import read_source
from treadle_cli.problems import UsageProblem


def harvest(sources: Iterable[Path], out: Path, tokenizer: Path | None = None) -> dict[str, int]:
    """Writes the transcripts of all sources, and counts them. Raises what `read_source` does, UsageProblem for a
    trajectory that two of them have, OSError."""
    found: dict[str, Transcript] = {}
    for source in sources:
        for transcript in read_source(source, tokenizer):
            if transcript.trajectory_id in found:
                raise UsageProblem(f"{source}: trajectory {transcript.trajectory_id!r} is in another source too")
            found[transcript.trajectory_id] = transcript
    if not found:
        raise UsageProblem("no source holds a trajectory that sampled anything")
    write_transcripts(list(found.values()), out)
    return counts(list(found.values()))


def counts(transcripts: Sequence[Transcript]) -> dict[str, int]:
    """tuples: questions with their answers, one before each step (`treadle_learned.moments`); trajectories that were
    censored, and that have text."""
    return {
        "trajectories": len(transcripts),
        "prompts": len({transcript.prompt_id for transcript in transcripts}),
        "tuples": sum(len(transcript.turns) for transcript in transcripts),
        "censored": sum(transcript.censored for transcript in transcripts),
        "with_text": sum(transcript.has_text for transcript in transcripts),
    }
