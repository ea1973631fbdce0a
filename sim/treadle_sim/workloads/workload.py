"""The work of a rollout: trajectories as sequences of steps; and trace files, which hold them as JSON Lines.

Lengths are facts of the workload: a policy never changes them, and sees them only through a predictor.

A trace file holds one trajectory a line, and is compressed with gzip if its name ends in .gz (docs/traces.md).
`read_traces` returns what `write_traces` wrote. A file is read as a whole or not at all, and an error names the line
and field. Fields that are not in the format (a model's name, a date) are ignored.
"""

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: tokens generated, tokens that the tool's answer adds to the context, seconds the tool takes.

    The last step's tool runs too (it ends the trajectory), but nothing reads its tokens. Texts are for training
    predictors; empty where they are not known.
    """

    gen_tokens: int
    obs_tokens: int
    tool_s: float
    text: str = ""
    obs_text: str = ""


@dataclass(frozen=True, slots=True)
class TrajectoryWork:
    """One sample of a prompt. censored: cut by a limit, so that it would have been at least this long.

    hardware_tags: that its engines must carry; none: any engine will do. prompt: its text, empty if it is not known.
    """

    prompt_id: str
    sample: int
    prompt_tokens: int
    steps: tuple[Step, ...]
    reward: float | None = None
    censored: bool = False
    hardware_tags: tuple[str, ...] = ()
    prompt: str = ""

    @property
    def gen_tokens(self) -> int:
        return sum(step.gen_tokens for step in self.steps)

    @property
    def tool_s(self) -> float:
        return sum(step.tool_s for step in self.steps)

    @property
    def final_context_tokens(self) -> int:
        """Tokens of the context at the end, the last tool's answer included."""
        return self.prompt_tokens + sum(step.gen_tokens + step.obs_tokens for step in self.steps)


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch whose makespan counts. max_total_tokens: most generated tokens of one trajectory, 0 for no cap."""

    name: str
    trajectories: tuple[TrajectoryWork, ...]
    max_total_tokens: int = 0

    @property
    def gen_tokens(self) -> int:
        return sum(work.gen_tokens for work in self.trajectories)


def groups(works: Sequence[TrajectoryWork]) -> dict[str, list[TrajectoryWork]]:
    """The samples of each prompt, in the order of the workload."""
    by_prompt: dict[str, list[TrajectoryWork]] = {}
    for work in works:
        by_prompt.setdefault(work.prompt_id, []).append(work)
    return by_prompt


class TraceFileError(ValueError):
    """A line that is no trajectory. `line` counts from 1, 0 for the file as a whole; `field` is its path in the line.

    `reason` is the message without the file's name.
    """

    def __init__(self, path: Path, line: int, field: str, description: str) -> None:
        place = ": ".join([*([f"line {line}"] if line else []), *([field] if field else [])])
        self.reason = f"{place}: {description}" if place else description
        super().__init__(f"{path}: {self.reason}")
        self.line = line
        self.field = field


class _FieldError(Exception):
    """A field's path, and what is wrong with it."""


def read_traces(path: Path) -> tuple[TrajectoryWork, ...]:
    """The trajectories of a file in its order, without blank lines.

    Raises TraceFileError (also for a file without trajectories, or with a sample of a prompt twice) and OSError.
    """
    works: list[TrajectoryWork] = []
    lines: dict[tuple[str, int], int] = {}
    for number, text in _read_lines(path):
        if not text.strip():
            continue
        try:
            work = _parse_work(text)
            earlier = lines.setdefault((work.prompt_id, work.sample), number)
            if earlier != number:
                raise _FieldError("sample", f"{work.sample} of prompt {work.prompt_id!r} is already on line {earlier}")
        except _FieldError as error:
            raise TraceFileError(path, number, *error.args) from None
        works.append(work)
    if not works:
        raise TraceFileError(path, 0, "", "holds no trajectory")
    return tuple(works)


def write_traces(path: Path, works: Iterable[TrajectoryWork]) -> None:
    """Write a file that `read_traces` reads; the same works give the same bytes. Raises OSError."""
    content = "".join(json.dumps(_render_work(work), separators=(",", ":")) + "\n" for work in works).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        # Lines end with \n alone: JSON strings may hold other line separators.
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                number += 1
                yield number, line.decode()
    except UnicodeDecodeError:
        raise TraceFileError(path, number, "", "must be UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceFileError(path, number, "", f"is no whole gzip file ({error})") from None


def _parse_work(text: str) -> TrajectoryWork:
    try:
        line = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _FieldError("", f"must be JSON ({error})") from None
    if not isinstance(line, dict):
        raise _FieldError("", "must be a JSON object")
    prompt_id = _field(line, "prompt_id", lambda value: _is_text(value) and value, "a non-empty string")
    steps = _field(line, "steps", lambda value: isinstance(value, list) and value, "a list of at least one step")
    reward = _field(line, "reward", lambda value: value is None or _is_number(value), "a finite number or null", None)
    return TrajectoryWork(
        prompt_id=prompt_id,
        sample=_count(line, "sample", 0),
        prompt_tokens=_count(line, "prompt_tokens", 1),
        steps=tuple(_parse_step(step, f"steps[{index}]") for index, step in enumerate(steps)),
        reward=None if reward is None else float(reward),
        censored=_field(line, "censored", lambda value: isinstance(value, bool), "true or false", False),
        prompt=_field(line, "prompt", _is_text, "a text", ""),
    )


def _parse_step(step: object, at: str) -> Step:
    if not isinstance(step, dict):
        raise _FieldError(at, "must be a JSON object")
    return Step(
        _count(step, "gen_tokens", 1, at),
        _count(step, "obs_tokens", 0, at),
        float(
            _field(
                step, "tool_latency_s", lambda value: _is_number(value) and value >= 0, "a finite number >= 0", at=at
            )
        ),
        _field(step, "text", _is_text, "a text", "", at=at),
        _field(step, "obs_text", _is_text, "a text", "", at=at),
    )


def _field(
    line: Mapping[str, Any],
    name: str,
    is_valid: Callable[[Any], object],
    wanted: str,
    *default: object,
    at: str = "",
) -> Any:
    """The value of a field, or its default. Raises _FieldError if it is missing without a default, or not as wanted."""
    path = f"{at}.{name}" if at else name
    if name not in line and not default:
        raise _FieldError(path, "is missing")
    value = line.get(name, *default)
    if not is_valid(value):
        raise _FieldError(path, f"must be {wanted}, is {value!r}")
    return value


def _count(line: Mapping[str, Any], name: str, least: int, at: str = "") -> int:
    def is_valid(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return int(_field(line, name, is_valid, f"a whole number >= {least}", at=at))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _render_work(work: TrajectoryWork) -> dict[str, Any]:
    line: dict[str, Any] = {"prompt_id": work.prompt_id, "sample": work.sample, "prompt_tokens": work.prompt_tokens}
    line["reward"] = work.reward
    if work.censored:
        line["censored"] = True
    if work.prompt:
        line["prompt"] = work.prompt
    line["steps"] = [
        {
            "gen_tokens": step.gen_tokens,
            "obs_tokens": step.obs_tokens,
            "tool_latency_s": step.tool_s,
            **{name: text for name, text in (("text", step.text), ("obs_text", step.obs_text)) if text},
        }
        for step in work.steps
    ]
    return line
