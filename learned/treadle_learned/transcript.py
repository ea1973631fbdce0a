"""Transcripts: trajectories that have ended, with their texts where those are known, and files of
them.

A transcript records what happened; nothing here shortens it, though the recorder of the texts may
have. A file is JSON Lines, one transcript a line, gzip where the name ends in .gz. Invariants:
`read_transcripts` returns what `write_transcripts` wrote, and the same transcripts give the same
bytes; a file is written whole or not at all, and read whole or not at all; an error names its line
and field.
"""

import gzip
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
STRICT = ConfigDict(strict=True, extra="forbid")


class LearnedError(ValueError):
    """A file, backbone, checkpoint or training that cannot be used; the message states what is
    wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One step: sampled tokens, tokens that its tool's answer added, and the texts of both where
    they are known."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    gen_tokens: Count
    obs_tokens: Count = 0
    text: str = ""
    obs_text: str = ""


@dataclass(frozen=True)
class Transcript:
    """One trajectory. rollout_id: of the batch that it was sampled in, which with prompt_id makes
    its group. censored: it was cut and would have gone on. max_total_tokens: the cap on sampled
    tokens, 0 for none. weight_version: of the policy that sampled it, empty where it is not
    known."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    trajectory_id: Name
    rollout_id: str
    prompt_id: Name
    prompt_tokens: Count
    turns: Annotated[tuple[Turn, ...], Field(min_length=1)]
    censored: bool = False
    prompt: str = ""
    max_total_tokens: Count = 0
    weight_version: str = ""

    @cached_property
    def gen_tokens(self) -> int:
        """Return the tokens sampled over all turns."""
        return sum(turn.gen_tokens for turn in self.turns)

    @property
    def has_text(self) -> bool:
        """Return whether any text of the transcript is known."""
        return bool(self.prompt) or any(turn.text for turn in self.turns)


_ADAPTER = TypeAdapter(Transcript)


def version_number(weight_version: str) -> int | None:
    """Return the number of a weight version, as RL loops number them; None for other names, whose
    distance is not known."""
    return int(weight_version) if weight_version.isdecimal() else None


def write_transcripts(transcripts: Sequence[Transcript], path: Path) -> None:
    """Write transcripts to `path`, in place of what is there. Raises OSError."""
    content = b"".join(
        _ADAPTER.dump_json(each, exclude_defaults=True) + b"\n" for each in transcripts
    )
    replace_file(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_transcripts(path: Path) -> list[Transcript]:
    """Return the transcripts of a file, in its order; blank lines are skipped. Raises LearnedError,
    also for a file without transcripts and for a trajectory on two lines."""
    found: list[Transcript] = []
    lines: dict[str, int] = {}
    for number, content in _lines(path):
        if not content.strip():
            continue
        transcript = _parse(path, number, content)
        earlier = lines.setdefault(transcript.trajectory_id, number)
        if earlier != number:
            problem = f"{transcript.trajectory_id!r} is already on line {earlier}"
            raise LearnedError(f"{path}: line {number}: trajectory_id: {problem}")
        found.append(transcript)
    if not found:
        raise LearnedError(
            f"{path}: holds no transcript; `treadle predictor harvest` writes such files"
        )
    return found


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader finds the old content or the new one, also after a crash. mode:
    by default the file is for its user alone, since transcripts are conversations. Raises
    OSError."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).chmod(mode)
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise LearnedError(f"{path}: line {number + 1}: is no whole gzip file ({error})") from error
    except OSError as error:
        raise LearnedError(f"{path}: {error.strerror}") from error


def _parse(path: Path, number: int, content: bytes) -> Transcript:
    try:
        return _ADAPTER.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
        ).lstrip(".")
        place = f"{path}: line {number}: {field}: " if field else f"{path}: line {number}: "
        raise LearnedError(f"{place}{first['msg']}") from None
