"""Field checks: what passes, and that a refusal names the field."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from treadle_runtime import errors as fields
from treadle_runtime.errors import InvalidArgument


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (fields.positive, [1, 0.1], [0, -1, math.nan, math.inf]),
        (fields.non_negative, [0, 2.5], [-1, -0.1, math.nan, -math.inf]),
        (fields.finite, [0, -3.5], [math.nan, math.inf, -math.inf]),
        (fields.non_empty, ["x", b"x"], ["", b""]),
        (fields.identifier, ["t-1", "a.b:c_D9", "x" * 128], ["", "x" * 129, "a b", "a/b", "é", "a\n", "a*"]),
    ],
)
def test_a_check_returns_the_good_and_refuses_the_bad_naming_the_field(
    check: Callable[[str, Any], object], good: list[object], bad: list[object]
) -> None:
    for value in good:
        assert check("engines[0].x", value) == value
    for value in bad:
        with pytest.raises(InvalidArgument) as refused:
            check("engines[0].x", value)
        assert refused.value.field == "engines[0].x"
        assert refused.value.message.startswith("engines[0].x: ")


def test_require_refuses_unless_the_condition_holds() -> None:
    fields.require([0], "turn", "must be the next one")
    with pytest.raises(InvalidArgument, match="turn: must be the next one"):
        fields.require([], "turn", "must be the next one")
