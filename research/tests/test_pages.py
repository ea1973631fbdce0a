"""Pages: what that of `bench predictor` concludes, and that every committed page is what its
template makes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle_bench.command import BENCHES
from treadle_bench.predictor.page import check_quantiles, compare_learned


def row(step: int, estimator: str, **scores: float) -> dict[str, Any]:
    return {
        "step": step,
        "estimator": estimator,
        "below_p10": 0.1,
        "below_p50": 0.5,
        "below_p90": 0.9,
        **scores,
    }


def test_the_learned_one_is_compared_with_the_best_baseline_at_each_step() -> None:
    rows = [
        row(0, "learned", pearson_log=0.2, pinball=0.2),
        row(0, "siblings", pearson_log=0.3, pinball=0.3),
        row(0, "history", pearson_log=0.1, pinball=0.25),
        row(1, "learned", pearson_log=0.5, pinball=0.4),
        row(1, "siblings", pearson_log=0.4, pinball=0.3),
        row(1, "chosen", pearson_log=0.9, pinball=0.1),
    ]
    assert compare_learned(rows, "pearson_log") == (
        "learned is ahead of every baseline at step 1; ahead of it: siblings at step 0 (0.30, "
        "learned 0.20)"
    )
    assert compare_learned(rows, "pinball") == (
        "learned is ahead of every baseline at step 0; ahead of it: siblings at step 1 (0.30, "
        "learned 0.40)"
    )
    unread = [row(0, "siblings", pinball=0.3), row(0, "boosted", pinball=0.2)]
    assert (
        compare_learned(unread, "pinball")
        == "learned is nowhere ahead; ahead of it: boosted at step 0 (0.20)"
    )


def test_quantiles_that_do_not_hold_are_named_with_their_step() -> None:
    good = [row(0, "learned"), row(0, "boosted", below_p90=0.5)]
    assert check_quantiles(good, "learned") == "all within 5 points"
    off = [*good, row(4, "learned", below_p90=0.84)]
    assert check_quantiles(off, "learned").endswith("by more than 5 points: step 4 p90 0.84")
    assert check_quantiles([row(0, "chosen", below_p50=0.6)], "chosen").endswith("step 0 p50 0.60")
    unsure = row(0, "chosen", below_p50=0.6) | {"below_p50_interval": [0.48, 0.72]}
    assert check_quantiles([unsure], "chosen").endswith("step 0 p50 0.60 (0.48–0.72 over prompts)")


RESULTS = Path(__file__).resolve().parents[1] / "results"
WITH_NOTES = {"grpo", "predictor"}  # pages to which a person has added a paragraph about the run


@pytest.mark.parametrize("name", sorted(name for name, bench in BENCHES.items() if bench.page))
def test_a_committed_page_is_what_its_template_makes_of_the_committed_figures(
    name: str, tmp_path: Path
) -> None:
    figures = json.loads((RESULTS / f"{name}.json").read_text())
    replace(BENCHES[name], draw=None).write(figures, tmp_path)
    made, committed = (tmp_path / f"{name}.md").read_text(), (RESULTS / f"{name}.md").read_text()
    assert json.loads((tmp_path / f"{name}.json").read_text()) == figures
    assert (
        set(made.splitlines()) <= set(committed.splitlines())
        if name in WITH_NOTES
        else made == committed
    )
