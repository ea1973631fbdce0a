"""`treadle bench migration`: what its figures are made of. The measuring itself needs engines."""

import random

import pytest

from treadle_bench.migration.measure import SHORT_TOOL_S, Compared, Disturbed, draw_tool_s, report


def test_figures_are_medians_over_repeats_with_their_range() -> None:
    compared = [
        Compared(0.99, moved_s, 0.1, 2.0, same)
        for moved_s, same in ((0.2, True), (0.1, True), (0.4, False))
    ]
    rounds = [
        Disturbed([(0.5, 1.2), (0.7, 2.0)], [0.05, 0.05, 0.07], [0.06, 0.06, 0.3]),
        Disturbed([(1.5, 1.2), (0.4, 2.0)], [0.05], [0.05]),
        Disturbed([(0.4, 1.2)], [0.05], [0.09]),
    ]
    found = report(compared, rounds)
    assert (found["ttft_moved_s"], found["ttft_cold_s"], found["speedup"]) == (0.2, 2.0, 10.0)
    assert found["spread"]["ttft_moved_s"] == [0.1, 0.4]
    assert found["same_tokens"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["hidden_fraction"] == pytest.approx(0.8), (
        "one of the five moves ended after its tool call"
    )
    assert found["added_ms_p50"] == pytest.approx(10.0)
    assert (found["moves"], found["longest_move_s"]) == (5, 1.5)
    assert found["disturbed_gap_ms"]["max"] == 300.0


def test_tools_are_those_that_must_hide_a_move() -> None:
    rng = random.Random(0)
    assert all(draw_tool_s(rng) > SHORT_TOOL_S for _ in range(100))
