"""`treadle explain` on a trace file: where the time went, what was decided, and the ends under each
policy."""

import json
from typing import Any

import pytest
from treadle_cli.app import app
from treadle_core.model import LEDGER_PARTS
from treadle_sim.workloads.parametric import make
from treadle_sim.workloads.workload import write_traces
from typer.testing import CliRunner

ENGINES = ("--gpus", "2", "--slots", "2")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("traces") / "rollout.jsonl"
    write_traces(
        file, make("coding", prompts=3, samples=3, seed=1, max_gen_tokens=3_000).trajectories
    )
    return str(file)


def explained(*options: str) -> str:
    result = CliRunner().invoke(app, ["explain", *options, *ENGINES])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_parts_add_up_and_each_policy_has_an_end(traces: str) -> None:
    found: dict[str, Any] = json.loads(explained("coding-0001#2", "--trace", traces, "--json"))

    assert found["trajectory_id"] == "coding-0001#2"
    assert set(found["ledger"]) == set(LEDGER_PARTS)
    assert sum(found["ledger"].values()) == pytest.approx(found["wall_s"])
    assert found["left_s"] == pytest.approx(0.0, abs=1e-6)
    assert [fate["policy"] for fate in found["simulated"]] == ["fcfs", "sticky", "verl", "treadle"]
    assert all(0.0 < fate["trajectory_s"] <= fate["rollout_s"] for fate in found["simulated"])
    assert found["simulated"][-1]["trajectory_s"] == found["wall_s"]
    assert found["recorded"] is None, "a trace file says no times"
    kinds = [decision["kind"] for decision in found["decisions"]]
    assert kinds[0] == "placed" and "ticket" in kinds
    assert all(
        decision["reason"] and "{" not in decision["reason"] for decision in found["decisions"]
    )


def test_a_terminal_gets_tables_that_say_what_is_simulated(traces: str) -> None:
    text = " ".join(explained("coding-0000#0", "--trace", traces).split())

    assert (
        "part seconds share" in text
        and "decision engine" in text
        and "policy this one ends" in text
    )
    assert "Simulated (docs/simulator.md)" in text


def test_an_unknown_trajectory_is_named(traces: str) -> None:
    result = CliRunner().invoke(app, ["explain", "coding-9#9", "--trace", traces, *ENGINES])

    assert result.exit_code == 2
    assert "has no trajectory 'coding-9#9'; name it PROMPT#SAMPLE" in " ".join(
        result.stderr.split()
    )
