"""Lines of those that wait to begin: kept as they go, they are what sorting everybody again would give."""

from hypothesis import given, settings
from hypothesis import strategies as st
from treadle_core.steps.state import Lines, Waiter

ENGINES = ("e0", "e1", "e2")
PUT = st.tuples(st.integers(0, 9), st.sampled_from(ENGINES), st.floats(-3.0, 3.0).map(round))
STEPS = st.lists(st.one_of(PUT, st.integers(0, 9)), max_size=60)


@settings(deadline=None)
@given(STEPS)
def test_lines_equal_a_sort_of_all_that_stand_in_them(steps: list[tuple[int, str, float] | int]) -> None:
    lines, stand = Lines(), dict[int, tuple[str, Waiter]]()
    for step in steps:
        if isinstance(step, int):
            lines.drop(f"t{step}")
            stand.pop(step, None)
        else:
            number, engine_id, rank = step
            stand[number] = (engine_id, Waiter(rank, number, f"t{number}"))
            lines.put(*stand[number])
        for engine_id in ENGINES:
            assert list(lines.line(engine_id)) == sorted(waiter for at, waiter in stand.values() if at == engine_id)
        assert lines.engine_ids() == sorted({at for at, _ in stand.values()})


def test_of_equal_rank_who_asked_first_is_first() -> None:
    lines = Lines()
    lines.put("e0", Waiter(-5.0, 2, "late"))
    lines.put("e0", Waiter(-5.0, 1, "early"))
    lines.put("e0", Waiter(-9.0, 3, "long"))
    assert [waiter.trajectory_id for waiter in lines.line("e0")] == ["long", "early", "late"]
