"""What the page of `bench predictor` says of its figures."""

from typing import Any

from treadle_bench.predictor.page import calibrated, page, verdict


def row(step: int, estimator: str, **scores: float) -> dict[str, Any]:
    return {"step": step, "estimator": estimator, "below_p10": 0.1, "below_p50": 0.5, "below_p90": 0.9, **scores}


def test_the_learned_one_is_compared_with_the_best_baseline_at_each_step() -> None:
    rows = [
        row(0, "learned", pearson_log=0.2, pinball=0.2),
        row(0, "siblings", pearson_log=0.3, pinball=0.3),
        row(0, "history", pearson_log=0.1, pinball=0.25),
        row(1, "learned", pearson_log=0.5, pinball=0.4),
        row(1, "siblings", pearson_log=0.4, pinball=0.3),
        row(1, "chosen", pearson_log=0.9, pinball=0.1),
    ]
    assert verdict(rows, "pearson_log") == (
        "learned is ahead of every baseline at step 1; ahead of it: siblings at step 0 (0.30, learned 0.20)"
    )
    assert verdict(rows, "pinball") == (
        "learned is ahead of every baseline at step 0; ahead of it: siblings at step 1 (0.30, learned 0.40)"
    )


def test_where_nothing_was_read_the_best_baseline_is_still_named() -> None:
    rows = [row(0, "siblings", pinball=0.3), row(0, "boosted", pinball=0.2)]
    assert verdict(rows, "pinball") == "learned is nowhere ahead; ahead of it: boosted at step 0 (0.20)"


def test_quantiles_that_do_not_hold_are_named_with_their_step() -> None:
    good = [row(0, "learned"), row(0, "boosted", below_p90=0.5)]
    assert calibrated(good, "learned") == "quantiles of the learned one: all within 5 points."
    off = [*good, row(4, "learned", below_p90=0.84)]
    assert calibrated(off, "learned").endswith("beyond 5 points: step 4 p90 0.84.")
    assert calibrated([row(0, "chosen", below_p50=0.6)], "chosen").endswith("step 0 p50 0.60.")
    unsure = row(0, "chosen", below_p50=0.6) | {"below_p50_interval": [0.48, 0.72]}
    assert calibrated([unsure], "chosen").endswith("step 0 p50 0.60 (0.48–0.72 over prompts).")


def test_how_long_a_prediction_takes_is_said_where_it_was_measured() -> None:
    found = {"rows": [], "data": [], "seeds": [0], "repeats": 1, "backbone": "tiny"}
    assert "A prediction by the service" not in " ".join(page(found))
    latency = {"p50_ms": 131.2, "p99_ms": 351.7, "latency_requests": 1176, "latency_others": 24, "latency_per_s": 4.0}
    said = " ".join(page({**found, **latency}))
    assert "p50 131.2 ms, p99 351.7 ms" in said
    assert "over 1,200 questions after steps, 4 a second" in said
    assert "The model answered 1,176" in said
