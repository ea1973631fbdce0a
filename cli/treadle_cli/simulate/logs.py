"""Read what a framework has logged of a training step as work to simulate (docs/simulator.md).

Each format becomes trajectories of turns with tokens and tool seconds. What a log does not hold is
an assumption, which is printed with every result, and so is how many lines were left out and why:
requests that failed or never ended, and a last line that is cut. An error in any other line, which
names the line and the field, refuses the file.

Written by: verl 0.9.1 (`trainer.rollout_data_dir`), slime 0.3 (`--save-debug-rollout-data`),
prime-rl 0.8 and verifiers 0.4 (`train_rollouts.jsonl`, `traces.jsonl`), any gateway that logs
OpenAI requests, LiteLLM's standard payload among them, and Treadle's trace files.
"""

import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from treadle_sim.engine_model import EngineModel
from treadle_sim.workloads.workload import (
    CutLineError,
    Step,
    TraceFileError,
    TrajectoryWork,
    describe_first,
    read_json_lines,
    read_traces,
    without_nulls,
)

from treadle_cli.exits import UsageProblem

FORMATS = ("jsonl", "openai", "prime-rl", "slime", "verl")
# the simulated system that stands for a framework
WAYS = {"verl": "verl", "slime": "slime", "prime-rl": "sticky"}
T = TypeVar("T")
# How many of a unit are a second, and from where on a number of them is a time of today: no
# number of seconds is that large.
UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
LONGEST_S = 1e8  # three years: a request that seems to take longer lacks one of its times
# Words of `status` for a request that gave no answer
FAILED = frozenset(
    (
        *("failure", "failed", "fail", "error", "errored", "cancelled", "canceled", "aborted"),
        *("timeout", "timed_out"),
    )
)
FAILED_CODE = 400  # of HTTP, and all above
ERRORS = ("error", "error_str", "exception")  # fields that hold something where a request failed


def _refuse_boolean(value: object) -> object:
    """Refuse what Python counts as 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


def _unix_seconds(value: object) -> object:
    """Return a time as seconds: of another unit, which its size tells, or of ISO 8601 (in UTC,
    where it names no zone)."""
    if isinstance(value, str):
        try:
            value = float(value) if value.replace(".", "", 1).isdigit() else _of_date(value)
        except ValueError:
            raise ValueError("must be unix seconds, or a time of ISO 8601") from None
    if isinstance(value, int | float):
        return next((value / unit for least, unit in UNITS if abs(value) >= least), value)
    return value


def _of_date(text: str) -> float:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


Seconds = Annotated[float, BeforeValidator(_refuse_boolean), Field(allow_inf_nan=False)]
UnixSeconds = Annotated[Seconds, BeforeValidator(_unix_seconds)]
Count = Annotated[int, BeforeValidator(_refuse_boolean), Field(ge=0)]
Name = Annotated[
    str, BeforeValidator(lambda given: str(given) if isinstance(given, int) else given)
]


@dataclass(frozen=True)
class Recorded:
    """Makespan that the log itself records of the step. system: the simulated system that did the
    same; empty: none did."""

    name: str
    makespan_s: float
    system: str


@dataclass(frozen=True)
class Log:
    """A logged step. way: the simulated system that stands for how it was run, empty where the log
    does not name it. model, gpus: of the engines, where the log has them."""

    name: str
    works: tuple[TrajectoryWork, ...]
    way: str
    recorded: tuple[Recorded, ...]
    assumptions: tuple[str, ...]
    model: EngineModel | None = None
    gpus: int = 0


def read_log(path: Path, kind: str, tokenizer: Path | None) -> Log:
    """Return the logged step of a file. kind: of FORMATS. tokenizer: the folder of the model, which
    verl's texts need. Raises UsageProblem, TraceFileError."""
    if kind not in FORMATS:
        raise UsageProblem(f"--format: there is no {kind!r}; take one of {', '.join(FORMATS)}")
    if tokenizer is not None and kind != "verl":
        raise UsageProblem("--tokenizer is for --format verl: other logs count tokens themselves")
    try:
        if kind == "jsonl":
            works, recorded_s, assumptions = _read_traces(path)
        elif kind in ("openai", "prime-rl"):
            left_out: Counter[str] = Counter()
            read = _openai_calls if kind == "openai" else _traced_calls
            works, recorded_s, assumptions = _assemble(path, read(path, left_out), left_out)
        elif kind == "slime":
            works, recorded_s, assumptions = _read_slime(path)
        else:
            works, recorded_s, assumptions = _read_verl(path, tokenizer)
    except OSError as error:
        raise UsageProblem(f"--from-log {path}: {error.strerror or error}") from error
    way = WAYS.get(kind, "")
    recorded = (Recorded("the log", recorded_s, way),) if recorded_s > 0.0 else ()
    return Log(path.name, tuple(works), way, recorded, tuple(assumptions))


# works, seconds of the whole step or 0.0, assumptions
Read = tuple[Sequence[TrajectoryWork], float, list[str]]


class _Times(BaseModel):
    """Optional fields of a trace file beside its format: when the trajectory began and ended, on
    any one clock."""

    started_s: Seconds | None = None
    finished_s: Seconds | None = None


def _read_traces(path: Path) -> Read:
    works = read_traces(path)
    times = {n: _checked(_TIMES, path, n, line) for n, line in read_json_lines(path)}
    for number, each in times.items():
        if (each.finished_s or 0.0) < (each.started_s or 0.0) and each.finished_s is not None:
            before = f"must not be before started_s ({each.started_s:g}), is {each.finished_s:g}"
            raise TraceFileError(path, number, "finished_s", before)
    ends = [each.finished_s for each in times.values() if each.finished_s is not None]
    starts = [each.started_s for each in times.values() if each.started_s is not None]
    # Times that some lines lack may be on another clock than 0
    if len(ends) < len(works) or 0 < len(starts) < len(works):
        return works, 0.0, []
    return works, max(ends) - min(starts, default=0.0), []


@dataclass(frozen=True)
class _Call:
    """One request of a model: tokens of its whole context, tokens sampled, unix seconds, None where
    the log has none."""

    prompt_tokens: int
    completion_tokens: int
    started_s: float | None
    ended_s: float | None


@dataclass
class _Session:
    """Calls of one trajectory. prompt_id: empty where the log names none."""

    prompt_id: str
    calls: list[_Call] = field(default_factory=list)
    reward: float | None = None
    censored: bool = False


class _Request(BaseModel):
    """A line of a gateway's log, of a request that did not fail."""

    session_id: Annotated[
        Name, Field(min_length=1, validation_alias=AliasChoices("session_id", "trace_id"))
    ]
    started_s: Annotated[
        UnixSeconds, Field(validation_alias=AliasChoices("started_at", "startTime"))
    ]
    ended_s: Annotated[
        UnixSeconds | None, Field(validation_alias=AliasChoices("ended_at", "endTime"))
    ] = None
    prompt_tokens: Annotated[
        Count,
        Field(validation_alias=AliasChoices(AliasPath("usage", "prompt_tokens"), "prompt_tokens")),
    ]
    completion_tokens: Annotated[
        Count,
        Field(
            validation_alias=AliasChoices(
                AliasPath("usage", "completion_tokens"), "completion_tokens"
            )
        ),
    ]
    prompt_id: Name = ""
    id: Name = ""


def _openai_calls(path: Path, left_out: Counter[str]) -> dict[str, _Session]:
    sessions: dict[str, _Session] = {}
    seen: set[object] = set()
    for number, line in _lines(path, left_out):
        if isinstance(line, dict):
            line = {name: value for name, value in line.items() if value != ""}
            if why := _why_without_answer(line):
                left_out[why] += 1
                continue
        request = _checked(_REQUEST, path, number, line)
        if not request.completion_tokens:
            left_out["requests that sampled no token"] += 1
            continue
        if not request.prompt_tokens:
            raise TraceFileError(path, number, "prompt_tokens", "must be at least 1, is 0")
        ended_s = request.ended_s
        assert ended_s is not None
        if ended_s < request.started_s:
            before = f"must not be before started_at ({request.started_s:f}), is {ended_s:f}"
            raise TraceFileError(path, number, "ended_at", before)
        tokens = (request.prompt_tokens, request.completion_tokens)
        call = _Call(*tokens, request.started_s, ended_s)
        # A gateway may hand a request to two loggers that write the same file
        whole = hashlib.blake2b(json.dumps(line, sort_keys=True).encode()).digest()
        same = (request.session_id, request.id, call) if request.id else whole
        if same in seen:
            left_out["repeated lines"] += 1
            continue
        seen.add(same)
        session = sessions.setdefault(request.session_id, _Session(""))
        session.prompt_id = session.prompt_id or request.prompt_id
        session.calls.append(call)
    return sessions


def _why_without_answer(line: dict[str, Any]) -> str:
    """Return why the request of a line gave no answer; empty where it gave one."""
    status = line.get("status", line.get("status_code", ""))
    word = str(status).lower()
    if word in FAILED or (word.isdigit() and int(word) >= FAILED_CODE):
        return "failed requests"
    if any(line.get(name) for name in ERRORS):
        return "failed requests"
    began = "started_at" in line or "startTime" in line
    if began and "ended_at" not in line and "endTime" not in line:
        return "requests without an end"
    return ""


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Usage(_Lenient):
    prompt_tokens: Count  # without those from a cache
    completion_tokens: Count
    cached_input_tokens: Count | None = None


class _Span(_Lenient):
    start: UnixSeconds = 0.0
    end: UnixSeconds = 0.0

    def times(self) -> tuple[float, float] | tuple[None, None]:
        """Return begin and end; none where one of them was not set, which stands as 0."""
        known = self.end > 0.0 and self.end - self.start < LONGEST_S
        return (self.start, self.end) if known else (None, None)


class _TracedCall(_Lenient):
    usage: _Usage | None = None
    time: _Span = Field(default_factory=_Span)


class _Task(_Lenient):
    key: str | None = None
    hash: str | None = None


class _Reward(_Lenient):
    score: Seconds
    weight: Seconds = 1.0


class _Trace(_Lenient):
    """Fields of a trace of verifiers that are read."""

    id: str
    task: _Task
    calls: list[_TracedCall]
    rewards: dict[str, _Reward | None] = Field(default_factory=dict)
    stop_condition: str | None = None
    is_timeout: bool = False


class _Episode(_Lenient):
    """A line of verifiers' traces.jsonl; one of prime-rl is a trace alone."""

    traces: list[_Trace]


def _traced_calls(path: Path, left_out: Counter[str]) -> dict[str, _Session]:
    sessions: dict[str, _Session] = {}
    for number, line in _lines(path, left_out):
        is_episode = isinstance(line, dict) and "traces" in line
        traces = (
            _checked(_EPISODE, path, number, line).traces
            if is_episode
            else [_checked(_TRACE, path, number, line)]
        )
        for trace in traces:
            session = _Session(trace.task.key or trace.task.hash or "")
            if not trace.calls:
                left_out["trajectories without a request"] += 1
            for call in trace.calls:
                if call.usage is None or not call.usage.completion_tokens:
                    left_out["requests that sampled no token"] += 1
                    continue
                started_s, ended_s = call.time.times()
                if started_s is not None and ended_s is not None and ended_s < started_s:
                    before = f"must not be before start ({started_s:f}), is {ended_s:f}"
                    raise TraceFileError(path, number, "calls.time.end", before)
                context = call.usage.prompt_tokens + (call.usage.cached_input_tokens or 0)
                tokens = (context, call.usage.completion_tokens)
                session.calls.append(_Call(*tokens, started_s, ended_s))
            session.censored = trace.is_timeout or (trace.stop_condition or "").startswith("max_")
            scores = [
                each.score * each.weight for each in trace.rewards.values() if each is not None
            ]
            session.reward = sum(scores) if scores else None
            if trace.id in sessions:
                raise TraceFileError(
                    path, number, "id", f"{trace.id!r} is on an earlier line already"
                )
            sessions[trace.id] = session
    return sessions


def _assemble(path: Path, sessions: dict[str, _Session], left_out: Counter[str]) -> Read:
    """Return trajectories made of calls: a tool's answer is by how much the context grew, its
    seconds the time between."""
    works: list[TrajectoryWork] = []
    samples: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    odd: Counter[str] = Counter()
    every = [call for session in sessions.values() for call in session.calls]
    if not every:
        raise TraceFileError(
            path,
            0,
            "",
            f"holds no request that sampled a token{_counted(left_out, '; left out: ')}",
        )
    for name, session in sessions.items():
        calls = session.calls
        if all(call.started_s is not None for call in calls):
            calls = sorted(calls, key=lambda call: call.started_s or 0.0)
        if not calls:
            continue
        steps = [
            _step(call, following, odd)
            for call, following in itertools.zip_longest(calls, calls[1:])
        ]
        prompt_id = session.prompt_id or name
        work = TrajectoryWork(
            prompt_id,
            next(samples[prompt_id]),
            max(1, calls[0].prompt_tokens),
            tuple(steps),
            session.reward,
            session.censored,
        )
        works.append(work)
    starts = [call.started_s for call in every if call.started_s is not None]
    ends = [call.ended_s for call in every if call.ended_s is not None]
    timed = len(starts) == len(ends) == len(every)
    recorded_s = max(ends) - min(starts) if timed else 0.0
    assumptions = [
        "The time between two requests of a trajectory counts as its tool's, the client's own "
        "work included."
    ]
    assumptions += [f"{count} requests {what}" for what, count in odd.items()]
    if left_out:
        assumptions.append(f"{_counted(left_out)} are left out.")
    if all(not session.prompt_id for session in sessions.values()):
        assumptions.append(
            "The log names no prompts, so no trajectory shares its prompt's KV with another."
        )
    return works, recorded_s, assumptions


def _step(call: _Call, following: _Call | None, odd: Counter[str]) -> Step:
    """Return a call and what came before the next one as a step; count in `odd` what is assumed."""
    if following is None:
        return Step(call.completion_tokens, 0, 0.0)
    grown = following.prompt_tokens - call.prompt_tokens - call.completion_tokens
    between_s = 0.0
    if call.ended_s is None or following.started_s is None:
        odd["have no times, or the next one has none: no tool takes time between them."] += 1
    else:
        between_s = following.started_s - call.ended_s
    if grown < 0:
        odd["had less context than the one before: they are played as if nothing was cut."] += 1
    if between_s < 0.0:
        odd["began before the one before had ended: they are played one by one."] += 1
    return Step(call.completion_tokens, max(0, grown), max(0.0, between_s))


def _counted(left_out: Counter[str], head: str = "") -> str:
    """Return what was left out and how often, behind `head`; empty where nothing was."""
    counts = ", ".join(f"{count} {what}" for what, count in left_out.items())
    return f"{head}{counts}" if counts else ""


class _Sample(_Lenient):
    """Fields of slime's Sample.to_dict() that are read."""

    tokens: Annotated[list[int], Field(min_length=1)]
    response_length: Count
    group_index: int | None = None
    loss_mask: list[int] | None = None
    status: str = "completed"
    reward: Seconds | dict[str, Any] | None = None
    non_generation_time: Annotated[Seconds, Field(ge=0)] = 0.0


def _read_slime(path: Path) -> Read:
    try:
        import torch
    except ModuleNotFoundError:
        raise UsageProblem(
            "--format slime reads a file of torch.save: pip install 'treadle[learned]'"
        ) from None
    try:
        # a pickle of anything could run code
        dumped = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, KeyError, _unpickling_error()) as error:
        raise UsageProblem(
            f"--from-log {path}: is no file of --save-debug-rollout-data that holds plain values "
            f"alone: {str(error).splitlines()[0]}\nIn slime's venv keep what is read: samples as "
            f"dicts of tokens, response_length, loss_mask, group_index, status and "
            "non_generation_time."
        ) from None
    samples = dumped.get("samples") if isinstance(dumped, dict) else None
    if not isinstance(samples, list):
        raise TraceFileError(path, 0, "samples", "must be a list")
    works: list[TrajectoryWork] = []
    numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    for number, raw in enumerate(samples, start=1):
        sample = _checked(_SAMPLE, path, number, without_nulls(raw))
        work = _slime_work(path, number, sample, numbers)
        if work is not None:
            works.append(work)
    if not works:
        raise TraceFileError(path, 0, "samples", "none sampled a token")
    unsampled = len(samples) - len(works)
    timed = any(step.tool_s for work in works for step in work.steps)
    turns = any(len(work.steps) > 1 for work in works)
    assumptions = [
        "Turns are where the loss mask changes: tokens that are masked out count as a tool's "
        "answer."
    ]
    if unsampled:
        assumptions.append(f"{unsampled} samples that sampled no token are left out.")
    if timed:
        assumptions.append("A sample's non_generation_time is spread evenly over its tool calls.")
    elif turns:
        assumptions.append("The samples have no non_generation_time, so tools take no time.")
    return works, 0.0, assumptions


def _unpickling_error() -> type[Exception]:
    from pickle import UnpicklingError

    return UnpicklingError


def _slime_work(
    path: Path, number: int, sample: _Sample, numbers: defaultdict[str, Iterator[int]]
) -> TrajectoryWork | None:
    """Return the work of a sample; None for one that generated nothing."""
    length = sample.response_length
    mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    if length > len(sample.tokens):
        most = f"must be at most the number of tokens ({len(sample.tokens)}), is {length}"
        raise TraceFileError(path, number, "response_length", most)
    if len(mask) != length:
        raise TraceFileError(
            path,
            number,
            "loss_mask",
            f"must have response_length ({length}) values, has {len(mask)}",
        )
    spans = [(kind, len(list(each))) for kind, each in itertools.groupby(mask, bool)]
    before = spans.pop(0)[1] if spans and not spans[0][0] else 0
    generated, answered = [n for kind, n in spans if kind], [n for kind, n in spans if not kind]
    if not generated:
        return None
    calls = len(answered) or 1
    tool_s = sample.non_generation_time / calls
    steps = [
        Step(tokens, answer or 0, tool_s if index < calls else 0.0)
        for index, (tokens, answer) in enumerate(itertools.zip_longest(generated, answered))
    ]
    prompt_id = f"group-{number if sample.group_index is None else sample.group_index}"
    reward = float(sample.reward) if isinstance(sample.reward, int | float) else None
    prompt_tokens = max(1, len(sample.tokens) - length + before)
    censored = sample.status != "completed"
    return TrajectoryWork(
        prompt_id, next(numbers[prompt_id]), prompt_tokens, tuple(steps), reward, censored
    )


class _Generation(_Lenient):
    """A line of verl's rollout_data_dir."""

    input: str
    output: str
    score: Seconds | None = None


def _read_verl(path: Path, tokenizer: Path | None) -> Read:
    if tokenizer is None or not (tokenizer / "tokenizer.json").is_file():
        raise UsageProblem(
            "--format verl needs --tokenizer FOLDER with the model's tokenizer.json: verl logs "
            "texts, and no tokens"
        )
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    lines = [_checked(_GENERATION, path, number, line) for number, line in read_json_lines(path)]
    if not lines:
        raise TraceFileError(path, 0, "", "holds no generation")
    prompts: dict[str, int] = {}
    numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
    counts = [
        len(encoded.ids)
        for encoded in encoder.encode_batch(
            [text for line in lines for text in (line.input, line.output)]
        )
    ]
    works = []
    for line, prompt_tokens, gen_tokens in zip(lines, counts[::2], counts[1::2], strict=True):
        prompt = prompts.setdefault(line.input, len(prompts))
        steps = (Step(gen_tokens + 1, 0, 0.0),)  # with its end token
        works.append(
            TrajectoryWork(
                f"prompt-{prompt}", next(numbers[prompt]), max(1, prompt_tokens), steps, line.score
            )
        )
    assumptions = [
        "verl logs texts, and neither turns nor seconds: each trajectory is one turn, in which "
        "what tools said counts as generated, and no tool takes time.",
        "Texts are tokenized again, which may give some tokens more or less than were sampled.",
    ]
    return works, 0.0, assumptions


_TIMES, _REQUEST, _TRACE = TypeAdapter(_Times), TypeAdapter(_Request), TypeAdapter(_Trace)
_EPISODE, _SAMPLE, _GENERATION = (
    TypeAdapter(_Episode),
    TypeAdapter(_Sample),
    TypeAdapter(_Generation),
)


def _checked(adapter: TypeAdapter[T], path: Path, number: int, value: object) -> T:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise TraceFileError(path, number, *describe_first(error)) from None


def _lines(path: Path, left_out: Counter[str]) -> Iterator[tuple[int, Any]]:
    """Yield each line's number from 1 and its JSON, without a last line that is cut."""
    try:
        yield from read_json_lines(path)
    except CutLineError as cut:
        if cut.line == 1:
            raise
        left_out["last lines that are cut"] += 1
