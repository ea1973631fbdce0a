"""What is kept of trajectories as they run: whole or not used, the same however often a fact is told."""

import asyncio
from collections.abc import Sequence

import pytest
from treadle.telemetry.v1 import facts_pb2
from treadle_learned.transcript import Transcript, Turn
from treadle_predictor import facts as module
from treadle_predictor.facts import Recordings

from treadle_bench.predictor.facts import facts_of, prompt_started

LONG_S = 20.0


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def transcript(name: str = "t", censored: bool = False) -> Transcript:
    turns = (Turn(10, 4, "look", "4 files"), Turn(20, 6, "read", "some text"), Turn(5, 0, "answer"))
    return Transcript(name, "r", "p", 12, turns, censored, "the task")


def heard(*facts: facts_pb2.Fact) -> Recordings:
    recordings = Recordings(decode)
    for fact in facts:
        recordings.on_fact(fact)
    return recordings


@pytest.mark.parametrize("censored", [False, True])
def test_an_ended_trajectory_is_the_transcript_that_it_was(censored: bool) -> None:
    whole = transcript(censored=censored)
    facts = list(facts_of(whole, letters))
    assert list(heard(*facts).ended) == [whole]
    assert list(heard(*(fact for fact in facts for _ in range(2))).ended) == [whole], "each told twice"


def test_the_prompt_is_known_once_the_first_step_has_started() -> None:
    opened, finished, later, *_ = facts_of(transcript(), letters)
    started = prompt_started(transcript(), letters)
    recording = heard(opened, started).get("t", 0)
    assert recording is not None and recording.prompt == "the task"
    assert list(heard(opened, started, finished, started, later).ended) == list(heard(opened, finished, later).ended)
    later_step = prompt_started(transcript(), letters)
    later_step.step_started.step.turn = 1
    recording = heard(opened, later_step).get("t", 0)
    assert recording is not None and not recording.prompt


def test_one_with_a_missed_step_is_neither_read_nor_trained_on() -> None:
    facts = list(facts_of(transcript(), letters))
    recordings = heard(facts[0], facts[1], facts[3])
    assert all(recordings.get("t", turn) is None for turn in range(4))
    recordings.on_fact(facts[4])
    assert not recordings.ended


def test_one_whose_opening_was_not_heard_is_not_kept() -> None:
    facts = list(facts_of(transcript(), letters))
    assert not heard(*facts[1:]).ended


def test_an_observation_that_holds_other_engines_steps_is_not_read() -> None:
    facts = list(facts_of(transcript(), letters))
    facts[3].step_finished.tokens.observation_tokens = 40
    recording = heard(*facts[:4]).get("t", 3)
    assert recording is not None
    assert [(turn.obs_tokens, turn.obs_text) for turn in recording.turns] == [(4, "4 files"), (6, ""), (0, "")]


def test_a_prompt_is_known_to_its_later_samples() -> None:
    recordings = heard(*facts_of(transcript("t"), letters))
    assert recordings.prompt_of("p") == "the task"
    assert recordings.prompt_of("other") == ""


def test_what_runs_is_bounded_the_longest_silent_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RUNNING", 2)
    opened = [next(facts_of(transcript(name), letters)) for name in "abc"]
    step = list(facts_of(transcript("a"), letters))[1]
    recordings = heard(opened[0], opened[1], step, opened[2])
    assert [recordings.get(*each) is not None for each in (("a", 1), ("b", 0), ("c", 0))] == [True, False, True]


async def test_who_asks_before_the_fact_is_there_waits_for_it() -> None:
    facts = list(facts_of(transcript(), letters))
    recordings = heard(facts[0])
    waits = asyncio.create_task(recordings.wait_for("t", 2, LONG_S))
    for fact in facts[1:3]:
        await asyncio.sleep(0)
        recordings.on_fact(fact)
    found = await waits
    assert found is not None and len(found.turns) == 2


async def test_a_fact_that_does_not_come_is_not_waited_for() -> None:
    recordings = heard(next(facts_of(transcript(), letters)))
    assert await recordings.wait_for("t", 1, 0.01) is None
    assert await recordings.wait_for("never", 1, LONG_S) is None
