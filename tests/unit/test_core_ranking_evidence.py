"""What the estimators remember: the same for the same events, told once or twice, and never more
than the bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.ranking import evidence as module
from treadle_core.ranking.evidence import Ended, Evidence

Event = tuple[str, int, int, int]  # kind, trajectory, turn or rollout, tokens

events = st.lists(
    st.tuples(
        st.sampled_from(["opened", "stepped", "closed"]),
        st.integers(0, 6),
        st.integers(0, 3),
        st.integers(0, 99),
    ),
    max_size=60,
)


def tell(evidence: Evidence, event: Event) -> None:
    kind, number, turn, tokens = event
    trajectory_id, rollout_id, prompt_id = f"t{number}", f"r{number % 2}", f"p{number % 3}"
    if kind == "opened":
        evidence.open_trajectory(trajectory_id, rollout_id, prompt_id)
    elif kind == "stepped":
        evidence.add_step(trajectory_id, turn, tokens)
    else:
        evidence.close_trajectory(
            Ended(trajectory_id, rollout_id, prompt_id, tokens, turn, own_end=tokens % 2 == 0)
        )


def seen(evidence: Evidence) -> object:
    groups = [evidence.group_of(f"t{number}", f"p{number % 3}") for number in range(7)]
    tallies = [each.observed for each in (evidence.tokens, evidence.turns)]
    return (
        evidence.closed_total,
        evidence.known_prompts,
        [(found[0], dict(found[1].running), dict(found[1].ended)) for found in groups if found],
        [list(evidence.ended_of_prompt(f"p{number}")) for number in range(3)],
        [(each.ended.tolist(), each.censored.tolist()) for each in tallies],
    )


@given(events)
def test_an_event_told_twice_changes_nothing_the_second_time(told: list[Event]) -> None:
    once, twice = Evidence(), Evidence()
    for event in told:
        tell(once, event)
        tell(twice, event)
        tell(twice, event)
    assert seen(once) == seen(twice)


@given(events)
def test_every_trajectory_is_counted_once_running_or_ended(told: list[Event]) -> None:
    evidence = Evidence()
    for event in told:
        tell(evidence, event)
    found = [evidence.group_of(f"t{number}", f"p{number % 3}") for number in range(7)]
    groups = dict(each for each in found if each)
    running = [each for group in groups.values() for each in group.running]
    ended = [each for group in groups.values() for each in group.ended]
    assert len(set(running + ended)) == len(running + ended)
    for tally in (evidence.tokens.observed, evidence.turns.observed):
        assert tally.ended.sum() + tally.censored.sum() == evidence.ended_kept
        assert (tally.ended >= 0).all()
        assert (tally.censored >= 0).all()


def test_a_step_that_ended_on_one_engine_and_went_on_on_another_counts_once() -> None:
    evidence = Evidence()
    evidence.open_trajectory("t", "r", "p")
    for turn, tokens in ((0, 10), (1, 20), (1, 35), (0, 10), (2, 5)):
        evidence.add_step("t", turn, tokens)
    found = evidence.group_of("t", "p")
    assert found is not None
    assert found[1].running["t"].gen_tokens == 10 + 35 + 5
    assert found[1].running["t"].turns == 3


def test_a_step_before_the_opening_or_after_the_close_changes_nothing() -> None:
    evidence = Evidence()
    evidence.add_step("t", 0, 100)
    assert evidence.group_of("t", "p") is None
    evidence.open_trajectory("t", "r", "p")
    evidence.close_trajectory(Ended("t", "r", "p", 50, 1, own_end=True))
    before = seen(evidence)
    evidence.add_step("t", 1, 500)
    evidence.open_trajectory("t", "r", "p")
    assert seen(evidence) == before


def test_memory_is_bounded_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "MOST_RUNNING",
        "MOST_GROUPS",
        "MOST_IN_GROUP",
        "MOST_PROMPTS",
        "MOST_OF_PROMPT",
        "MOST_OF_ALL",
    ):
        monkeypatch.setattr(module, name, 5)
    evidence = Evidence()
    for number in range(200):
        evidence.open_trajectory(f"t{number}", f"r{number // 40}", f"p{number % 9}")
        evidence.add_step(f"t{number}", 0, number)
        if number % 3:
            evidence.close_trajectory(
                Ended(f"t{number}", f"r{number // 40}", f"p{number % 9}", number, 1, own_end=True)
            )
    tally = evidence.tokens.observed
    assert evidence.ended_kept == 5
    assert tally.ended.sum() == 5
    assert tally.censored.sum() == 0
    assert evidence.known_prompts == 5
    assert evidence.closed_total == sum(1 for number in range(200) if number % 3)
    assert all(len(evidence.ended_of_prompt(f"p{number}")) <= 5 for number in range(9))


def test_the_versions_of_all_are_those_of_the_newest_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_OF_ALL", 2)
    evidence = Evidence()
    assert evidence.mean_version("t", "p") is None
    for number, version in enumerate((1, None, 5)):
        evidence.close_trajectory(
            Ended(f"t{number}", "r", f"p{number}", 9, 1, own_end=True, weight_version=version)
        )
    assert evidence.mean_version("t", "p") == 5.0
    assert evidence.mean_version("t", "p1") is None
