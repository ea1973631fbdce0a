"""Estimates as the scheduler gets them: which level answers, within which cap, and what each new
fact does to them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.ranking.estimator import (
    Estimator,
    Forecast,
    InvalidProgressError,
    Prior,
    Progress,
    Source,
)
from treadle_core.ranking.evidence import Ended, Evidence

PRIOR = Prior()


def ended(
    trajectory_id: str, tokens: int, *, prompt: str = "p", rollout: str = "r0", own_end: bool = True
) -> Ended:
    return Ended(trajectory_id, rollout, prompt, tokens, max(1, tokens // 100), own_end)


def ask(
    evidence: Evidence,
    gen_tokens: int = 0,
    *,
    prompt: str = "p",
    trajectory: str = "t",
    cap: int = 0,
) -> Forecast:
    progress = Progress(trajectory, prompt, gen_tokens=gen_tokens, max_total_tokens=cap)
    return Estimator(evidence, PRIOR).estimate(progress)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 2), st.booleans()), max_size=20),
    st.integers(0, 60_000),
    st.integers(0, 40),
    st.integers(0, 70_000),
)
def test_quantiles_are_in_order_and_within_the_cap_whatever_was_seen(
    told: list[tuple[int, int, bool]], gen_tokens: int, turn: int, cap: int
) -> None:
    evidence = Evidence()
    for index, (tokens, prompt, own_end) in enumerate(told):
        evidence.open_trajectory(f"run{index}", "r1", f"p{prompt}")
        evidence.add_step(f"run{index}", 0, tokens)
        evidence.close_trajectory(
            ended(
                f"t{index}", tokens, prompt=f"p{prompt}", rollout=f"r{index % 2}", own_end=own_end
            )
        )
    progress = Progress("t", "p0", turn=turn, gen_tokens=gen_tokens, max_total_tokens=cap)
    forecast = Estimator(evidence, PRIOR).estimate(progress)
    tokens_left, turns_left = forecast.remaining_tokens, forecast.remaining_turns
    assert 0 <= tokens_left.p10 <= tokens_left.p50 <= tokens_left.p90
    assert 0 <= turns_left.p10 <= turns_left.p50 <= turns_left.p90
    if cap:
        assert tokens_left.p90 <= max(0, cap - gen_tokens)


def test_before_anything_was_seen_the_stated_prior_answers() -> None:
    forecast = ask(Evidence())
    assert (forecast.source, forecast.model_version) == (Source.PRIOR, "prior-1")
    assert forecast.remaining_tokens.p50 == pytest.approx(1_000, rel=0.02)
    assert forecast.remaining_turns.p50 == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("scale", [50, 20_000])
def test_beyond_all_that_was_seen_the_rest_is_of_the_scale_that_was_seen(scale: int) -> None:
    """Forty trajectories of half to twice `scale` tokens, and one that is longer than any of them.
    Result: what is left is a part of what it has done, and not the thousand tokens of the stated
    prior."""
    evidence = Evidence()
    for index in range(40):
        evidence.close_trajectory(
            ended(f"t{index}", round(scale * 2 ** (index / 20 - 1)), prompt=f"p{index % 4}")
        )
    left = ask(evidence, gen_tokens=round(2.2 * scale), prompt="p0").remaining_tokens
    assert 0.02 * scale < left.p50 < 0.6 * scale
    assert left.p90 < 2.5 * scale


def test_tools_are_forecast_by_what_a_turn_took_on_all_levels_and_by_the_turns_left() -> None:
    """Turns of 2 s in other prompts, of 10 s in this one and its group, of 30 s in the trajectory's
    own last ones."""
    evidence = Evidence()

    def seconds_a_turn(turns: int = 0, tool_s: float = 0.0) -> float:
        progress = Progress("t", "p", turns, 0, 100 + 50 * turns, 100, tool_s=tool_s)
        forecast = Estimator(evidence, PRIOR).estimate(progress)
        assert forecast.remaining_observed_tokens.p50 <= 50 * forecast.remaining_turns.p50 + 1e-6
        return forecast.remaining_tool_s.p90 / forecast.remaining_turns.p90

    assert seconds_a_turn() == 0.0
    assert seconds_a_turn(3, 90.0) == pytest.approx(30.0), "nothing but its own turns is known"
    for index in range(20):
        evidence.close_trajectory(
            Ended(f"o{index}", "r0", f"o{index}", 500, 5, True, None, 100, 10.0)
        )
    assert seconds_a_turn() == pytest.approx(2.0)
    for index in range(8):
        evidence.close_trajectory(Ended(f"p{index}", "r0", "p", 500, 5, True, None, 100, 50.0))
    assert 6.0 < seconds_a_turn() < 10.0
    evidence.open_trajectory("t", "r1", "p")
    before_s = seconds_a_turn()
    assert before_s < seconds_a_turn(4, 120.0) < seconds_a_turn(40, 1_200.0) < 30.0


def test_another_prompts_end_makes_history_answer_and_the_prompts_own_end_goes_before_it() -> None:
    evidence = Evidence()
    for index in range(20):
        evidence.close_trajectory(ended(f"a{index}", 10_000 + index, prompt="other"))
    of_all = ask(evidence)
    assert (of_all.source, of_all.model_version) == (Source.HISTORY, "history-all-20")
    evidence.close_trajectory(ended("b0", 100, rollout="r0"))
    evidence.open_trajectory("t", "r1", "p")
    own = ask(evidence)
    assert (own.source, own.model_version) == (Source.HISTORY, "history-prompt-1")
    assert own.remaining_tokens.p10 < of_all.remaining_tokens.p10


def test_one_ended_sibling_makes_the_group_answer_and_more_of_them_converge() -> None:
    evidence = Evidence()
    for index in range(40):
        evidence.close_trajectory(ended(f"old{index}", 500, rollout="earlier"))
    for index in range(32):
        evidence.open_trajectory(f"s{index}", "now", "p")
    errors = []
    for index in range(31):
        evidence.close_trajectory(ended(f"s{index}", 8_000 + 10 * index, rollout="now"))
        forecast = ask(evidence, trajectory="s31")
        assert forecast.source is Source.SIBLINGS
        assert forecast.model_version == f"siblings-{index + 1}"
        errors.append(abs(forecast.remaining_tokens.p50 - 8_100))
    assert errors[-1] < 300
    assert errors[-1] < errors[0]


def test_the_further_a_trajectory_is_the_more_only_the_long_siblings_count() -> None:
    evidence = Evidence()
    evidence.open_trajectory("t", "r0", "p")
    for index, tokens in enumerate([1_000] * 12 + [20_000] * 4):
        evidence.close_trajectory(ended(f"s{index}", tokens))
    early, late = ask(evidence, 500), ask(evidence, 3_000)
    assert early.remaining_tokens.p50 < 2_000
    assert late.remaining_tokens.p50 > 12_000


def test_running_siblings_that_are_far_lift_the_estimate_and_those_of_other_prompts_do_not() -> (
    None
):
    evidence = Evidence()
    for index in range(8):
        evidence.open_trajectory(f"s{index}", "r0", "p")
    evidence.close_trajectory(ended("s0", 400))
    before = ask(evidence, trajectory="s7")
    for index in range(1, 7):
        evidence.add_step(f"s{index}", 0, 9_000)
    after = ask(evidence, trajectory="s7")
    assert after.remaining_tokens.p50 > 2 * before.remaining_tokens.p50
    for index in range(90):  # only siblings that run are counted: see `Evidence`
        evidence.open_trajectory(f"t{index}", "r0", f"p{index}")
        evidence.add_step(f"t{index}", 0, 3_000)
    assert ask(evidence, trajectory="s7") == after


def test_truncated_siblings_count_as_longer_than_their_cut() -> None:
    whole, cut = Evidence(), Evidence()
    for index in range(10):
        for evidence in (whole, cut):
            evidence.close_trajectory(ended(f"s{index}", 2_000, own_end=evidence is whole))
    assert ask(cut).remaining_tokens.p50 > 1.3 * ask(whole).remaining_tokens.p50


def test_the_same_evidence_gives_the_same_estimate_however_often_it_was_asked_on_the_way() -> None:
    asked, silent = Evidence(), Evidence()
    often = Estimator(asked, PRIOR)
    for evidence in (asked, silent):
        for index in range(30):
            evidence.open_trajectory(f"t{index}", "r0", f"p{index % 4}")
            evidence.add_step(f"t{index}", 0, 37 * index)
            if index % 2:
                evidence.close_trajectory(ended(f"t{index}", 50 * index, prompt=f"p{index % 4}"))
            if evidence is asked:
                often.estimate(Progress(f"t{index}", f"p{index % 4}"))
    for number in range(4):
        progress = Progress("new", f"p{number}", gen_tokens=70)
        assert often.estimate(progress) == Estimator(silent, PRIOR).estimate(progress)


@pytest.mark.parametrize(
    "field", ["turn", "gen_tokens", "context_tokens", "prompt_tokens", "max_total_tokens"]
)
def test_a_negative_count_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidProgressError) as caught:
        Progress("t", "p", **{field: -1})
    assert caught.value.field == field
