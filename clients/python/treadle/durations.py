"""Seconds and google.protobuf.Duration, both ways."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration


def duration(seconds: float) -> Duration:
    """A Duration of `seconds` >= 0, cut to nanoseconds."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def seconds(message: Duration) -> float:
    """Seconds as a float."""
    return message.seconds + message.nanos / 1e9
