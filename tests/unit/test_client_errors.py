"""A failed call read back into typed fields."""

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from treadle.errors import FieldViolation, error_from


def failed(raw: bytes | None, details: str = "turn: is wrong") -> grpc.aio.AioRpcError:
    trailing = (
        grpc.aio.Metadata() if raw is None else grpc.aio.Metadata(("grpc-status-details-bin", raw))
    )
    code = grpc.StatusCode.INVALID_ARGUMENT
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


def packed(*details: object) -> bytes:
    status = status_pb2.Status(code=3, message="turn: is wrong")
    for detail in details:
        any_message = AnyMessage()
        any_message.Pack(detail)  # type: ignore[arg-type]
        status.details.append(any_message)
    return bytes(status.SerializeToString())


def test_details_in_googles_own_messages_are_read_without_them() -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    violation = error_details_pb2.BadRequest.FieldViolation(
        field="turn", description="must be >= 0"
    )
    raw = packed(
        error_details_pb2.ErrorInfo(
            reason="BAD_TURN", domain="scheduler.treadle", metadata={"turn": "-1"}
        ),
        retry,
        error_details_pb2.BadRequest(field_violations=[violation]),
        error_details_pb2.DebugInfo(detail="something this client does not know"),
    )
    error = error_from(failed(raw))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.reason, error.domain) == ("BAD_TURN", "scheduler.treadle")
    assert (error.metadata, error.retry_after_s) == ({"turn": "-1"}, 1.5)
    assert error.field_violations == (FieldViolation("turn", "must be >= 0"),)
    assert str(error) == "INVALID_ARGUMENT BAD_TURN turn: is wrong (turn: must be >= 0)"


def test_an_error_without_details_or_with_torn_ones_still_has_code_and_message() -> None:
    for raw in (None, b"\xff\xff\xff", packed()):
        error = error_from(failed(raw))
        assert (error.code, error.message) == (grpc.StatusCode.INVALID_ARGUMENT, "turn: is wrong")
        assert (error.reason, error.field_violations, error.retry_after_s) == ("", (), None)


def test_an_error_says_its_code_and_its_fields_once() -> None:
    """A Treadle service gives the code as the reason, and the refused field in its message too."""
    violation = error_details_pb2.BadRequest.FieldViolation(
        field="max_new_tokens", description="must be > 0, is 0"
    )
    raw = packed(
        error_details_pb2.ErrorInfo(reason="INVALID_ARGUMENT"),
        error_details_pb2.BadRequest(field_violations=[violation]),
    )

    error = error_from(failed(raw, "max_new_tokens: must be > 0, is 0"))

    assert str(error) == "INVALID_ARGUMENT max_new_tokens: must be > 0, is 0"
