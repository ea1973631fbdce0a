"""Why the controller refuses a request. A refused request has changed nothing.

`reason` is the stable word that a program reads, `metadata` the ids it speaks of; the service maps each class to a gRPC
status.

The root of what pure policy can refuse.

Purpose: every error of `treadle_core` says which input was wrong, so that a service can name the field to its caller.
Invariant: `field` is the path of the input as the caller of the core function wrote it, e.g.
`trajectories[3].remaining_tokens`."""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):  # noqa: N818 - a refusal is no fault
    """Base of all refusals: reason, message for a person, ids."""

    reason: ClassVar[str] = "REFUSED"

    def __init__(self, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = metadata


class BadField(Refusal):
    """A value in the request cannot be right; `field` names it."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str, **metadata: str) -> None:
        super().__init__(message, **metadata)
        self.field = field


class ContextTooLong(BadField):
    """No engine takes a context this long."""

    reason = "CONTEXT_TOO_LONG"


class RequestIdReused(BadField):
    """The same request_id with other content."""

    reason = "REQUEST_ID_REUSED"


class TrajectoryNotFound(Refusal):
    """Unknown, or closed so long ago that it is forgotten."""

    reason = "TRAJECTORY_NOT_FOUND"


class TrajectoryExists(Refusal):
    """The id was opened by another request."""

    reason = "TRAJECTORY_EXISTS"


class TrajectoryIsClosed(Refusal):
    """No more steps may come."""

    reason = "TRAJECTORY_CLOSED"


class TurnOutOfOrder(Refusal):
    """Not the turn that comes next."""

    reason = "TURN_OUT_OF_ORDER"


class StepInFlight(Refusal):
    """A ticket of this trajectory is out."""

    reason = "STEP_IN_FLIGHT"


class RevisionMismatch(Refusal):
    """The trajectory's owner changed meanwhile."""

    reason = "REVISION_MISMATCH"


class TrajectoryPinned(Refusal):
    """A pinned trajectory does not move."""

    reason = "TRAJECTORY_PINNED"


class EngineNotFound(Refusal):
    """No such engine holds a lease."""

    reason = "ENGINE_NOT_FOUND"


class LeaseNotFound(Refusal):
    """The lease ran out or never was: register again."""

    reason = "LEASE_NOT_FOUND"


class NoEngine(Refusal):
    """No engine may run this step now; one may come."""

    reason = "NO_ENGINE"


class CoreError(ValueError):
    """An input that a policy cannot work with; `field` is its path, `description` what would be right."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description
