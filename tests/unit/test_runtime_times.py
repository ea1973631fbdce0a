"""Seconds and protobuf's times: exact to the nanosecond, never out of range, and refused by name in a request."""

import math

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from treadle_runtime.errors import InvalidArgument
from treadle_runtime.times import (
    LONGEST_DURATION_S,
    duration,
    require_duration,
    require_timestamp,
    seconds,
    timestamp,
)


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


@pytest.mark.parametrize("value", [Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=LONGEST_DURATION_S + 1)])
def test_a_duration_that_is_none_is_refused_by_its_field(value: Duration) -> None:
    with pytest.raises(InvalidArgument, match="wait: must be a duration >= 0"):
        require_duration("wait", value)


@pytest.mark.parametrize("value", [Timestamp(seconds=-1), Timestamp(nanos=1_000_000_000)])
def test_a_time_that_is_none_is_refused_by_its_field(value: Timestamp) -> None:
    with pytest.raises(InvalidArgument, match="deadline: must be a time between 1970 and 9999"):
        require_timestamp("deadline", value)
