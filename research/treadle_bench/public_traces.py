"""Reads four public data sets as trajectories, from a folder that the caller names.

A trajectory that was cut by a limit or an error is censored. What a source does not say is filled
by a rule that stands here, drawn from the seed. Every step generates at least one token. Field
names are the sources' own, cleaned; a line that lacks one raises PublicTraceError.

| source | tokens of a step | answer of a tool | seconds of a tool |
|---|---|---|---|
| mcpmark | totals, split with log-normal weights | what the sum of inputs leaves | drawn |
| swebench | as counted | as counted | time between responses less the time to generate |
| tau | as counted | as counted | none: drawn |
| claude code | as counted | growth of the input beyond the output | the gap before the next call |

mcpmark: one prompt is one task under one model. claude code: one trajectory is one episode, from a
human's text to the end of the turn; sub-agents are inside the tool gap of their parent. Drawn tool
seconds are those of the parametric coding agent.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from treadle_cli.exits import UsageProblem
from treadle_sim.workloads.parametric import CODING, split
from treadle_sim.workloads.workload import Step, TrajectoryWork

# Spread of ln tokens among the steps of a trajectory: 1.19 over 500 coding runs.
STEP_TOKENS_SIGMA = 1.2

# The time to generate in `swebench`, whose intervals include the tool: the 20th percentiles of
# 19,663 intervals, in forty bins of output length, lie on this line. Intervals are whole seconds.
SWEBENCH_FIXED_S = 2.0
SWEBENCH_TOKEN_S = 0.0093

# `mcpmark` has the input of all turns together, not of the first: this is what a turn of runs of at
# most three turns reads, the median for two services, and for the third, whose answers are long,
# the lower quartile.
MCPMARK_PROMPT_TOKENS = {"filesystem": 1_500, "postgres": 2_000, "github": 9_500}
# A choice: the airline's policy and the descriptions of its tools, which the source leaves out, and
# a first request.
TAU_PROMPT_TOKENS = 3_000

# Gaps of `claude code` include the wait for a human's approval: 7% are longer than a command's
# default timeout there, and are cut to it.
LONGEST_TOOL_S = 120.0

TOOL_LLM = "qwen3-14b"  # its coding tool times are drawn if the source has none

Row = Mapping[str, Any]


class PublicTraceError(UsageProblem):
    """A file of the data folder that is not as its source describes."""


def read_public(name: str, data: Path, seed: int = 0) -> tuple[TrajectoryWork, ...]:
    """The trajectories of one of SOURCES under `data`. Raises PublicTraceError, and OSError for a
    missing file."""
    if name not in SOURCES:
        raise PublicTraceError(f"no source {name!r}, only {', '.join(SOURCES)}")
    file, convert = SOURCES[name]
    path = data / name / file
    works: list[TrajectoryWork] = []
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for number, text in enumerate(lines, start=1):
            try:
                works += convert(json.loads(text), seed)
            except (KeyError, TypeError, json.JSONDecodeError) as error:
                raise PublicTraceError(
                    f"{path}: line {number}: {type(error).__name__}: {error}"
                ) from error
    texts = _task_texts(data) if name == "mcpmark" else {}
    return tuple(
        replace(work, prompt=texts.get(work.prompt_id.partition("/")[2], work.prompt))
        for work in works
    )


def _task_texts(data: Path) -> dict[str, str]:
    """The prompt of each task of `mcpmark`; empty if the folder lacks the file."""
    path = data / "mcpmark" / "prompts.jsonl.gz"
    if not path.exists():
        return {}
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        rows = [json.loads(text) for text in lines]
    return {row["prompt_id"]: row["prompt"] for row in rows}


def mcpmark(row: Row, seed: int) -> Iterator[TrajectoryWork]:
    """One run, or nothing if it generated nothing."""
    turns, out_tokens = row["turns"] or 0, row["out_tokens"] or 0
    if turns < 1 or out_tokens < turns:
        return
    prompt_id, sample = f"{row['model']}/{row['prompt_id']}", row["sample"]
    rng = _rng(seed, f"{prompt_id}/{sample}")
    weights = np.exp(STEP_TOKENS_SIGMA * rng.standard_normal(turns))
    gen = split(np.array([out_tokens]), np.array([turns]), weights).tolist()
    # The inputs of all turns add up to the prompt, `turns` times, and what each turn added, as
    # often as turns follow.
    follow = turns * (turns - 1) // 2
    own = sum(tokens * (turns - 1 - at) for at, tokens in enumerate(gen))
    prompt_tokens = MCPMARK_PROMPT_TOKENS[row["service"]]
    obs = max(0, ((row["in_tokens"] or 0) - turns * prompt_tokens - own) // follow) if follow else 0
    tool_s = _tool_s(rng, turns)
    yield TrajectoryWork(
        prompt_id,
        sample,
        prompt_tokens,
        tuple(Step(tokens, obs, seconds) for tokens, seconds in zip(gen, tool_s, strict=True)),
        float(row["success"]),
        censored=row["censored"] is not None,
    )


def swebench(row: Row, seed: int) -> Iterator[TrajectoryWork]:
    """One run."""
    del seed  # nothing is drawn
    steps = [
        _step_of(step, step["obs_tokens_smol"], _tool_of_interval(step)) for step in row["steps"]
    ]
    if steps:
        # The answer to the last step is the whole patch, which no further step reads.
        steps[-1] = replace(steps[-1], obs_tokens=0, obs_text="")
        prompt_tokens = max(1, row["steps"][0]["prompt_tokens"])
        censored = row["exit"] != "Submitted"
        reward = float(row["reward"])
        yield TrajectoryWork(
            row["prompt_id"],
            row["sample"],
            prompt_tokens,
            tuple(steps),
            reward,
            censored,
            prompt=row["prompt"],
        )


def tau(row: Row, seed: int) -> Iterator[TrajectoryWork]:
    """One conversation; the simulated user is a tool. Its prompt is what that user says first: the
    agent never sees the user's own instructions, which the source has too."""
    if row["steps"]:
        rng = _rng(seed, f"{row['prompt_id']}/{row['sample']}")
        tool_s = _tool_s(rng, len(row["steps"]))
        steps = tuple(
            _step_of(step, step["obs_tokens"], seconds)
            for step, seconds in zip(row["steps"], tool_s, strict=True)
        )
        yield TrajectoryWork(
            row["prompt_id"],
            row["sample"],
            TAU_PROMPT_TOKENS,
            steps,
            float(row["reward"]),
            prompt=row["first_user"],
        )


def claude_code(row: Row, seed: int) -> Iterator[TrajectoryWork]:
    """The episodes of a session."""
    del seed  # nothing is drawn
    calls = [call for call in row["steps"] if call["kind"] == "llm"]
    episode: list[Row] = []
    count = 0
    for at, call in enumerate(calls):
        episode.append(call)
        goes_on = at + 1 < len(calls) and "tool_result" in calls[at + 1]["input_types"]
        if not goes_on:
            yield _episode(f"{row['session']}/{count}", episode)
            count += 1
            episode = []


def _episode(prompt_id: str, calls: list[Row]) -> TrajectoryWork:
    steps = []
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        gen = max(1, call["out_tokens"])
        obs, tool_s = 0, 0.0
        if following is not None:
            obs = max(0, following["in_tokens"] - call["in_tokens"] - gen)
            tool_s = min(max(0.0, float(following["gap_before_s"])), LONGEST_TOOL_S)
        steps.append(Step(gen, obs, tool_s))
    # An episode whose last call asked for a tool was left before the tool answered. For many the
    # source does not say why they stopped: those count as their own end.
    return TrajectoryWork(
        prompt_id,
        0,
        max(1, calls[0]["in_tokens"]),
        tuple(steps),
        None,
        censored=calls[-1]["stop"] == "tool_use",
    )


def _step_of(step: Row, obs_tokens: int | None, tool_s: float) -> Step:
    return Step(
        max(1, step["gen_tokens"]), obs_tokens or 0, tool_s, step["gen"] or "", step["obs"] or ""
    )


def _tool_of_interval(step: Row) -> float:
    if step["step_interval_s"] is None:
        return 0.0
    generating_s: float = SWEBENCH_FIXED_S + SWEBENCH_TOKEN_S * step["gen_tokens"]
    return max(0.0, round(float(step["step_interval_s"]) - generating_s, 3))


def _tool_s(rng: np.random.Generator, count: int) -> list[float]:
    drawn: list[float] = np.round(CODING.tool_s(TOOL_LLM).draw(rng, count), 6).tolist()
    return drawn


def _rng(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


SOURCES: Mapping[str, tuple[str, Callable[[Row, int], Iterator[TrajectoryWork]]]] = {
    "mcpmark": ("runs.jsonl.gz", mcpmark),
    "swebench_verified_mini_gemini3": ("steps_text_trunc.jsonl.gz", swebench),
    "tau_airline_gpt4o": ("steps_text.jsonl.gz", tau),
    "claude_code_sessions_kvct": ("sessions.jsonl.gz", claude_code),
}
