"""Facts: minting, subjects, keys."""

import pytest
from treadle.engine.v1.engine_pb2 import EngineInfo
from treadle.telemetry.v1.facts_pb2 import (
    EngineJoined,
    EngineLost,
    Fact,
    StepFinished,
    StepRef,
    TrajectoryOpened,
)
from treadle_runtime.bus import kv_key
from treadle_runtime.facts import KINDS, make_fact, subject_of, subjects_of


def test_a_fact_gets_an_id_of_its_own_and_the_present_time() -> None:
    first = make_fact("sidecar/e0", engine_lost=EngineLost(engine_id="e0"))
    second = make_fact("sidecar/e0", engine_lost=EngineLost(engine_id="e0"))
    assert first.fact_id != second.fact_id
    assert first.source == "sidecar/e0"
    assert first.time.seconds > 0


def test_a_fact_has_exactly_one_kind() -> None:
    with pytest.raises(TypeError, match="exactly one kind"):
        make_fact("x")
    with pytest.raises(TypeError, match="exactly one kind"):
        make_fact("x", step_eaten=EngineLost())
    with pytest.raises(ValueError, match="no kind"):
        subject_of(Fact(fact_id="f"))


def test_the_subject_names_the_kind_and_whom_the_fact_is_about() -> None:
    step = StepFinished(step=StepRef(trajectory_id="t-12", engine_id="e0"))
    assert subject_of(make_fact("x", step_finished=step)) == "treadle.facts.step-finished.t-12"
    joined = EngineJoined(info=EngineInfo(engine_id="e0"))
    assert subject_of(make_fact("x", engine_joined=joined)) == "treadle.facts.engine-joined.e0"
    odd = TrajectoryOpened(trajectory_id="a.b *>c")
    assert (
        subject_of(make_fact("x", trajectory_opened=odd))
        == "treadle.facts.trajectory-opened.a_b___c"
    )
    assert subject_of(make_fact("x", engine_lost=EngineLost())) == "treadle.facts.engine-lost.none"


def test_subjects_follow_the_kinds_and_an_unknown_kind_is_refused() -> None:
    assert subjects_of(["step_finished"]) == ["treadle.facts.step-finished.>"]
    assert subjects_of([]) == ["treadle.facts.>"]
    assert len(subjects_of(sorted(KINDS))) == len(KINDS)
    with pytest.raises(ValueError, match="step-finished"):
        subjects_of(["step-finished"])


def test_distinct_ids_give_distinct_valid_keys() -> None:
    ids = ["a", "a.b", "a:b", "a=b", "a=3Ab", "A", "a b", "é", ".", "a/b"]
    keys = {kv_key("m", identifier) for identifier in ids}
    assert len(keys) == len(ids)
    assert kv_key("a", "b.c") != kv_key("a.b", "c")
    assert kv_key("trajectory", "t-1") == "trajectory.t-1"
