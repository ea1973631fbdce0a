"""What a learned predictor is trained on: trajectories that have ended, with what they said where that is known.

Invariant: a transcript is as it was; nothing here cuts it. Texts may have been cut by who recorded them.

Transcript files: JSON Lines, one transcript a line, gzip where the name ends in .gz.

Invariants: what `write_transcripts` wrote, `read_transcripts` gives back equal, and the same transcripts give the same
bytes; a file is written whole or not at all and taken whole or not at all; what is wrong is said with its line and
field."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from treadle_learned.errors import TranscriptFileError


@dataclass(frozen=True, slots=True)
class Turn:
    """One step: tokens sampled, tokens that its tool's answer added, and the texts of both where they are known."""

    gen_tokens: int
    obs_tokens: int = 0
    text: str = ""
    obs_text: str = ""


@dataclass(frozen=True)
class Transcript:
    """One trajectory. rollout_id: of the batch it was sampled in, which with prompt_id makes its group. censored: it
    was cut and would have gone on. max_total_tokens: the cap on sampled tokens, 0 for none. weight_version: the
    policy's that sampled it, empty where it is not known."""

    trajectory_id: str
    rollout_id: str
    prompt_id: str
    prompt_tokens: int
    turns: tuple[Turn, ...]
    censored: bool = False
    prompt: str = ""
    max_total_tokens: int = 0
    weight_version: str = ""

    @cached_property
    def gen_tokens(self) -> int:
        """Sampled over all turns."""
        return sum(turn.gen_tokens for turn in self.turns)

    @property
    def version_number(self) -> int | None:
        """See `version_number`."""
        return version_number(self.weight_version)

    @property
    def has_text(self) -> bool:
        """Whether it says anything at all."""
        return bool(self.prompt) or any(turn.text for turn in self.turns)


def version_number(weight_version: str) -> int | None:
    """Of weights that are numbered, as RL loops number them; None of others, whose distance nobody knows."""
    return int(weight_version) if weight_version.isdecimal() else None


Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _TurnLine(_Strict):
    gen_tokens: Count
    obs_tokens: Count = 0
    text: str = ""
    obs_text: str = ""


class _Line(_Strict):
    trajectory_id: Name
    rollout_id: str
    prompt_id: Name
    prompt_tokens: Count
    turns: Annotated[list[_TurnLine], Field(min_length=1)]
    censored: bool = False
    prompt: str = ""
    max_total_tokens: Count = 0
    weight_version: str = ""


def write_transcripts(transcripts: Sequence[Transcript], path: Path) -> None:
    """Takes the place of what is at `path`, once it is whole. Raises OSError."""
    lines = [
        _Line.model_validate(asdict(each) | {"turns": [asdict(turn) for turn in each.turns]}) for each in transcripts
    ]
    content = "".join(line.model_dump_json(exclude_defaults=True) + "\n" for line in lines).encode()
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).chmod(0o644)
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)


def read_transcripts(path: Path) -> list[Transcript]:
    """In the file's order; blank lines are passed over. Raises TranscriptFileError, also for a file without transcripts
    or with one that stands twice."""
    found: list[Transcript] = []
    lines: dict[str, int] = {}
    for number, content in _lines(path):
        if not content.strip():
            continue
        transcript = _transcript(path, number, content)
        earlier = lines.setdefault(transcript.trajectory_id, number)
        if earlier != number:
            said = f"{transcript.trajectory_id!r} is already on line {earlier}"
            raise TranscriptFileError(f"{path}: line {number}: trajectory_id: {said}")
        found.append(transcript)
    if not found:
        raise TranscriptFileError(f"{path}: holds no transcript; `treadle predictor harvest` writes such files")
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TranscriptFileError(f"{path}: line {number + 1}: is no whole gzip file ({error})") from error
    except OSError as error:
        raise TranscriptFileError(f"{path}: {error.strerror}") from error


def _transcript(path: Path, number: int, content: bytes) -> Transcript:
    try:
        line = _Line.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        place = f"{path}: line {number}: {field}: " if field else f"{path}: line {number}: "
        raise TranscriptFileError(f"{place}{first['msg']}") from None
    fields = {name: getattr(line, name) for name in _Line.model_fields if name != "turns"}
    return Transcript(**fields, turns=tuple(Turn(**turn.model_dump()) for turn in line.turns))
