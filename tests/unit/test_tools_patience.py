"""How long a function is waited for: as one that may have to start, else as long as it was seen to
take."""

from hypothesis import given
from hypothesis import strategies as st
from treadle_tools.remote.functions import SHORTEST_COLD_S, SHORTEST_WARM_S, Patience, retry_after_s

COLD_S, IDLE_S = 90.0, 60.0


def test_one_that_never_answered_is_waited_for_as_long_as_is_allowed() -> None:
    patience = Patience(COLD_S, IDLE_S)
    assert patience.is_cold(0.0)
    assert patience.longest_s(0.0) == COLD_S


def test_a_warm_one_is_waited_for_as_long_as_it_was_seen_to_take() -> None:
    patience = Patience(COLD_S, IDLE_S)
    patience.answered(0.0, 12.0)  # it had to start
    assert patience.longest_s(12.0) == COLD_S
    for step in range(30):
        patience.answered(12.0 + step, 12.1 + step)
    assert patience.longest_s(42.0) == SHORTEST_WARM_S
    for step in range(30):
        patience.answered(50.0 + step, 50.0 + step + 10.0)
    assert 10.0 < patience.longest_s(90.0) < COLD_S


def test_one_that_was_not_asked_for_long_may_be_cold_again() -> None:
    patience = Patience(COLD_S, IDLE_S)
    patience.answered(0.0, 12.0)
    patience.answered(12.0, 12.1)
    assert not patience.is_cold(12.1 + IDLE_S)
    assert patience.is_cold(12.2 + IDLE_S)
    assert SHORTEST_COLD_S <= patience.longest_s(12.2 + IDLE_S) < COLD_S  # its start took 12 s


def test_after_a_failure_all_is_forgotten_but_what_is_allowed() -> None:
    patience = Patience(COLD_S, IDLE_S)
    patience.answered(0.0, 1.0)
    patience.answered(1.0, 1.1)
    patience.failed()
    assert patience.longest_s(1.1) == COLD_S


@given(
    st.lists(st.tuples(st.floats(0.0, 500.0), st.floats(0.0, 500.0)), max_size=30),
    st.floats(0.5, 200.0),
)
def test_no_wait_is_longer_than_is_allowed(
    answers: list[tuple[float, float]], cold_s: float
) -> None:
    patience = Patience(cold_s, IDLE_S)
    now_s = 0.0
    for pause_s, waited_s in answers:
        now_s += pause_s
        assert 0.0 < patience.longest_s(now_s) <= cold_s
        patience.answered(now_s, now_s + waited_s)
        now_s += waited_s


def test_a_date_to_come_again_is_read_by_the_clock_of_the_machine_that_gave_it() -> None:
    """The provider's clock is years away from this machine's."""
    again, date = "Wed, 21 Oct 2015 07:28:30 GMT", "Wed, 21 Oct 2015 07:28:00 GMT"
    assert retry_after_s(again, date) == 30.0
    assert retry_after_s(date, again) == 0.0
    assert retry_after_s(again, "") == 0.0
    assert (retry_after_s("12", date), retry_after_s("soon", date)) == (12.0, None)
