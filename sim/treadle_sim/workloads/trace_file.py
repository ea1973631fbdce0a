"""Trace files: JSON Lines, one trajectory a line, gzip where the name ends in .gz (docs/traces.md).

Invariants: what `write_traces` wrote, `read_traces` gives back equal; a file is taken whole or not at all; what is
wrong is said with its line and field. Fields that are not in the format (a model's name, a date) are passed over.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle_sim.workloads.workload import Step, TrajectoryWork


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
    """A field and what it must be."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(field, description)
        self.field = field
        self.description = description


def read_traces(path: Path) -> tuple[TrajectoryWork, ...]:
    """The trajectories of a file in its order; blank lines are passed over.

    Raises TraceFileError (also for a file without trajectories, or with a sample of a prompt twice) and OSError.
    """
    works: list[TrajectoryWork] = []
    lines: dict[tuple[str, int], int] = {}
    for number, text in _lines(path):
        if not text.strip():
            continue
        try:
            work = _work(_parsed(text))
            earlier = lines.setdefault((work.prompt_id, work.sample), number)
            if earlier != number:
                raise _FieldError("sample", f"{work.sample} of prompt {work.prompt_id!r} is already on line {earlier}")
        except _FieldError as error:
            raise TraceFileError(path, number, error.field, error.description) from None
        works.append(work)
    if not works:
        raise TraceFileError(path, 0, "", "holds no trajectory")
    return tuple(works)


def write_traces(path: Path, works: Iterable[TrajectoryWork]) -> None:
    """Writes a file that `read_traces` reads; the same works give the same bytes. Raises OSError."""
    content = "".join(json.dumps(_line(work), separators=(",", ":")) + "\n" for work in works).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
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


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        line = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _FieldError("", f"must be JSON ({error})") from None
    if not isinstance(line, dict):
        raise _FieldError("", "must be a JSON object")
    return line


def _work(line: Mapping[str, Any]) -> TrajectoryWork:
    prompt_id = _present(line, "prompt_id", "")
    if not isinstance(prompt_id, str) or not prompt_id:
        raise _FieldError("prompt_id", f"must be a non-empty string, is {prompt_id!r}")
    steps = _present(line, "steps", "")
    if not isinstance(steps, list) or not steps:
        raise _FieldError("steps", "must be a list of at least one step")
    censored = line.get("censored", False)
    if not isinstance(censored, bool):
        raise _FieldError("censored", f"must be true or false, is {censored!r}")
    reward = line.get("reward")
    return TrajectoryWork(
        prompt_id=prompt_id,
        sample=_count(line, "sample", "", least=0),
        prompt_tokens=_count(line, "prompt_tokens", "", least=1),
        steps=tuple(_step(step, f"steps[{index}]") for index, step in enumerate(steps)),
        reward=None if reward is None else _number(line, "reward", ""),
        censored=censored,
        prompt=_text(line, "prompt", ""),
    )


def _step(step: object, at: str) -> Step:
    if not isinstance(step, dict):
        raise _FieldError(at, "must be a JSON object")
    tool_s = _number(step, "tool_latency_s", at)
    if tool_s < 0.0:
        raise _FieldError(f"{at}.tool_latency_s", f"must be >= 0, is {tool_s}")
    return Step(
        _count(step, "gen_tokens", at, least=1),
        _count(step, "obs_tokens", at, least=0),
        tool_s,
        _text(step, "text", at),
        _text(step, "obs_text", at),
    )


def _text(line: Mapping[str, Any], name: str, at: str) -> str:
    value = line.get(name, "")
    if not isinstance(value, str):
        raise _FieldError(f"{at}.{name}" if at else name, f"must be a text, is {value!r}")
    return value


def _present(line: Mapping[str, Any], name: str, at: str) -> Any:
    if name not in line:
        raise _FieldError(f"{at}.{name}" if at else name, "is missing")
    return line[name]


def _count(line: Mapping[str, Any], name: str, at: str, *, least: int) -> int:
    value = _present(line, name, at)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _FieldError(f"{at}.{name}" if at else name, f"must be a whole number >= {least}, is {value!r}")
    return value


def _number(line: Mapping[str, Any], name: str, at: str) -> float:
    value = _present(line, name, at)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _FieldError(f"{at}.{name}" if at else name, f"must be a finite number, is {value!r}")
    return float(value)


def _line(work: TrajectoryWork) -> dict[str, Any]:
    line: dict[str, Any] = {"prompt_id": work.prompt_id, "sample": work.sample, "prompt_tokens": work.prompt_tokens}
    line["reward"] = work.reward
    if work.censored:
        line["censored"] = True
    if work.prompt:
        line["prompt"] = work.prompt
    line["steps"] = [_step_line(step) for step in work.steps]
    return line


def _step_line(step: Step) -> dict[str, Any]:
    line: dict[str, Any] = {
        "gen_tokens": step.gen_tokens,
        "obs_tokens": step.obs_tokens,
        "tool_latency_s": step.tool_s,
    }
    if step.text:
        line["text"] = step.text
    if step.obs_text:
        line["obs_text"] = step.obs_text
    return line
