"""Read a failed call's gRPC status into TreadleError, with a `reason` that a program can act on.

The details come from `grpc-status-details-bin` (wire-equal to google.rpc.Status) and are read with
Treadle's own messages, so that googleapis is not needed; a status without details still gives a
code and a message.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from treadle.common.v1 import status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_DETAILS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (status_pb2.ErrorInfo, status_pb2.RetryInfo, status_pb2.BadRequest)
}
# Words of grpc's own messages when a connection or a stream breaks during a call; a servicer's
# INTERNAL or UNKNOWN has none of them.
_TRANSPORT_WORDS = (
    "Internal error from Core",  # a request could not be sent on a call that was open already
    "RST_STREAM",
    "Stream removed",
    "GOAWAY",
    "Connection reset",
    "Socket closed",
    "recvmsg",
)
# Codes of a server that did nothing; after any other code it may have done what was requested.
_REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that the server refused: its path, and what would be right."""

    field: str
    description: str


class TreadleError(Exception):
    """Error of a call to the mesh that failed.

    code: the gRPC status code. reason: stable UPPER_SNAKE word, e.g. TRAJECTORY_NOT_FOUND, empty
    where the server gave none. domain: which service raised it. metadata: the ids that the reason
    is about. field_violations: the fields that were refused. retry_after_s: the least wait that the
    server requests, None where it requests none.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        domain: str = "",
        metadata: Mapping[str, str] | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        self.code, self.message, self.reason, self.domain = code, message, reason, domain
        self.metadata = dict(metadata or {})
        self.field_violations = field_violations
        self.retry_after_s = retry_after_s
        # A service may give the code as the reason, and name the fields in its message too.
        said = [f"{violation.field}: {violation.description}" for violation in field_violations]
        fields = "; ".join(each for each in said if each not in message)
        parts = (
            code.name,
            reason if reason != code.name else "",
            message,
            fields and f"({fields})",
        )
        super().__init__(" ".join(part for part in parts if part))

    @property
    def lost_connection(self) -> bool:
        """Return whether the connection failed, so that the error has no answer to the request
        itself."""
        if self.code is grpc.StatusCode.UNAVAILABLE:
            return True
        if self.reason:
            return False
        if (
            self.code is grpc.StatusCode.CANCELLED
        ):  # by the peer: the caller's own cancellation raises CancelledError
            return True
        transport = self.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        return transport and any(word in self.message for word in _TRANSPORT_WORDS)

    @property
    def unanswered(self) -> bool:
        """Return whether the connection failed or the deadline passed, as with a hung server."""
        return self.lost_connection or self.code is grpc.StatusCode.DEADLINE_EXCEEDED

    @property
    def refused(self) -> bool:
        """Return whether the server has refused the request for good and done nothing."""
        return self.code in _REFUSALS

    @property
    def retryable(self) -> bool:
        """Return whether the same request may be sent again as it is."""
        if (
            self.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        ):  # without RetryInfo it is a limit, e.g. of message size
            return self.retry_after_s is not None
        return self.lost_connection


class StreamBroken(TreadleError):  # noqa: N818 - named as what happened
    """Error of a token stream that broke its contract: a gap, a repeated token, counts or version
    spans that do not agree.

    Such a stream is never repaired.
    """

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.DATA_LOSS, message, "STREAM_BROKEN", "client.treadle")


class TokensSpent(TreadleError):  # noqa: N818
    """Error of a trajectory whose max_total_tokens is used up, so that it may generate nothing
    more. A rollout counts it as truncated."""

    def __init__(self, message: str) -> None:
        super().__init__(
            grpc.StatusCode.FAILED_PRECONDITION, message, "TOKENS_SPENT", "client.treadle"
        )


def refused(reason: str, message: str) -> TreadleError:
    """Return a FAILED_PRECONDITION that the client itself raises before any call."""
    return TreadleError(grpc.StatusCode.FAILED_PRECONDITION, message, reason, "client.treadle")


def error_from(error: grpc.aio.AioRpcError) -> TreadleError:
    """Return the error of a failed call. Details that do not parse are left out."""
    raw = next(
        (value for key, value in error.trailing_metadata() or () if key == _DETAILS_KEY), b""
    )
    return TreadleError(
        error.code(), error.details() or "", **_details(raw if isinstance(raw, bytes) else b"")
    )


def _details(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        for detail in status_pb2.Status.FromString(raw).details:
            name = detail.type_url.rpartition("/google.rpc.")[2]
            if name in _DETAILS:
                found[name] = _DETAILS[name].FromString(detail.value)
    except DecodeError:
        return {}
    info, bad = (
        found.get("ErrorInfo", status_pb2.ErrorInfo()),
        found.get("BadRequest", status_pb2.BadRequest()),
    )
    delay = found["RetryInfo"].retry_delay if "RetryInfo" in found else None
    return {
        "reason": info.reason,
        "domain": info.domain,
        "metadata": info.metadata,
        "field_violations": tuple(
            FieldViolation(v.field, v.description) for v in bad.field_violations
        ),
        "retry_after_s": None if delay is None else delay.seconds + delay.nanos / 1e9,
    }
