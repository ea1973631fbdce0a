"""Errors that a servicer may raise, and their form on the wire.

A servicer raises these errors, or core exceptions that its `ErrorTable` maps to them; only the
interceptor (`calls.py`) turns them into a status. Details are `treadle.common.v1.Status`,
wire-equal to google.rpc.Status, so that any parser of google.rpc reads them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import grpc
import structlog
from google.protobuf.message import Message
from treadle.common.v1 import status_pb2

log = structlog.get_logger()

DETAILS_KEY = "grpc-status-details-bin"
TYPE_URL_PREFIX = "type.googleapis.com/google.rpc."

# A status travels in HTTP/2 trailers, whose default limit is 8 KiB for everything; the message goes
# twice, once percent-encoded. An error that quotes a huge value must not become another error.
LONGEST_MESSAGE_CHARS = 800
LONGEST_METADATA_CHARS = 200
MOST_METADATA_ENTRIES = 8


class StartError(Exception):
    """The service cannot start. The message is the one line that is printed: what is missing and
    what to do."""


class TreadleError(Exception):
    """Base of all errors that reach a caller.

    reason: UPPER_SNAKE, stable, for programs. message: for a person, what is wrong and what to do.
    metadata: ids of what the error is about. retry_after_s: wait at least this long before the next
    try; None gives no advice.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    retry_after_s: float | None = None

    def __init__(self, reason: str, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidArgument(TreadleError):  # noqa: N818 - named as the gRPC code
    """A field of the request is wrong by itself, whatever the state of the service."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(
        self, field: str, description: str, reason: str = "INVALID_ARGUMENT", **metadata: object
    ) -> None:
        super().__init__(reason, f"{field}: {description}" if field else description, **metadata)
        self.field = field
        self.description = description


class NotFound(TreadleError):  # noqa: N818
    """The named resource is not here."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(TreadleError):  # noqa: N818
    """The resource to create is there already; another request made it."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(TreadleError):  # noqa: N818
    """The state of the service does not allow the call; the same call again will not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class DeadlineExceeded(TreadleError):  # noqa: N818
    """The caller's time ran out here."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unauthenticated(TreadleError):  # noqa: N818
    """The caller cannot be identified."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(TreadleError):  # noqa: N818
    """The caller may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unimplemented(TreadleError):  # noqa: N818
    """This service does not answer that RPC."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(TreadleError):  # noqa: N818
    """The service itself has a fault."""


class _RetryableError(TreadleError):
    def __init__(
        self, reason: str, message: str, *, retry_after_s: float, **metadata: object
    ) -> None:
        super().__init__(reason, message, **metadata)
        self.retry_after_s = retry_after_s


class Unavailable(_RetryableError):  # noqa: N818
    """The call is not possible now; the same call may succeed later."""

    code = grpc.StatusCode.UNAVAILABLE


class ResourceExhausted(_RetryableError):  # noqa: N818
    """A queue or quota is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


# A service's own mapping of core exceptions; a subclass without an entry takes that of its base.
ErrorTable = Mapping[type[Exception], Callable[[Any], TreadleError]]


def message_of(error: TreadleError) -> str:
    """Return the error's message, short enough for trailers."""
    return _shortened(error.message, LONGEST_MESSAGE_CHARS)


def status_of(error: TreadleError, domain: str) -> status_pb2.Status:
    """Return the google.rpc.Status of an error: ErrorInfo, then BadRequest or RetryInfo where they
    apply.

    domain: the service that reports the error, e.g. `scheduler.treadle`.
    """
    few = list(error.metadata.items())[:MOST_METADATA_ENTRIES]
    metadata = {key: _shortened(value, LONGEST_METADATA_CHARS) for key, value in few}
    details: list[Message] = [
        status_pb2.ErrorInfo(reason=error.reason, domain=domain, metadata=metadata)
    ]
    if isinstance(error, InvalidArgument):
        violation = status_pb2.BadRequest.FieldViolation(
            field=_shortened(error.field, LONGEST_METADATA_CHARS),
            description=_shortened(error.description, LONGEST_MESSAGE_CHARS),
        )
        details.append(status_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = status_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, round(error.retry_after_s * 1e9)))
        details.append(retry)
    status = status_pb2.Status(code=error.code.value[0], message=message_of(error))
    for detail in details:
        status.details.add(
            type_url=TYPE_URL_PREFIX + detail.DESCRIPTOR.name, value=detail.SerializeToString()
        )
    return status


def _shortened(text: str, longest: int) -> str:
    text = text.encode(
        errors="replace"
    ).decode()  # a message cannot carry lone surrogates of a quoted value
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text)} characters)"


@contextmanager
def contain(what: str, **about: object) -> Iterator[None]:
    """Log an error that the block raises, with its traceback, and go on after the block.

    For one item of a background task that works on many: what is wrong with one trajectory or one
    engine must not end the service of all others. what: the item, for the log.
    """
    try:
        yield
    except Exception:
        log.exception(f"{what}: failed unexpectedly", **about)
