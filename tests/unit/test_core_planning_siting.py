"""CACHE_AWARE: with the prefix until the loads are skewed, then wherever least is out. STICKY:
where least was out."""

from support.control import Scenario
from treadle_core.model import PlacementRule, Policy
from treadle_core.tuning import Tuning

POLICY = Policy(placement=PlacementRule.CACHE_AWARE, migrate=False)
TUNING = Tuning(skew_steps=4, skew_ratio=1.5)


def scenario() -> Scenario:
    """Two engines, the policy in force."""
    return Scenario(POLICY, TUNING, engines=("e0", "e1"), slots=100)


def test_siblings_go_where_their_prompt_is_and_a_trajectory_stays_with_its_prefix() -> None:
    mesh = scenario()
    mesh.open("a0", prompt_id="a")
    first = mesh.step("a0", 0).engine_id
    mesh.open("b0", prompt_id="b")
    other = mesh.step("b0", 0).engine_id
    assert other != first, "no prefix anywhere: least load"
    for number in range(1, 4):
        mesh.open(f"a{number}", prompt_id="a")
        assert mesh.step(f"a{number}", 0).engine_id == first
    for turn in range(3):
        mesh.finish(mesh.controller.trajectory("a0").ticket or mesh.step("a0", turn))
        assert mesh.step("a0", turn + 1).engine_id == first


def test_a_skew_in_number_and_in_ratio_sends_steps_to_the_least_loaded() -> None:
    """Six siblings out at one engine, none at the other: over four more, over 1.5 times as many."""
    mesh = scenario()
    engines = []
    for number in range(7):
        mesh.open(f"a{number}", prompt_id="a")
        engines.append(mesh.step(f"a{number}", 0).engine_id)
    assert engines[:5] == ["e0"] * 5
    assert engines[5] == "e1"


def test_a_difference_that_is_small_beside_the_load_is_no_skew() -> None:
    """20 and 15 steps: five more, but not 1.5 times as many."""
    mesh = scenario()
    for number in range(35):
        mesh.open(f"p{number}", pinned_engine_id="e0" if number < 20 else "e1")
        mesh.step(f"p{number}", 0)
    mesh.open("a0", prompt_id="a")
    mesh.open("a1", prompt_id="a")
    first = mesh.step("a0", 0)
    assert first.engine_id == "e1", "no prefix anywhere"
    mesh.finish(first)
    mesh.open("p35", pinned_engine_id="e0")
    mesh.step("p35", 0)
    assert mesh.step("a1", 0).engine_id == "e1"


def test_a_prefix_on_an_engine_that_is_gone_is_no_prefix() -> None:
    mesh = scenario()
    mesh.open("a0", prompt_id="a")
    ticket = mesh.step("a0", 0)
    mesh.finish(ticket)
    mesh.now += 5
    mesh.renew("e1")
    mesh.advance(6)
    assert mesh.step("a0", 1).engine_id == "e1"
    mesh.open("a1", prompt_id="a")
    assert mesh.step("a1", 0).engine_id == "e1"


def test_the_prompts_are_known_again_after_a_restart() -> None:
    mesh = scenario()
    mesh.open("b0", prompt_id="b")
    mesh.step("b0", 0)
    mesh.open("a0", prompt_id="a")
    first = mesh.step("a0", 0).engine_id
    mesh.restart()
    mesh.open("a1", prompt_id="a")
    assert mesh.step("a1", 0).engine_id == first == "e1"


def test_a_sticky_trajectory_stays_where_least_was_out_at_its_first_step() -> None:
    mesh = Scenario(
        Policy(placement=PlacementRule.STICKY, migrate=False),
        TUNING,
        engines=("e0", "e1"),
        slots=100,
    )
    for number in range(4):
        mesh.open(f"t{number}")
    first = [mesh.step(f"t{number}", 0) for number in range(4)]
    assert [ticket.engine_id for ticket in first] == ["e0", "e1", "e0", "e1"]
    for ticket in first[1:]:
        mesh.finish(ticket)
    assert [mesh.step(f"t{number}", 1).engine_id for number in (1, 2, 3)] == ["e1", "e0", "e1"]
