"""A finished run as a trace file."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.runs import small_run, span, trajectory
from treadle_cli.app import app
from treadle_cli.report.records import Run, write_run
from treadle_sim.workloads.workload import Step, read_traces
from typer.testing import CliRunner


def test_a_run_becomes_trajectories_with_their_tools_seconds_and_what_was_cut_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of 3 and 2 tokens, 4 tokens of an answer between them; the run's tokenizer is not at hand."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mask = (0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1)
    two_steps = replace(
        trajectory("treadle", "lake-0", 0, 5, 9.0, span("tool", 3.0, 4.5, "", turn=0), span("tool", 8, 9, "", turn=1)),
        token_ids=tuple(range(len(mask))),
        logprobs=(0.0,) * len(mask),
        loss_mask=mask,
    )
    cut = replace(two_steps, trajectory_id="t-cut", sample=1, outcome="truncated", reward=None)
    nothing = replace(cut, trajectory_id="t-nothing", token_ids=(), logprobs=(), loss_mask=(), outcome="failed")
    other_arm = trajectory("pinned-fcfs", "lake-0", 0, 7, 4.0)
    write_run(tmp_path, Run(small_run().record, (two_steps, cut, nothing, other_arm)))

    result = CliRunner().invoke(app, ["trace", str(tmp_path), "--traces", str(tmp_path / "own.jsonl")])
    assert result.exit_code == 0, result.output
    first, second, third = read_traces(tmp_path / "own.jsonl")
    assert first.prompt_tokens == 2
    assert first.steps == (Step(3, 4, 1.5), Step(2, 0, 1.0))
    assert (first.reward, first.censored, second.reward, second.censored) == (1.0, False, None, True)
    assert [work.sample for work in (first, second, third)] == [0, 1, 2]
    assert third.gen_tokens == 7


def test_a_folder_without_a_run_and_a_file_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["trace", str(tmp_path), "--traces", str(tmp_path / "own.jsonl")])
    assert missing.exit_code == 2
    assert "summary.json" in missing.output
    write_run(tmp_path, small_run())
    unwritable = CliRunner().invoke(app, ["trace", str(tmp_path), "--traces", str(tmp_path / "no" / "own.jsonl")])
    assert unwritable.exit_code == 2
    assert "No such file" in unwritable.output
