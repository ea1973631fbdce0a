"""Treadle's client: agentic-RL rollouts that do not wait for their longest trajectory.

The public names are the ones below; `treadle.<area>.v1` are the generated messages and stubs of the contract in
protos/.
"""

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
