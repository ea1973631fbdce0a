"""Refusals of the controller, and errors for wrong inputs of pure functions.

A refused request has changed nothing. `reason` is the stable word that a program reads; the
scheduler service maps each class to a gRPC status. A CoreError names the field, by its path as the
caller wrote it, so that a service can name it to its own caller, e.g.
`trajectories[3].remaining_tokens`.
"""

from typing import ClassVar


class Refusal(Exception):  # noqa: N818 - not a fault
    """Base of all refusals. `message` is for a person, `metadata` has the ids that it is about."""

    reason: ClassVar[str] = "REFUSED"

    def __init__(self, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = metadata


class BadField(Refusal):
    """The value of `field` in the request cannot be right."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str, **metadata: str) -> None:
        super().__init__(message, **metadata)
        self.field = field


class ContextTooLong(BadField):
    """No engine takes a context this long."""

    reason = "CONTEXT_TOO_LONG"


class RequestIdReused(BadField):
    """Another request has used the same request_id with other content."""

    reason = "REQUEST_ID_REUSED"


class TrajectoryNotFound(Refusal):
    """The trajectory is unknown, or closed so long ago that it is forgotten."""

    reason = "TRAJECTORY_NOT_FOUND"


class TrajectoryExists(Refusal):
    """Another request has opened a trajectory of this id."""

    reason = "TRAJECTORY_EXISTS"


class TrajectoryIsClosed(Refusal):
    """A closed trajectory takes no more steps. `state`: how it was closed."""

    reason = "TRAJECTORY_CLOSED"

    def __init__(self, trajectory_id: str, state: str) -> None:
        super().__init__(
            f"{trajectory_id} is {state} already", trajectory_id=trajectory_id, state=state
        )


class TurnOutOfOrder(Refusal):
    """The turn is not the next one."""

    reason = "TURN_OUT_OF_ORDER"


class StepInFlight(Refusal):
    """The trajectory has a live ticket."""

    reason = "STEP_IN_FLIGHT"


class RevisionMismatch(Refusal):
    """The trajectory has another owner by now."""

    reason = "REVISION_MISMATCH"


class TrajectoryPinned(Refusal):
    """A pinned trajectory does not move."""

    reason = "TRAJECTORY_PINNED"


class JobNotFound(Refusal):
    """The lease of the job ran out, or it never existed: open it again."""

    reason = "JOB_NOT_FOUND"


class JobTakenOver(Refusal):
    """Another client has resumed the job: this one must not go on."""

    reason = "JOB_TAKEN_OVER"


class EngineNotFound(Refusal):
    """No such engine holds a lease."""

    reason = "ENGINE_NOT_FOUND"


class LastEngine(Refusal):
    """No other engine could take the steps of this one."""

    reason = "LAST_ENGINE"


class LeaseNotFound(Refusal):
    """The lease expired or never existed: register again."""

    reason = "LEASE_NOT_FOUND"


class NoEngine(Refusal):
    """No engine can run this step now."""

    reason = "NO_ENGINE"


class NoEngineWithTags(NoEngine):
    """No engine has carried the trajectory's hardware tags for so long that waiting is not expected
    to help."""

    reason = "NO_ENGINE_WITH_TAGS"


class CoreError(ValueError):
    """The input at path `field` cannot be used; `description` states what would be right."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(field, description)  # so that it can go to another process
        self.field = field
        self.description = description

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"
