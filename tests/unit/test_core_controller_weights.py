"""The controller: the weights that all engines are to serve."""

import pytest
from support.control import Scenario, all_of, one
from treadle_core import actions as act
from treadle_core import events as ev
from treadle_core.model import EngineLoad
from treadle_core.refusals import BadField, NoEngine


def set_weights(scenario: Scenario, version: str = "v1", path: str = "/m/v1") -> list[str]:
    """The engines that are asked to load."""
    actions = scenario.send(ev.WeightsSet(version, path))
    return [load.engine_id for load in all_of(actions, act.LoadWeights)]


def test_engines_that_are_behind_get_no_step_until_they_serve_the_desired_weights() -> None:
    scenario = Scenario(engines=["e0", "e1"])
    scenario.open("t")
    ticket = scenario.step("t", 0)
    scenario.finish(ticket)
    assert set_weights(scenario) == ["e0", "e1"]
    other = "e1" if ticket.engine_id == "e0" else "e0"
    for updated in ("", other):
        if updated:
            scenario.send(ev.WeightsUpdated(updated, "v1"))
        with pytest.raises(NoEngine, match="desired weights"):
            scenario.ask("t", 1)
    scenario.send(ev.WeightsUpdated(ticket.engine_id, "v1"))
    following = scenario.step("t", 1)
    assert (following.engine_id, following.weight_version) == (ticket.engine_id, "v1"), (
        "it waited for its own engine"
    )


def test_an_engine_that_joins_with_other_weights_loads_before_it_gets_a_step() -> None:
    scenario = Scenario(engines=["e0"])
    set_weights(scenario)
    scenario.send(ev.WeightsUpdated("e0", "v1"))
    load = one(scenario.engine("e0"), act.LoadWeights)  # it has restarted
    assert (load.address, load.weight_version, load.model_path) == ("e0:7410", "v1", "/m/v1")
    scenario.open("t")
    with pytest.raises(NoEngine):
        scenario.ask("t", 0)
    assert not all_of(scenario.engine("e1", weight_version="v1"), act.LoadWeights)
    assert scenario.step("t", 0).engine_id == "e1"


def test_an_engine_that_cannot_load_loses_its_trajectories_and_is_asked_again_later() -> None:
    scenario = Scenario(engines=["e0", "e1"])
    scenario.open("t")
    ticket = scenario.step("t", 0)
    scenario.finish(ticket)
    set_weights(scenario)
    other = "e1" if ticket.engine_id == "e0" else "e0"
    scenario.send(ev.WeightsUpdated(other, "v1"))
    scenario.send(ev.LoadFailed(ticket.engine_id, "v1", refused=True, message="no such file"))
    assert scenario.step("t", 1).engine_id == other
    engine = scenario.controller.engine(ticket.engine_id)
    assert engine is not None and engine.load_error == "no such file"
    for engine_id in ("e0", "e1"):
        scenario.renew(engine_id)
    assert not all_of(scenario.advance(scenario.tuning.lease_ttl_s / 2), act.LoadWeights)
    heard = len(scenario.heard)
    for _ in range(20):
        scenario.renew("e0")
        scenario.renew("e1")
        scenario.advance(scenario.tuning.lease_ttl_s / 2)
    assert {load.engine_id for load in all_of(scenario.heard[heard:], act.LoadWeights)} == {
        ticket.engine_id
    }
    engine = scenario.controller.engine(ticket.engine_id)
    assert engine is not None and engine.load_error == "no such file", "why it could not"


def test_trajectories_of_an_engine_that_loads_for_longer_than_others_do_not_wait_for_it() -> None:
    scenario = Scenario(engines=["e0", "e1"])
    scenario.open("t")
    ticket = scenario.step("t", 0)
    scenario.finish(ticket)
    set_weights(scenario)
    other = "e1" if ticket.engine_id == "e0" else "e0"

    def wait_until_asked_again() -> None:
        for _ in range(round(scenario.tuning.load_again_s / 5.0)):
            scenario.renew("e0")
            scenario.renew("e1")
            scenario.advance(5.0)

    wait_until_asked_again()
    with pytest.raises(NoEngine):
        scenario.ask("t", 1)  # no engine has loaded
    scenario.send(ev.WeightsUpdated(other, "v1"))
    wait_until_asked_again()
    assert scenario.step("t", 1).engine_id == other


def test_a_load_that_was_not_answered_is_asked_for_again_soon_and_after_a_restart() -> None:
    scenario = Scenario(engines=["e0"])
    set_weights(scenario)
    scenario.send(ev.LoadFailed("e0", "v0", refused=True, message="of other weights"))
    scenario.send(ev.LoadFailed("e0", "v1", refused=False, message="no answer"))
    assert one(scenario.advance(scenario.tuning.load_retry_s), act.LoadWeights).engine_id == "e0"
    heard = len(scenario.heard)
    scenario.restart()
    assert one(scenario.heard[heard:], act.LoadWeights).weight_version == "v1"


def test_what_cannot_be_desired_is_refused() -> None:
    scenario = Scenario(engines=["e0"])
    set_weights(scenario)
    with pytest.raises(BadField, match="desired already"):
        set_weights(scenario, path="/elsewhere")
    with pytest.raises(BadField, match="desired already"):
        set_weights(scenario, path="")
    with pytest.raises(BadField, match="must not begin with"):
        set_weights(scenario, "incomplete-v2")


def load_error(scenario: Scenario, engine_id: str) -> str:
    engine = scenario.controller.engine(engine_id)
    assert engine is not None
    return engine.load_error


def test_pushed_weights_are_loaded_by_nobody_and_an_engine_gets_steps_once_it_has_them() -> None:
    scenario = Scenario(engines=["e0", "e1"])
    scenario.open("t")
    ticket = scenario.step("t", 0)
    scenario.finish(ticket)
    other = "e1" if ticket.engine_id == "e0" else "e0"
    assert not set_weights(scenario, path="")
    for engine_id in ("e0", "e1"):
        scenario.renew(engine_id, EngineLoad(weight_version="incomplete-v1", paused=True))
    with pytest.raises(NoEngine, match="desired weights"):
        scenario.ask("t", 1)
    scenario.send(ev.WeightsUpdated(other, "v1"))
    with pytest.raises(NoEngine):
        scenario.ask("t", 1)  # it waits for its own engine, which is being pushed to as well
    scenario.send(ev.WeightsUpdated(ticket.engine_id, "v1"))
    assert scenario.step("t", 1).engine_id == ticket.engine_id
    assert not all_of(scenario.heard, act.LoadWeights)


def test_an_engine_that_a_push_has_missed_says_so_and_loads_once_the_version_has_a_path() -> None:
    """e0 does not report the pushed version within a minute, and e2 joins later. Result: both stay
    behind with an error that says what to do, also after a restart, and trajectories go elsewhere,
    until a path is set."""
    scenario = Scenario(engines=["e0", "e1"])
    scenario.open("t")
    ticket = scenario.step("t", 0)
    scenario.finish(ticket)
    missed, whole = ticket.engine_id, "e1" if ticket.engine_id == "e0" else "e0"
    set_weights(scenario, path="")
    scenario.send(ev.WeightsUpdated(whole, "v1"))
    assert load_error(scenario, missed) == "", "it may be pushed to at this moment"
    for _ in range(round(scenario.tuning.load_again_s / 5.0)):
        scenario.renew("e0")
        scenario.renew("e1")
        scenario.advance(5.0)
    scenario.engine("e2")
    for engine_id in (missed, "e2"):
        assert "push the version again, or set it with a model_path" in load_error(
            scenario, engine_id
        )
    assert scenario.step("t", 1).engine_id == whole
    scenario.restart()
    assert "was not pushed to it" in load_error(scenario, "e2")

    assert sorted(set_weights(scenario)) == sorted([missed, "e2"])
    assert load_error(scenario, "e2") == ""


def test_an_engine_with_parts_of_weights_gets_no_step_also_where_no_version_is_desired() -> None:
    scenario = Scenario(engines=["e0"])
    scenario.open("t")
    scenario.renew("e0", EngineLoad(weight_version="incomplete-v1", paused=True))
    with pytest.raises(NoEngine):
        scenario.ask("t", 0)
    scenario.send(ev.WeightsUpdated("e0", "v1"))
    assert scenario.step("t", 0).weight_version == "v1"


def test_an_engine_that_does_not_serve_the_desired_weights_any_more_is_asked_soon() -> None:
    """Its memory was given to a trainer, or somebody has loaded other weights past the
    scheduler."""
    scenario = Scenario(engines=["e0", "e1"])
    set_weights(scenario)
    for engine_id in ("e0", "e1"):
        scenario.send(ev.WeightsUpdated(engine_id, "v1"))
    assert not all_of(
        scenario.renew("e0", EngineLoad(weight_version="incomplete-v1")), act.LoadWeights
    )
    scenario.send(ev.WeightsUpdated("e1", "v7"))
    asked = all_of(scenario.advance(scenario.tuning.load_retry_s), act.LoadWeights)
    assert {load.engine_id for load in asked} == {"e0", "e1"}
