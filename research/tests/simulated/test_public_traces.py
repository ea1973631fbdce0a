"""Readers of public traces: what each source says, and the rules where it says nothing."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from treadle_sim.workloads.workload import Step, TrajectoryWork

from treadle_bench.public_traces import SOURCES, PublicTraceError, read_public


def read(data: Path, name: str, *rows: dict[str, Any], seed: int = 0) -> tuple[TrajectoryWork, ...]:
    (data / name).mkdir(exist_ok=True)
    (data / name / SOURCES[name][0]).write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    )
    return read_public(name, data, seed)


RUN: dict[str, Any] = {
    "model": "m",
    "service": "postgres",
    "prompt_id": "t",
    "sample": 1,
    "success": True,
    "turns": 4,
    "in_tokens": 4 * 2_000 + 6 * 300,
    "out_tokens": 400,
    "censored": None,
}


def test_totals_are_split_over_turns_to_the_token(tmp_path: Path) -> None:
    (work,) = read(tmp_path, "mcpmark", RUN)
    assert (work.prompt_id, work.sample, work.reward, work.censored) == ("m/t", 1, 1.0, False)
    assert work.gen_tokens == 400
    assert len(work.steps) == 4
    gen = [step.gen_tokens for step in work.steps]
    obs = work.steps[0].obs_tokens
    read_in_all = sum(2_000 + sum(gen[:turn]) + obs * turn for turn in range(4))
    # whole tokens: 6 answers are read
    assert RUN["in_tokens"] - 6 < read_in_all <= RUN["in_tokens"]
    assert all(step.tool_s > 0 for step in work.steps)


def test_what_is_drawn_depends_on_the_run_and_the_seed_alone(tmp_path: Path) -> None:
    other = {**RUN, "sample": 2}
    one, two = read(tmp_path, "mcpmark", RUN, other)
    assert read(tmp_path, "mcpmark", other) == (two,)
    assert one.steps != two.steps
    assert read(tmp_path, "mcpmark", RUN, seed=1) != (one,)


def test_runs_cut_by_a_limit_are_censored_and_runs_without_output_left_out(tmp_path: Path) -> None:
    works = read(
        tmp_path,
        "mcpmark",
        {**RUN, "censored": "max_turns"},
        {**RUN, "sample": 2, "out_tokens": None},
    )
    assert [work.censored for work in works] == [True]


def test_the_time_to_generate_is_taken_from_the_interval_between_responses(tmp_path: Path) -> None:
    alike = {"prompt_tokens": 1_500, "obs_tokens_smol": 40, "gen": "ls", "obs": None}
    steps = [
        {"gen_tokens": gen_tokens, "step_interval_s": interval_s, **alike}
        for gen_tokens, interval_s in ((1_000, 15), (1_000, 3), (5, None))
    ]
    row = {
        "prompt_id": "i",
        "sample": 0,
        "reward": 1,
        "exit": "Submitted",
        "prompt": "Mend it.",
        "steps": steps,
    }
    (work,) = read(tmp_path, "swebench_verified_mini_gemini3", row)
    assert work.prompt_tokens == 1_500
    assert [(s.gen_tokens, s.obs_tokens, s.tool_s) for s in work.steps] == [
        (1_000, 40, 3.7),
        (1_000, 40, 0.0),
        (5, 0, 0.0),
    ]
    assert (work.prompt, work.steps[0].text, work.steps[0].obs_text) == ("Mend it.", "ls", "")


def test_a_conversation_keeps_its_counts(tmp_path: Path) -> None:
    step = {"gen_tokens": 21, "obs_tokens": 16, "gen": "Your id?", "obs": "mia"}
    row = {
        "prompt_id": "a",
        "sample": 3,
        "reward": 0.0,
        "prompt": "You are Mia.",
        "first_user": "Hi",
        "steps": [step],
    }
    (work,) = read(tmp_path, "tau_airline_gpt4o", row)
    assert (work.sample, work.steps[0].gen_tokens, work.steps[0].obs_tokens) == (3, 21, 16)
    assert (work.prompt, work.steps[0].text, work.steps[0].obs_text) == ("Hi", "Your id?", "mia")


def test_a_run_has_the_text_of_its_task_where_the_folder_has_it(tmp_path: Path) -> None:
    (tmp_path / "mcpmark").mkdir()
    tasks = json.dumps({"service": "postgres", "prompt_id": "t", "prompt": "Count rows."}) + "\n"
    (tmp_path / "mcpmark" / "prompts.jsonl.gz").write_bytes(gzip.compress(tasks.encode()))
    (work,) = read(tmp_path, "mcpmark", RUN)
    assert work.prompt == "Count rows."


def test_a_session_is_its_episodes(tmp_path: Path) -> None:
    def call(in_tokens: int, out_tokens: int, gap_s: float, kind: str, stop: str) -> dict[str, Any]:
        tokens = {"in_tokens": in_tokens, "out_tokens": out_tokens}
        return {"kind": "llm", **tokens, "gap_before_s": gap_s, "input_types": [kind], "stop": stop}

    row = {
        "session": "s",
        "steps": [
            call(1_000, 50, 0.0, "text", "tool_use"),
            {"kind": "subagent"},
            call(1_100, 60, 2.5, "tool_result", "tool_use"),
            call(1_050, 70, 900.0, "tool_result", "end_turn"),
            call(1_300, 0, 60.0, "text", "tool_use"),
        ],
    }
    first, second = read(tmp_path, "claude_code_sessions_kvct", row)
    assert (first.prompt_id, first.prompt_tokens, first.censored) == ("s/0", 1_000, False)
    # The context shrank after the second call, and its gap held a human too.
    assert first.steps == (Step(50, 50, 2.5), Step(60, 0, 120.0), Step(70, 0, 0.0))
    assert (second.prompt_id, second.steps, second.censored) == ("s/1", (Step(1, 0, 0.0),), True)


def test_a_line_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(PublicTraceError, match="line 2: KeyError: 'turns'"):
        read(tmp_path, "mcpmark", RUN, {"model": "m"})
    with pytest.raises(PublicTraceError, match="no source 'other', only mcpmark"):
        read_public("other", tmp_path)
