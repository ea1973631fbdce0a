"""`treadle bench fleet` without processes: what it counts as lost and doubled, and what as quiet
and recovered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from treadle.types import TrainingTrajectory

from treadle_bench.fleet.emulated import PAGE_TOKENS, RadixCache, next_token
from treadle_bench.fleet.load import OPENING, Call, prompt_of
from treadle_bench.fleet.measure import (
    CLIENT,
    CLIENTS,
    Death,
    Size,
    count_samples,
    expected_tokens,
    job_of,
    summarize,
)

SIZE = Size(engines=1, prompts=1, samples=1, tool_share=1.0, calm_s=1.0)


def made(client: int) -> TrainingTrajectory:
    prompt_id = prompt_of(job_of(client), 0).id
    return TrainingTrajectory(
        f"t{client}",
        prompt_id,
        0,
        expected_tokens(prompt_id, 0),
        [],
        [],
        (),
        1.0,
        False,
        False,
        1,
        1.0,
    )


def test_a_trajectory_that_is_missing_or_has_a_wrong_token_is_lost_and_one_that_comes_twice_is_doubled() -> (
    None
):
    whole = [made(client) for client in range(CLIENTS)]
    assert count_samples(SIZE, whole) == {"lost": 0, "doubled": 0}
    assert count_samples(SIZE, whole[1:]) == {"lost": 1, "doubled": 0}
    assert count_samples(SIZE, [*whole, whole[0]]) == {"lost": 0, "doubled": 1}
    tokens = list(whole[0].tokens)
    for wrong in (
        tokens[:-1],
        [*tokens, next_token(tokens[-1], len(tokens))],
        [*tokens[:-1], tokens[-1] + 1],
    ):
        assert count_samples(SIZE, [replace(whole[0], tokens=wrong), whole[1]]) == {
            "lost": 1,
            "doubled": 0,
        }


def call(
    begun_s: float, took_s: float, turn: int = 1, *, answered: bool = True, name: str = "t"
) -> Call:
    return Call(name, turn, begun_s, begun_s + took_s, answered, lost=False)


def test_calls_that_met_a_death_are_not_quiet_and_tell_when_it_was_recovered_from() -> None:
    deaths = [
        Death("scheduler", killed_s=10.0, detected_s=12.0),
        Death(CLIENT, killed_s=20.0, detected_s=21.0),
    ]
    first = [
        call(0.5, 0.03, turn=0, name="quiet-0"),
        *(call(2.0 + number, 0.004, name=f"quiet-{number}") for number in range(8)),
        call(11.0, 0.5, answered=False, name="waits"),
        call(11.6, 2.4, name="waits"),
        call(15.0, 0.004, name="later"),
        call(22.5, 0.25, OPENING, name=""),
    ]
    found = summarize([first, [call(25.0, 9.0, name="too late")]], deaths, started_s=1.0)
    assert found["chaos"]["scheduler"] == {"detected_s": 2.0, "recovered_s": 2.0, "waited": 1}
    assert found["chaos"][CLIENT] == {"detected_s": 1.0, "recovered_s": 1.75, "waited": 1}
    assert found["recovered_s"] == 2.0
    assert found["p99_ms"] == pytest.approx(4.0)
    assert found["all_p99_ms"] > 1000.0
    assert found["steps_per_s"] == pytest.approx(9 / 15.0, abs=0.05)


def test_an_emulated_cache_holds_whole_pages_of_its_salt_and_forgets_the_ones_unread_for_longest() -> (
    None
):
    cache, context = RadixCache(4 * PAGE_TOKENS), list(range(2 * PAGE_TOKENS + 1))
    cache.write("v1", context)
    assert cache.read("v1", context) == 2 * PAGE_TOKENS
    assert cache.read("v1", context[: 2 * PAGE_TOKENS]) == PAGE_TOKENS, (
        "the last token is always computed"
    )
    assert cache.read("v2", context) == 0
    for start in (1000, 2000):
        cache.write("v1", list(range(start, start + 2 * PAGE_TOKENS)))
    assert cache.read("v1", context) == 0
