"""Cut a list that changes between two calls into pages."""

import math
from collections.abc import Callable, Iterable
from heapq import nsmallest
from typing import TypeVar

from treadle_runtime.errors import InvalidArgument
from treadle_runtime.fields import require

Item = TypeVar("Item")
Place = tuple[float, str]  # an item's creation, Unix seconds, and its id

DEFAULT_PAGE = 100
LARGEST_PAGE = 1000


def page_of(items: Iterable[Item], place: Callable[[Item], Place], size: int, token: str) -> tuple[list[Item], str]:
    """The items after `token`, oldest first, at most `size` (0: DEFAULT_PAGE), and the token of the next page, empty
    after the last.

    A token names the last item of its page, so that what comes and goes between two pages neither repeats nor hides
    others. Raises InvalidArgument naming page_size or page_token.
    """
    require(0 <= size <= LARGEST_PAGE, "page_size", f"must be 1..{LARGEST_PAGE}, or 0 for {DEFAULT_PAGE}, is {size}")
    after = _place_in(token) if token else (-math.inf, "")
    size = size or DEFAULT_PAGE
    following = nsmallest(size + 1, (item for item in items if place(item) > after), key=place)
    page = following[:size]
    if len(page) == len(following):
        return page, ""
    created_s, name = place(page[-1])
    return page, f"{created_s.hex()}/{name}"


def _place_in(token: str) -> Place:
    created, slash, name = token.partition("/")
    try:
        if slash:
            return float.fromhex(created), name
    except (ValueError, OverflowError):
        pass
    raise InvalidArgument("page_token", "must be a next_page_token of an earlier answer, or empty")
