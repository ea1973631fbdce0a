"""Waiting steps: the queue of each engine is what sorting all of its waiting steps would give."""

from hypothesis import given
from hypothesis import strategies as st
from treadle_core.events import StepRequested
from treadle_core.tables.waiting import WaitingSteps

ENGINES = ("e0", "e1", "e2")
ENQUEUE = st.tuples(st.integers(0, 9), st.sampled_from(ENGINES), st.floats(-3.0, 3.0).map(round))


def request(name: str) -> StepRequested:
    return StepRequested("r", name, 0, 100, 64)


@given(st.lists(st.one_of(ENQUEUE, st.integers(0, 9)), max_size=60))
def test_queues_equal_a_sort_of_all_steps_that_wait_in_them(
    calls: list[tuple[int, str, float] | int],
) -> None:
    waiting = WaitingSteps()
    stands: dict[str, tuple[str, float, int]] = {}
    for arrival, call in enumerate(calls):
        if isinstance(call, int):
            waiting.remove(f"t{call}")
            stands.pop(f"t{call}", None)
        else:
            name, engine_id, priority = f"t{call[0]}", call[1], call[2]
            if waiting.add(request(name)):
                stands[name] = (engine_id, -priority, arrival)
            stands[name] = (engine_id, -priority, stands[name][2])
            waiting.enqueue(engine_id, name, priority)
        for engine_id in ENGINES:
            there = sorted((*rank, name) for name, (at, *rank) in stands.items() if at == engine_id)
            assert [place.trajectory_id for place in waiting.queue(engine_id)] == [
                name for *_, name in there
            ]
        assert waiting.queued_engines() == sorted({at for at, *_ in stands.values()})
        assert waiting.by_arrival(stands) == sorted(stands, key=lambda name: stands[name][2])


def test_a_repeated_request_keeps_its_arrival_and_the_newest_values_count() -> None:
    waiting = WaitingSteps()
    assert all(waiting.add(request(name)) for name in "ab")
    again = StepRequested("again", "a", 0, 200, 64)
    assert not waiting.add(again)
    assert waiting.by_arrival({"b", "a", "unknown"}) == ["a", "b"]
    assert waiting.request("a") is again
