"""The arithmetic of `treadle bench tools`, and its page where lines are held and where they are
missed."""

import pytest
from treadle_core.tools.action import CPU_CORES, Fixed

from treadle_bench.summary import median_by_key
from treadle_bench.tools.page import check_aims
from treadle_bench.tools.setting import DecisionSeconds, by_arrival, mean_act_s, overheads
from treadle_bench.tools.trace import Asked, Call, Decisions, Record, Replay, Trace


def replay(*completions: tuple[str, float, float]) -> Replay:
    """Of (trajectory, arrival, completion)."""
    traces = {
        name: Trace(name, "coding", (Call(0.0, {CPU_CORES: Fixed(1)}, took_s),))
        for name, _, took_s in completions
    }
    records = tuple(
        Record(Asked(traces[name], 0, arrived_s), arrived_s, 0.0, arrived_s + took_s, 1)
        for name, arrived_s, took_s in completions
    )
    return Replay(tuple(traces.values()), records, dict.fromkeys(traces, 0.0), Decisions())


def test_completion_times_are_summed_by_trajectory_and_averaged_over_them() -> None:
    assert mean_act_s(replay(("a", 0.0, 1.0), ("a", 5.0, 2.0), ("b", 0.0, 5.0))) == 4.0


def test_windows_are_by_arrival() -> None:
    found = by_arrival(replay(("a", 0.0, 1.0), ("a", 9.0, 3.0), ("b", 25.0, 5.0)), 10.0)
    assert found == {"at_s": [0.0, 20.0], "act_s": [2.0, 5.0], "actions": [2.0, 1.0]}


def test_seeds_give_a_median_and_its_range_and_one_gives_itself() -> None:
    assert median_by_key([{"x": 1.0}, {"x": 9.0}, {"x": 2.0}]) == {
        "x": 2.0,
        "spread": {"x": [1.0, 9.0]},
    }
    assert median_by_key([{"x": 1.0}]) == {"x": 1.0}


def test_overhead_is_of_execution_and_counts_a_decision_for_each_that_waited_for_it() -> None:
    found = overheads(
        [DecisionSeconds([0.001, 0.003], 0.008, 10.0), DecisionSeconds([0.002], 0.002, 10.0)]
    )
    assert found["overhead_pct"] == pytest.approx(0.05)
    assert found["busy_pct"] == pytest.approx(0.03)
    assert found["decisions"] == 3.0


def test_what_is_missed_or_not_measured_is_said() -> None:
    found = {
        "setting": {"batch": 1_280, "small_batch": 256},
        "act_ratio_pod_1280": 3.9,
        "act_ratio_min": 3.0,
        "act_ratio_dop4_256": 2.5,
        "act_ratio_dop16_1280": 1.0,
        "cores": {
            "batches": [
                {"batch": 256, "ratio_degree_4": 2.5, "elastic_s": 25.0, "least_s": 20.0},
                {"batch": 1_280, "ratio_degree_16": 1.0, "elastic_s": 60.0, "least_s": 30.0},
            ]
        },
        "gpu_fraction_same_act": None,
        "gpus": {"fractions": {"as in Table 1": {"fraction": 0.5}}},
        "decisions": {"waiting": 1_536},
        "decision_p99_ms": 4.0,
        "overhead_pct": 0.1,
        "live_p50_ms": None,
        "live_p99_ms": 20.0,
        "sessions_ok": 199.0,
        "live": {"missing": None, "sessions": {"asked": 200.0}},
    }
    said = [row[-1].replace("*", "") for row in check_aims(found)]
    four, sixteen = "yes", "no; no scheduler can have more than 2.00"
    assert said == ["no", "yes", four, sixteen, "no", "no", "yes", "yes", "no", "yes", "no"]
