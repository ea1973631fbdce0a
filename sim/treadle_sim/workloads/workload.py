"""Work of a rollout: trajectories as sequences of steps, and trace files, which hold them as JSON
Lines.

Lengths are facts of the workload: a policy never changes them, and sees them only through a
predictor.

A trace file holds one trajectory a line, and may be compressed with gzip (docs/traces.md).
`read_traces` returns what `write_traces` wrote. A file is read as a whole or not at all, and an
error names the line and field. Fields that are not in the format (a model's name, a date) are
ignored. The annotations check the content of a file; works that code makes are not checked.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, TypeAdapter, ValidationError

# What files may hold, of profiles too.
Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
PositiveCount = Annotated[int, Field(strict=True, ge=1)]
FiniteNumber = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def describe_first(error: ValidationError) -> tuple[str, str]:
    """Return the path of the first wrong field, as in `steps[2].obs_tokens`, and what is wrong with
    its value."""
    problem = error.errors(include_url=False)[0]
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]
    ).removeprefix(".")
    if problem["type"] == "missing":
        return path, "is missing"
    if problem["type"] in ("dataclass_type", "model_type"):
        return path, "must be a JSON object"
    expected = re.sub(r"^(Value error, |\w+ should (?=be|have))", "", problem["msg"])
    return (
        path,
        f"{expected if expected.startswith('must') else f'must {expected}'}, is "
        f"{problem['input']!r}",
    )


def _check_text(value: object) -> str:
    """Return a text as it is: unlike pydantic's own check, this one lets the lone surrogates of a
    tool's output pass."""
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


Text = Annotated[str, PlainValidator(_check_text)]


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: tokens generated, tokens that the tool's answer adds to the context, seconds of the
    tool.

    The last step's tool runs too (it ends the trajectory), but nothing reads its tokens. Texts are
    for training predictors; empty where they are not known.
    """

    gen_tokens: PositiveCount
    obs_tokens: Count
    tool_s: Annotated[FiniteNumber, Field(ge=0, alias="tool_latency_s")]
    text: Text = ""
    obs_text: Text = ""


@dataclass(frozen=True, slots=True)
class TrajectoryWork:
    """One sample of a prompt. censored: cut by a limit, so that it would have been at least this
    long.

    hardware_tags: tags that its engines must carry; none: any engine will do. prompt: its text,
    empty if it is not known.
    """

    prompt_id: Name
    sample: Count
    prompt_tokens: PositiveCount
    steps: Annotated[tuple[Step, ...], Field(min_length=1)]
    reward: FiniteNumber | None = None
    censored: Annotated[bool, Field(strict=True)] = False
    # No field of a trace file: it is not written, and whatever a file has of that name is ignored.
    hardware_tags: Annotated[
        tuple[str, ...], BeforeValidator(lambda given: ()), Field(exclude=True)
    ] = ()
    prompt: Text = ""

    @property
    def gen_tokens(self) -> int:
        return sum(step.gen_tokens for step in self.steps)

    @property
    def tool_s(self) -> float:
        return sum(step.tool_s for step in self.steps)

    @property
    def final_context_tokens(self) -> int:
        """Return the tokens of the context at the end, the last tool's answer included."""
        return self.prompt_tokens + sum(step.gen_tokens + step.obs_tokens for step in self.steps)


@dataclass(frozen=True, slots=True)
class Workload:
    """Batch of trajectories whose makespan counts. max_total_tokens: most generated tokens of one
    trajectory, 0 for no cap. group_keep: a prompt's other samples are ended once so many have
    finished; 0: all are needed."""

    name: str
    trajectories: tuple[TrajectoryWork, ...]
    max_total_tokens: int = 0
    group_keep: int = 0

    @property
    def gen_tokens(self) -> int:
        return sum(work.gen_tokens for work in self.trajectories)


def groups(works: Sequence[TrajectoryWork]) -> dict[str, list[TrajectoryWork]]:
    """Return the samples of each prompt, in the order of the workload."""
    by_prompt: dict[str, list[TrajectoryWork]] = {}
    for work in works:
        by_prompt.setdefault(work.prompt_id, []).append(work)
    return by_prompt


class TraceFileError(ValueError):
    """Error for a line that is no trajectory. `line` counts from 1, 0 for the file as a whole;
    `field` is its path in the line.

    `reason` is the message without the file's name.
    """

    def __init__(self, path: Path, line: int, field: str, description: str) -> None:
        place = ": ".join([*([f"line {line}"] if line else []), *([field] if field else [])])
        self.reason = f"{place}: {description}" if place else description
        super().__init__(f"{path}: {self.reason}")
        self.line = line
        self.field = field


_LINE = TypeAdapter(TrajectoryWork)
GZIP = b"\x1f\x8b"  # the first bytes of a file of gzip


def read_traces(path: Path) -> tuple[TrajectoryWork, ...]:
    """Return the trajectories of a file in its order, without blank lines.

    Raises TraceFileError (also for a file without trajectories, or with a sample of a prompt twice)
    and OSError.
    """
    works: list[TrajectoryWork] = []
    lines: dict[tuple[str, int], int] = {}
    for number, line in read_json_lines(path):
        try:
            work = _LINE.validate_python(line)
        except ValidationError as error:
            raise TraceFileError(path, number, *describe_first(error)) from None
        earlier = lines.setdefault((work.prompt_id, work.sample), number)
        if earlier != number:
            already = f"{work.sample} of prompt {work.prompt_id!r} is already on line {earlier}"
            raise TraceFileError(path, number, "sample", already)
        works.append(work)
    if not works:
        raise TraceFileError(path, 0, "", "holds no trajectory")
    return tuple(works)


def write_traces(path: Path, works: Iterable[TrajectoryWork]) -> None:
    """Write a file that `read_traces` reads; the same works give the same bytes. Raises OSError."""
    lines = (_LINE.dump_python(work, by_alias=True, exclude_defaults=True) for work in works)
    content = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


class CutLineError(TraceFileError):
    """Error for a last line without its end, as in a log that is still written."""


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each line's number from 1 and its JSON, without blank lines. A field that is null is
    left out, since writers take it for one that is absent.

    Raises TraceFileError, CutLineError, OSError.
    """
    number, line = 0, b""
    try:
        with path.open("rb") as file:
            is_gzip = path.suffix == ".gz" or file.peek(2)[:2] == GZIP
            # Lines end with \n alone: JSON strings may hold other line separators.
            for line in gzip.GzipFile(fileobj=file) if is_gzip else file:
                number += 1
                if line.strip():
                    # A mark of the byte order is how some editors begin UTF-8
                    yield number, without_nulls(json.loads(line.decode("utf-8-sig")))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        wrong = f"must be JSON ({error})" if is_text else "must be UTF-8"
        if not line.endswith(b"\n") and not isinstance(error, RecursionError):
            cut = f"{wrong}; the file ends within this line: remove the line"
            raise CutLineError(path, number, "", cut) from None
        raise TraceFileError(path, number, "", wrong) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceFileError(path, number, "", f"is no whole gzip file ({error})") from None


def without_nulls(value: Any) -> Any:
    """Return JSON without the fields that are null; lists of plain values stay as they are."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [without_nulls(each) for each in value]
    return value
