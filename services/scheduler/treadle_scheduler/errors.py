"""How the core's refusals look on the wire."""

from collections.abc import Callable
from typing import Any

from treadle_core import refusals
from treadle_runtime.errors import (
    AlreadyExists,
    ErrorTable,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TreadleError,
    Unavailable,
)

from treadle_scheduler.held import StepHeld

# A sidecar registers within a second of its engine's start, and an engine takes many seconds to start.
RETRY_NO_ENGINE_S = 0.5
# Who asks again is held again: the pause is only the client's politeness.
RETRY_HELD_S = 0.01


def _bad_field(refusal: refusals.BadField) -> TreadleError:
    return InvalidArgument(refusal.field, refusal.message, refusal.reason, **refusal.metadata)


def _no_engine(refusal: refusals.NoEngine) -> TreadleError:
    return Unavailable(refusal.reason, refusal.message, retry_after_s=RETRY_NO_ENGINE_S, **refusal.metadata)


def _as(kind: type[NotFound] | type[AlreadyExists] | type[FailedPrecondition]) -> Callable[[Any], TreadleError]:
    return lambda refusal: kind(refusal.reason, refusal.message, **refusal.metadata)


ERRORS: ErrorTable = {
    StepHeld: lambda held: ResourceExhausted(
        "STEP_HELD", str(held), retry_after_s=RETRY_HELD_S, trajectory_id=held.trajectory_id
    ),
    refusals.BadField: _bad_field,
    refusals.NoEngine: _no_engine,
    refusals.TrajectoryNotFound: _as(NotFound),
    refusals.EngineNotFound: _as(NotFound),
    refusals.LeaseNotFound: _as(NotFound),
    refusals.TrajectoryExists: _as(AlreadyExists),
    refusals.Refusal: _as(FailedPrecondition),
}
