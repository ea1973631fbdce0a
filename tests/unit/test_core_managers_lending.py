"""Idle cores are lent to those whom they help most, and are never anybody's twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from treadle_core.tools.action import (
    CPU_CORES,
    Action,
    Amdahl,
    Duration,
    Fixed,
    InvalidActionError,
    Knowledge,
    Range,
    UnitSet,
    check_action,
)
from treadle_core.tools.cpu import CpuManager, Machine
from treadle_core.tools.decision import Start
from treadle_core.tools.grants import SERVED, InvalidHoldingError, held_units
from treadle_core.tools.loans import Loans, Progress, serial_s

MACHINE = Machine("a", ((0, 1, 2, 3), (4, 5, 6, 7)), 100)


def follower(name: str, single_s: float, most: int = 8, serial: float = 0.0) -> Action:
    duration = Duration(Knowledge.PROFILED, single_s)
    cost = {CPU_CORES: Range(1, most)}
    return Action(name, name, 0, cost, duration, CPU_CORES, Amdahl(serial), follows_from=1)


def plain(name: str, cores: int) -> Action:
    return Action(name, name, 0, {CPU_CORES: Fixed(cores)})


def take(manager: CpuManager, action: Action, cores: int, now_s: float = 0.0) -> tuple[int, ...]:
    begun = Start(action, cores, "a", None)
    return manager.take(begun, held_units(begun), now_s, 10.0).cores


def test_an_action_alone_borrows_all_and_gives_back_what_another_is_granted() -> None:
    """
    GIVEN   an action that was granted one of eight cores and may use six
    WHEN    idle cores are lent, and then another action starts with five
    Result: it has six, then three: its own and the two that nobody was granted
    """
    manager = CpuManager([MACHINE])
    own = take(manager, follower("long", 60.0, most=6), 1)
    manager.lend(1.0)
    (six,) = manager.moved().values()
    assert (len(six), set(own) <= set(six), manager.usage(1.0)[0].lent) == (6, True, 5)
    five = take(manager, plain("other", 5), 5, 2.0)
    (left,) = manager.moved().values()
    assert set(left) == set(range(8)) - set(five)
    assert manager.moved() == {}


def test_a_decision_sees_lent_cores_as_free_and_the_borrower_as_ending_sooner() -> None:
    manager = CpuManager([MACHINE])
    take(manager, follower("long", 80.0), 2)
    (before,) = manager.executing(0.0)
    manager.lend(0.0)
    (pool,), (after,) = manager.pools(0.0), manager.executing(0.0)
    assert pool.members[0].free_cores == 6
    assert before.ends_in_s == pytest.approx(40.0)
    assert after.ends_in_s == pytest.approx(10.0)
    assert (before.units, after.units) == (2, 2)


def test_a_unit_goes_to_whom_it_shortens_most() -> None:
    """The shorter has more to gain of a first unit than the longer of a fifth, and nothing of what it may not have."""
    loans = Loans()
    loans.begin(follower("long", 100.0), "a", 4, 0.0)
    loans.begin(follower("short", 50.0, most=2), "a", 1, 0.0)
    assert loans.lend("a", 1, 0.0) == ["short"]
    assert loans.lend("a", 2, 0.0) == ["long"]
    assert (loans.lent("short"), loans.lent("long")) == (1, 2)
    assert loans.lend("b", 5, 0.0) == []


def test_units_of_a_set_are_lent_up_to_its_next_number_or_not_at_all() -> None:
    loans = Loans()
    duration = Duration(Knowledge.PROFILED, 100.0)
    cost = {CPU_CORES: UnitSet((1, 4, 16))}
    loans.begin(Action("x", "x", 0, cost, duration, CPU_CORES, Amdahl(0.0), follows_from=1), "a", 1, 0.0)
    assert loans.lend("a", 2, 0.0) == []
    assert loans.lend("a", 14, 0.0) == ["x"]
    assert loans.lent("x") == 3


def test_the_largest_loans_are_called_first() -> None:
    loans = Loans()
    for name, single_s in (("long", 400.0), ("short", 20.0)):
        loans.begin(follower(name, single_s), "a", 1, 0.0)
    loans.lend("a", 9, 0.0)
    assert loans.lent("long") > loans.lent("short") > 0
    loans.recall("a", 7, 1.0)
    assert (loans.lent("long"), loans.lent("short")) == (1, 1)


def test_nothing_is_lent_to_who_would_have_ended_before_its_new_worker_helps() -> None:
    """Half of the work is each worker's own; five seconds are left, and a new one is busy with itself for fifty."""
    loans = Loans()
    loans.begin(follower("x", 100.0, serial=0.5), "a", 4, 0.0)
    ends_s = loans.ends_at_s("x")
    assert loans.lend("a", 4, ends_s - 5.0) == []
    loans.end("x")
    loans.begin(follower("x", 400.0, serial=0.01), "a", 1, 0.0)
    assert loans.lend("a", 4, 5.0) == ["x"]


def test_what_no_unit_shortens_is_the_serial_share() -> None:
    assert serial_s(follower("x", 100.0, serial=0.07)) == pytest.approx(7.0)
    assert serial_s(follower("x", 100.0, most=1, serial=0.07)) == 0.0
    assert serial_s(follower("x", 0.0)) == 0.0


def test_progress_counts_units_once_they_have_joined() -> None:
    """
    GIVEN   100 s of work on one unit, and units that are busy with themselves for 10 s first
    WHEN    it has one for 20 s, then two, then one again for the time from 40 to 50 s, then two
    Result: 20 + 10 s on one, 10 s on two, 10 s on one, and the other 40 s of work on two, which need not join again
    """
    progress = Progress(lambda units: 100.0 / units, 1, 10.0, 0.0)
    progress.move(2, 20.0)
    assert progress.ends_at_s() == pytest.approx(65.0)
    progress.move(1, 40.0)
    assert progress.left(50.0) == pytest.approx(0.4)
    progress.move(2, 50.0)
    assert progress.ends_at_s() == pytest.approx(70.0)
    assert progress.left(70.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(1, 8)), max_size=8), st.floats(0.0, 20.0))
def test_progress_ends_when_it_says(moves: list[tuple[float, int]], joining_s: float) -> None:
    """Whatever has happened: at the end that it names nothing is left, and a little before something is."""
    progress = Progress(lambda units: 200.0 / units, 1, joining_s, 0.0)
    for at_s, units in sorted(moves):
        progress.move(units, at_s)
    ends_s = progress.ends_at_s()
    if ends_s > max((at_s for at_s, _ in moves), default=0.0) + 0.1:
        assert progress.left(ends_s - 0.1) > 0.0
    assert progress.left(ends_s + 1e-6) == pytest.approx(0.0, abs=1e-9)


def test_only_what_can_be_scaled_by_cores_can_follow() -> None:
    with pytest.raises(InvalidActionError, match="follows"):
        check_action(Action("x", "x", 0, {CPU_CORES: Fixed(1)}, follows_from=1), (CPU_CORES,))


class Lending(RuleBasedStateMachine):
    """Any order of starts, loans and ends: a core is of one grant or one borrower, and who borrows keeps its own."""

    running = Bundle("running")

    @initialize()
    def begin(self) -> None:
        self.manager = CpuManager([MACHINE])
        self.own: dict[str, set[int]] = {}
        self.has: dict[str, set[int]] = {}
        self.count = 0
        self.now_s = 0.0

    @rule(target=running, cores=st.integers(1, 5), follows=st.booleans(), single_s=st.floats(0.1, 100.0))
    def starts(self, cores: int, follows: bool, single_s: float) -> str:
        self.count += 1
        name = f"x{self.count}"
        action = follower(name, single_s) if follows else plain(name, cores)
        try:
            granted = take(self.manager, action, cores, self.now_s)
        except InvalidHoldingError:
            assert cores > 8 - sum(map(len, self.own.values()))
            return ""
        self.own[name] = self.has[name] = set(granted)
        return name

    @rule(passes_s=st.floats(0.0, 5.0))
    def lends(self, passes_s: float) -> None:
        self.now_s += passes_s
        self.manager.lend(self.now_s)

    @rule(name=consumes(running))
    def ends(self, name: str) -> None:
        if name:
            self.manager.give_back(name, SERVED, self.now_s)
            del self.own[name], self.has[name]

    @invariant()
    def is_nobodys_twice(self) -> None:
        moved = self.manager.moved()
        for name, cores in moved.items():
            self.has[name] = set(cores)
        everything = [core for cores in self.has.values() for core in cores]
        assert len(set(everything)) == len(everything)
        assert all(self.own[name] <= self.has[name] for name in self.own)
        lent = sum(len(self.has[name] - self.own[name]) for name in self.own)
        assert lent == self.manager.usage(self.now_s)[0].lent


TestLending = Lending.TestCase
