"""Checks of request fields: what passes, and that a refusal names the field; seconds and protobuf's
times."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from treadle_runtime import errors, fields
from treadle_runtime.errors import InvalidArgument
from treadle_runtime.fields import (
    LONGEST_DURATION_S,
    duration,
    require_duration,
    require_timestamp,
    seconds,
    timestamp,
)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (fields.positive, [1, 0.1], [0, -1, math.nan, math.inf]),
        (fields.non_negative, [0, 2.5], [-1, -0.1, math.nan, -math.inf]),
        (fields.finite, [0, -3.5], [math.nan, math.inf, -math.inf]),
        (fields.non_empty, ["x", b"x"], ["", b""]),
        (
            fields.identifier,
            ["t-1", "a.b:c_D9", "x" * 128],
            ["", "x" * 129, "a b", "a/b", "é", "a\n", "a*"],
        ),
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


@pytest.mark.parametrize("value", [0.0, 1e-9, 0.125, 1.25, 86_400.000000001])
def test_seconds_survive_the_way_through_a_message(value: float) -> None:
    assert seconds(duration(value)) == value
    assert seconds(timestamp(value)) == value


def test_a_duration_is_never_negative_and_never_longer_than_one_can_be() -> None:
    assert duration(-0.5) == Duration()
    assert duration(math.inf) == Duration(seconds=LONGEST_DURATION_S)


def test_a_field_of_a_request_is_converted_when_it_is_a_time() -> None:
    assert require_duration("wait", Duration(seconds=1, nanos=500_000_000)) == 1.5
    assert require_timestamp("deadline", Timestamp(seconds=1_700_000_000)) == 1_700_000_000


@pytest.mark.parametrize(
    "value", [Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=LONGEST_DURATION_S + 1)]
)
def test_a_duration_that_is_none_is_refused_by_its_field(value: Duration) -> None:
    with pytest.raises(InvalidArgument, match="wait: must be a duration >= 0"):
        require_duration("wait", value)


@pytest.mark.parametrize("value", [Timestamp(seconds=-1), Timestamp(nanos=1_000_000_000)])
def test_a_time_that_is_none_is_refused_by_its_field(value: Timestamp) -> None:
    with pytest.raises(InvalidArgument, match="deadline: must be a time between 1970 and 9999"):
        require_timestamp("deadline", value)


def test_an_error_may_quote_what_no_message_carries() -> None:
    status = errors.status_of(
        errors.NotFound("NOT_THERE", "\ud800 is not here", name="\udfff"), "x.treadle"
    )
    assert status.message == "? is not here"
