"""Run agentic-RL rollouts that do not wait for their longest trajectory: Treadle's client.

The public names are the ones below; `treadle.<area>.v1` are the generated messages and stubs of the
contract in protos/.

A public name is imported when it is first used: an import of a message or a stub does not import
the client too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.client import Client
    from treadle.connection import RetryPolicy, Timeouts
    from treadle.errors import FieldViolation, StreamBroken, TokensSpent, TreadleError
    from treadle.rewards import PendingReward, RewardResult
    from treadle.rollouts.declare import agent, environment, reward
    from treadle.trajectory import Session, Trajectory
    from treadle.types import (
        Batch,
        Chunk,
        Distribution,
        Group,
        LengthCap,
        Limits,
        Policy,
        Prompt,
        RolloutEvent,
        RolloutResult,
        RunningTokens,
        Sampling,
        Shaping,
        ShapingReport,
        Span,
        Step,
        ToolResult,
        TrainingTrajectory,
        TrajectoryEnded,
        TrajectoryResult,
        VersionSpan,
    )
    from treadle.weights import WeightPush

__all__ = [
    "Batch",
    "Chunk",
    "Client",
    "Distribution",
    "FieldViolation",
    "Group",
    "LengthCap",
    "Limits",
    "PendingReward",
    "Policy",
    "Prompt",
    "RetryPolicy",
    "RewardResult",
    "RolloutEvent",
    "RolloutResult",
    "RunningTokens",
    "Sampling",
    "Session",
    "Shaping",
    "ShapingReport",
    "Span",
    "Step",
    "StreamBroken",
    "Timeouts",
    "TokensSpent",
    "ToolResult",
    "TrainingTrajectory",
    "Trajectory",
    "TrajectoryEnded",
    "TrajectoryResult",
    "TreadleError",
    "VersionSpan",
    "WeightPush",
    "agent",
    "environment",
    "reward",
]

# The modules of the public names that are not in `treadle.types`.
_MODULES = {
    "Client": "client",
    "RetryPolicy": "connection",
    "Timeouts": "connection",
    "FieldViolation": "errors",
    "StreamBroken": "errors",
    "TokensSpent": "errors",
    "TreadleError": "errors",
    "PendingReward": "rewards",
    "RewardResult": "rewards",
    "agent": "rollouts.declare",
    "environment": "rollouts.declare",
    "reward": "rollouts.declare",
    "Session": "trajectory",
    "Trajectory": "trajectory",
    "WeightPush": "weights",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'types')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the names of the module, with the public names that are not imported yet."""
    return sorted({*globals(), *__all__})
