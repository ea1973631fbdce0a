"""Records survive the state store, also one of another version."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.control import Scenario
from treadle_core import events as ev
from treadle_core.model import (
    DecodeCurve,
    EngineLoad,
    EngineRecord,
    EngineSpec,
    Estimate,
    MoveRecord,
    Outcome,
    Policy,
    Prediction,
    TicketRecord,
    TrajectoryRecord,
    WeightsRecord,
)
from treadle_scheduler.driver import CorruptRecord, MeshRecord, decode, encode

FINITE = st.floats(0, 1e12)
ESTIMATES = st.builds(lambda values: Estimate(*sorted(values)), st.tuples(FINITE, FINITE, FINITE))
SPECS = st.builds(EngineSpec, decode_curve=st.builds(DecodeCurve, FINITE, FINITE, FINITE, FINITE))
PREDICTIONS = st.builds(
    Prediction, remaining_tokens=ESTIMATES, remaining_turns=st.none() | ESTIMATES
)
RECORDS = st.one_of(
    st.builds(
        TrajectoryRecord,
        policy=st.builds(Policy),
        prediction=st.none() | PREDICTIONS,
        ticket=st.none()
        | st.builds(TicketRecord, priority=FINITE, issued_s=FINITE, expires_s=FINITE),
        move=st.none() | st.builds(MoveRecord, asked_s=FINITE, give_up_s=FINITE),
        opened_s=FINITE,
        hardware_tags=st.lists(st.text()).map(tuple),
        uncounted=st.lists(st.text()).map(tuple),
        deadline_s=st.none() | FINITE,
        reward=st.none() | FINITE,
        outcome=st.none() | st.sampled_from(list(Outcome)),
    ),
    st.builds(
        EngineRecord, spec=SPECS, lease_expires_s=FINITE, load=st.none() | st.builds(EngineLoad)
    ),
    st.builds(
        MeshRecord,
        policy=st.builds(Policy),
        epoch_s=FINITE,
        weights=st.none() | st.builds(WeightsRecord),
    ),
)


@given(RECORDS)
def test_what_is_stored_comes_back_equal(
    record: TrajectoryRecord | EngineRecord | MeshRecord,
) -> None:
    assert decode(type(record), encode(record)) == record


def full_record() -> TrajectoryRecord:
    scenario = Scenario()
    scenario.engine("e0")
    scenario.open("t", hardware_tags=())
    scenario.predict("t", 5)
    scenario.step("t", 0)
    return scenario.controller.trajectory("t")


def test_fields_that_another_version_knows_are_ignored_and_missing_ones_take_their_default() -> (
    None
):
    record = full_record()
    plain = json.loads(encode(record))
    plain["invented_later"] = {"a": 1}
    assert decode(TrajectoryRecord, json.dumps(plain).encode()) == record
    del plain["priority"]
    assert decode(TrajectoryRecord, json.dumps(plain).encode()).priority == 0.0


FLYING = encode(full_record()).replace(b'"stepping"', b'"flying"')


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"\xff", FLYING])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode(TrajectoryRecord, data)


def test_a_restarted_controller_goes_on_from_stored_bytes() -> None:
    scenario = Scenario()
    scenario.engine("e0")
    for number in range(3):
        scenario.open(f"t{number}")
        scenario.step(f"t{number}", 0, request_id=f"r{number}")
    scenario.trajectories = {
        k: decode(TrajectoryRecord, encode(v)) for k, v in scenario.trajectories.items()
    }
    scenario.engines = {k: decode(EngineRecord, encode(v)) for k, v in scenario.engines.items()}
    before = scenario.controller.trajectories()
    scenario.restart()
    assert scenario.controller.trajectories() == before
    assert scenario.send(ev.Tick()) == []
