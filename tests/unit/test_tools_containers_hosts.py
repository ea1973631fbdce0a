"""On which host a container is made, and what happens where none makes it."""

from itertools import pairwise

import pytest
from support.fleets import COUNTER, make_recipe
from treadle_tools.sandbox.containers.hosts import REST_PAUSES_S, TRIES, HostFailed, Hosts, Recipe
from treadle_tools.tool import Kind, Tool

RECIPE = make_recipe(COUNTER)


class FakeTime:
    """A clock that sleeping moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if seconds:
            self.slept.append(seconds)


class FakeMaker:
    """A host that makes nothing, and fails so many times."""

    def __init__(self, name: str, fails: int = 0) -> None:
        self.name = name
        self.fails = fails
        self.made = 0

    async def make(self, recipe: Recipe, name: str) -> None:
        if self.fails:
            self.fails -= 1
            raise HostFailed(f"{self.name} refuses")
        self.made += 1


def hosts_of(clock: FakeTime, *makers: FakeMaker) -> Hosts:
    return Hosts(makers, clock, clock.sleep)  # type: ignore[arg-type]


async def test_the_least_loaded_host_is_taken() -> None:
    a, b, c = FakeMaker("a"), FakeMaker("b"), FakeMaker("c")
    hosts = hosts_of(FakeTime(), a, b, c)
    hosts.add_load("a", 1)
    for number in range(5):
        await hosts.make(RECIPE, str(number))
    assert (a.made, b.made, c.made) == (1, 2, 2)
    hosts.add_load("b", -2)
    assert (await hosts.make(RECIPE, "x")).name == "b"


async def test_a_host_that_fails_rests_longer_each_time_while_others_work() -> None:
    """Nothing waits; the first is asked again only after 0.5, 1 and 2 seconds; then it carries its
    share."""
    clock, bad, good = FakeTime(), FakeMaker("bad", fails=3), FakeMaker("good")
    hosts = hosts_of(clock, bad, good)
    asked = []
    for _ in range(40):
        left = bad.fails
        await hosts.make(RECIPE, "x")
        if bad.fails < left:
            asked.append(clock.now)
        clock.now += 0.1
    assert clock.slept == []
    assert [later - sooner for sooner, later in pairwise(asked)] == pytest.approx(
        [0.5, 1.0], abs=0.11
    )
    assert bad.made > 0


async def test_where_all_hosts_fail_it_is_tried_with_pauses_and_then_given_up() -> None:
    clock, only = FakeTime(), FakeMaker("only", fails=100)
    hosts = hosts_of(clock, only)
    with pytest.raises(HostFailed, match="only refuses"):
        await hosts.make(RECIPE, "x")
    assert only.fails == 100 - TRIES
    assert clock.slept == [0.5, 1.0, 2.0, 4.0]
    assert hosts._states["only"].load == 0
    for _ in range(3):
        with pytest.raises(HostFailed):
            await hosts.make(RECIPE, "x")
    assert max(clock.slept) == REST_PAUSES_S[-1]


def test_a_recipe_shows_the_tools_own_code_unless_the_image_has_it() -> None:
    shown = {place.rpartition("/")[2] for _, place in RECIPE.code}
    assert shown == {"treadle_tools", "support"}
    assert make_recipe(COUNTER, code_in_image=True).code == ()
    absent = Tool(
        name="x", kind=Kind.STATELESS, description="", entry="no_such_module:f", arguments_schema={}
    )
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        make_recipe(absent)
