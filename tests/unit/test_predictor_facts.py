"""What the predictor takes from facts: evidence, histories, recordings and weight versions; a fact
that comes twice changes nothing."""

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
from treadle.engine.v1.engine_pb2 import EngineInfo
from treadle.scheduler.v1 import scheduler_pb2
from treadle.telemetry.v1 import facts_pb2
from treadle_cli.predictor.facts import facts_of, prompt_started
from treadle_core.ranking.estimator import Estimator, Prior, Progress
from treadle_core.ranking.evidence import Ended, Evidence
from treadle_learned.moments import FEATURES
from treadle_learned.transcript import Transcript, Turn
from treadle_predictor import facts as module
from treadle_predictor.convert import learn
from treadle_predictor.facts import Learner, Recordings
from treadle_predictor.history import HistoryStore, decode, encode
from treadle_predictor.question import make_question
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import duration


def closed(outcome: int = scheduler_pb2.OUTCOME_FINISHED, **changed: object) -> facts_pb2.Fact:
    given: dict[str, object] = {
        "trajectory_id": "t",
        "rollout_id": "r",
        "prompt_id": "p",
        "gen_tokens": 300,
        "turns": 3,
        "outcome": outcome,
        **changed,
    }
    return make_fact("scheduler", trajectory_closed=facts_pb2.TrajectoryClosed(**given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "own_end"),
    [
        (scheduler_pb2.OUTCOME_FINISHED, True),
        (scheduler_pb2.OUTCOME_TRUNCATED, False),
        (scheduler_pb2.OUTCOME_FAILED, False),
        (scheduler_pb2.OUTCOME_CANCELLED, False),
        (scheduler_pb2.OUTCOME_UNSPECIFIED, False),
    ],
)
def test_only_a_trajectory_that_came_to_its_own_end_shows_its_length(
    outcome: int, own_end: bool
) -> None:
    evidence = Evidence()
    learn(evidence, closed(outcome))
    assert list(evidence.ended_of_prompt("p")) == [Ended("t", "r", "p", 300, 3, own_end)]


def test_what_tools_took_is_learned_with_a_trajectorys_end_and_outlives_the_process() -> None:
    evidence = Evidence()
    fact = closed(observed_tokens=700, tool_time=duration(12.5))
    ended = learn(evidence, fact)
    assert ended == Ended("t", "r", "p", 300, 3, True, None, 700, 12.5)
    assert decode(encode("p", [ended])) == ("p", [ended])
    older = json.dumps({"prompt_id": "p", "ended": [["t", "r", 300, 3, True]]}).encode()
    assert decode(older) == ("p", [Ended("t", "r", "p", 300, 3, True)])


def test_a_trajectorys_life_is_folded_from_its_facts() -> None:
    evidence = Evidence()
    opened = facts_pb2.TrajectoryOpened(trajectory_id="t", rollout_id="r", prompt_id="p")
    learn(evidence, make_fact("scheduler", trajectory_opened=opened))
    for turn, tokens in ((0, 40), (1, 60)):
        step = facts_pb2.StepFinished(
            step=facts_pb2.StepRef(trajectory_id="t", turn=turn), output_tokens=tokens
        )
        assert learn(evidence, make_fact("sidecar/e0", step_finished=step)) is None
    found = evidence.group_of("t", "p")
    assert found is not None
    assert (found[1].running["t"].gen_tokens, found[1].running["t"].turns) == (100, 2)
    assert learn(evidence, closed()) == Ended("t", "r", "p", 300, 3, True)
    assert learn(evidence, closed()) is None
    assert not found[1].running


@pytest.mark.parametrize(
    "fact",
    [
        closed(prompt_id=""),
        closed(trajectory_id=""),
        closed(gen_tokens=-1),
        closed(turns=-1),
        make_fact("x", trajectory_opened=facts_pb2.TrajectoryOpened(trajectory_id="t")),
        make_fact("x", engine_lost=facts_pb2.EngineLost(engine_id="e0")),
        facts_pb2.Fact(),
    ],
)
def test_a_fact_that_says_nothing_of_use_is_left_out(fact: facts_pb2.Fact) -> None:
    evidence = Evidence()
    learn(evidence, fact)
    assert evidence.revision == 0


def test_a_history_reads_back_as_it_was_written_and_one_that_was_kept_without_versions_is_read() -> (
    None
):
    ended = [Ended("t", "r", "p ä/:", 30, 2, True, 7), Ended("u", "r", "p ä/:", 40, 3, False)]
    assert decode(encode("p ä/:", ended)) == ("p ä/:", ended)
    old = b'{"prompt_id": "p", "ended": [["t", "r", 30, 2, true]]}'
    assert decode(old) == ("p", [Ended("t", "r", "p", 30, 2, True)])


LONG_S = 20.0


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode_letters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def transcript(name: str = "t", censored: bool = False) -> Transcript:
    turns = (Turn(10, 4, "look", "4 files"), Turn(20, 6, "read", "some text"), Turn(5, 0, "answer"))
    return Transcript(name, "r", "p", 12, turns, censored, "the task")


def heard(*facts: facts_pb2.Fact) -> Recordings:
    recordings = Recordings(decode_letters)
    for fact in facts:
        recordings.on_fact(fact)
    return recordings


@pytest.mark.parametrize("censored", [False, True])
def test_an_ended_trajectory_is_the_transcript_that_it_was(censored: bool) -> None:
    whole = transcript(censored=censored)
    facts = list(facts_of(whole, letters))
    assert list(heard(*facts).ended) == [whole]
    assert list(heard(*(fact for fact in facts for _ in range(2))).ended) == [whole], (
        "each told twice"
    )


def test_the_prompt_is_known_once_the_first_step_has_started() -> None:
    opened, finished, later, *_ = facts_of(transcript(), letters)
    started = prompt_started(transcript(), letters)
    recording = heard(opened, started).get("t", 0)
    assert recording is not None and recording.prompt == "the task"
    assert list(heard(opened, started, finished, started, later).ended) == list(
        heard(opened, finished, later).ended
    )
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
    assert [(turn.obs_tokens, turn.obs_text) for turn in recording.turns] == [
        (4, "4 files"),
        (6, ""),
        (0, ""),
    ]


def test_a_prompt_is_known_to_its_later_samples() -> None:
    recordings = heard(*facts_of(transcript("t"), letters))
    assert recordings.prompt_of("p") == "the task"
    assert recordings.prompt_of("other") == ""


def test_what_runs_is_bounded_the_longest_silent_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RUNNING", 2)
    opened = [next(facts_of(transcript(name), letters)) for name in "abc"]
    step = list(facts_of(transcript("a"), letters))[1]
    recordings = heard(opened[0], opened[1], step, opened[2])
    assert [recordings.get(*each) is not None for each in (("a", 1), ("b", 0), ("c", 0))] == [
        True,
        False,
        True,
    ]


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


BEHIND = FEATURES.index("versions_behind")


def updated(version: str) -> facts_pb2.Fact:
    return make_fact(
        "sidecar/e0",
        weights_updated=facts_pb2.WeightsUpdated(engine_id="e0", weight_version=version),
    )


def joined(version: str) -> facts_pb2.Fact:
    info = EngineInfo(engine_id="e0", weight_version=version)
    return make_fact("scheduler", engine_joined=facts_pb2.EngineJoined(info=info))


def short(name: str) -> list[facts_pb2.Fact]:
    return list(
        facts_of(
            Transcript(name, "r", "p", 12, (Turn(10, 4, "look", "4 files"), Turn(5, 0, "done"))),
            letters,
        )
    )


class Heard:
    """A learner that keeps its histories nowhere."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self.recordings = Recordings(decode_letters)
        self._learner = Learner(HistoryStore(cast("Any", None), self.evidence), self.recordings)

    async def hear(self, *facts: facts_pb2.Fact) -> None:
        for fact in facts:
            await self._learner.on_fact(fact)

    def behind(self, name: str) -> float:
        recording = self.recordings.get(name, 1)
        assert recording is not None
        progress = Progress(name, "p", 1, 10, 26, 12)
        estimator = Estimator(self.evidence, Prior(100.0, 1.0, 3.0, 1.0))
        asked = make_question(progress, recording, estimator.estimate(progress), self.evidence, "")
        assert asked is not None
        return float(asked.features[BEHIND])


async def test_a_trajectory_is_of_the_version_that_it_was_opened_under() -> None:
    """Also where an engine joins later with an older one."""
    heard = Heard()
    opened, *rest = short("one")
    await heard.hear(joined("3"), opened, updated("4"), *rest)
    await heard.hear(joined("3"), *short("two"))
    assert [each.weight_version for each in heard.recordings.ended] == ["3", "4"]
    assert [each.weight_version for each in heard.evidence.ended_of_prompt("p")] == [3, 4]


@pytest.mark.parametrize(("version", "behind"), [("5", math.log1p(3)), ("", 0.0), ("step-5", 0.0)])
async def test_a_question_says_how_far_the_siblings_are_behind_where_versions_are_numbers(
    version: str, behind: float
) -> None:
    heard = Heard()
    await heard.hear(joined("2"), *short("one"), updated(version), *short("two")[:2])
    assert heard.behind("two") == pytest.approx(behind)
