"""Pages: each item once, whatever comes and goes meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_runtime.errors import InvalidArgument
from treadle_runtime.fields import Place, page_of


def items(count: int) -> list[Place]:
    """Made two at a time."""
    return [(number // 2 / 7, f"t{number:03}") for number in range(count)]


def page(of: list[Place], size: int, token: str = "") -> tuple[list[Place], str]:
    return page_of(of, lambda item: item, size, token)


@given(st.permutations(items(40)), st.integers(0, 40), st.integers(1, 12))
def test_pages_show_each_item_once_the_oldest_first(
    every: list[Place], count: int, size: int
) -> None:
    shown, token = page(every[:count], size)
    while token:
        assert len(shown) % size == 0
        more, token = page(every[:count], size, token)
        shown += more
    assert shown == sorted(every[:count])


def test_what_comes_and_goes_between_pages_hides_and_repeats_nothing() -> None:
    of = items(6)
    _, token = page(of, 3)
    of = [*of[4:], (99.0, "t900")]  # the last one shown is gone too
    assert page(of, 10, token)[0] == of


def test_by_default_a_page_has_a_hundred_items() -> None:
    assert len(page(items(200), 0)[0]) == 100


@pytest.mark.parametrize("token", ["x", "????", "é", "soon/t0", "/t0", "0x1p99999/t0"])
def test_a_token_that_was_never_given_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        page(items(3), 1, token)
    assert refused.value.field == "page_token"


@pytest.mark.parametrize("size", [-1, 1001])
def test_a_page_of_no_size_or_too_many_items_is_refused(size: int) -> None:
    with pytest.raises(InvalidArgument, match=r"page_size: must be 1\.\.1000, or 0 for 100"):
        page(items(3), size)
