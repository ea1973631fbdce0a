"""What the predictor's service reads from facts, and what it leaves out."""

import pytest
from treadle.scheduler.v1 import scheduler_pb2
from treadle.telemetry.v1 import facts_pb2
from treadle_core.ranking.evidence import Ended, Evidence
from treadle_predictor.convert import learn
from treadle_predictor.history import decode, encode
from treadle_runtime.facts import make_fact


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
def test_only_a_trajectory_that_came_to_its_own_end_shows_its_length(outcome: int, own_end: bool) -> None:
    evidence = Evidence()
    learn(evidence, closed(outcome))
    assert list(evidence.ended_of_prompt("p")) == [Ended("t", "r", "p", 300, 3, own_end)]


def test_a_trajectorys_life_is_folded_from_its_facts() -> None:
    evidence = Evidence()
    opened = facts_pb2.TrajectoryOpened(trajectory_id="t", rollout_id="r", prompt_id="p")
    learn(evidence, make_fact("scheduler", trajectory_opened=opened))
    for turn, tokens in ((0, 40), (1, 60)):
        step = facts_pb2.StepFinished(step=facts_pb2.StepRef(trajectory_id="t", turn=turn), output_tokens=tokens)
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


def test_a_history_reads_back_as_it_was_written() -> None:
    ended = [Ended(f"t{number}", "r", "p ä/:", number, 1, bool(number % 2)) for number in range(5)]
    assert decode(encode("p ä/:", ended)) == ("p ä/:", ended)
