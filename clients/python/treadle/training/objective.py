"""Compute the numbers of a policy-gradient loss besides its tokens: group advantages, and how far
the policy that is trained is from the one that sampled, in logprobs and in weight versions.

An engine computes in another precision, and by other kernels, than the trainer, so that the same
weights give other logprobs. A loss that takes the engine's logprobs as those of the old policy is
biased by this drift, which no reward curve shows until it collapses: measure it at every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.training.packing import IGNORED, PackedRow
from treadle.types import VersionSpan

CLIP = 0.2  # of PPO's ratio, the usual bound on both sides
# Above either bound the loss is no longer close to that of the policy which sampled. 0.01 nats a
# token are about ten times the error of bfloat16; a tenth of clipped tokens is more than PPO's own
# steps usually clip.
LARGE_K3, LARGE_CLIP_FRACTION = 0.01, 0.1
# Deviation of a group's rewards: less is rounding, which a division by it would make an advantage.
LEAST_STD = 1e-6
LAUNCH_VERSION = "default"  # SGLang's name of the weights that it was launched with: version 0
LARGEST_LOG_RATIO = 80.0  # exp of it still fits into float64 with room for sums


class Versioned(Protocol):
    """An object with a staleness: TrainingTrajectory or TrajectoryResult."""

    @property
    def trajectory_id(self) -> str: ...
    @property
    def version_spans(self) -> tuple[VersionSpan, ...]: ...


def group_advantages(rewards: ArrayLike, *, scale_by_std: bool = True) -> NDArray[np.float64]:
    """Compute advantages of the samples of one prompt: reward minus the group's mean, over its
    standard deviation.

    rewards: [samples], finite. scale_by_std: as GRPO does (DeepSeekMath, section 4.1.2, with the
    population's standard deviation); False as Dr. GRPO does, since the quotient gives prompts of
    nearly equal rewards more weight. Where the rewards are equal, or differ by less than LEAST_STD,
    all advantages are 0: such a group teaches nothing. Raises ValueError.
    """
    given = np.asarray(rewards, dtype=np.float64)
    if given.ndim != 1 or not np.isfinite(given).all():
        raise ValueError(
            f"rewards must be finite numbers, one a sample of the group, are {given.tolist()}"
        )
    deviation = float(given.std()) if given.size else 0.0
    if deviation < LEAST_STD:
        return np.zeros_like(given)
    centred: NDArray[np.float64] = given - given.mean()
    return centred / deviation if scale_by_std else centred


@dataclass(frozen=True)
class Drift:
    """Distance of the trainer's policy from the one that sampled, over `tokens` sampled tokens, in
    nats a token.

    k1, k3: estimates of KL(sampling policy || trainer's) by Schulman ("Approximating KL
    divergence", 2020): the mean of -log r, unbiased, and of r - 1 - log r, which has less variance
    and is never negative; r is the trainer's probability over the sampling one. clip_fraction: part
    of the tokens whose r is outside of 1 - clip to 1 + clip. max_ratio: the largest of r and 1/r.
    mean_abs: mean of |log r|.
    """

    tokens: int
    k1: float
    k3: float
    clip_fraction: float
    max_ratio: float
    mean_abs: float

    @property
    def is_large(self) -> bool:
        """Return whether the loss should correct the drift."""
        return self.k3 > LARGE_K3 or self.clip_fraction > LARGE_CLIP_FRACTION

    def describe(self) -> str:
        """Describe the drift in one sentence for a log."""
        found = (
            f"the trainer's logprobs differ from the rollout's by {self.mean_abs:.3g} nats a token "
            f"in the mean (KL {self.k3:.3g}, {self.clip_fraction:.1%} of {self.tokens} tokens "
            f"beyond the clip, largest ratio {self.max_ratio:.3g})"
        )
        if not self.is_large:
            return f"{found}."
        return (
            f"{found}, which is large: check that both have the same weights, sampling "
            "temperature and precision, or "
            "use the trainer's own logprobs as the old ones and correct by the truncated ratio."
        )


@dataclass(frozen=True)
class DriftReport:
    """Drift of one training step. batch: over all tokens. trajectories: by index in what was
    packed."""

    batch: Drift
    trajectories: dict[int, Drift]


def measure_drift(
    rows: Sequence[PackedRow], logprobs: Sequence[ArrayLike], *, clip: float = CLIP
) -> DriftReport:
    """Compare the trainer's logprobs with those of the rollout, for the batch and for each
    trajectory.

    rows: of `pack`. logprobs: for each row [n], the trainer's logprob of the label at each
    position, at the temperature of the rollout; the value where the label is IGNORED does not
    matter. Raises ValueError that names the row.
    """
    if len(rows) != len(logprobs):
        raise ValueError(f"logprobs must be one array a row: {len(logprobs)} for {len(rows)} rows")
    by_member: dict[int, NDArray[np.float64]] = {}
    for index, (row, given) in enumerate(zip(rows, logprobs, strict=True)):
        new = np.asarray(given, dtype=np.float64)
        if new.shape != row.labels.shape:
            raise ValueError(
                f"logprobs of row {index} must have the shape {row.labels.shape}, have {new.shape}"
            )
        trained = row.labels != IGNORED
        log_ratio = new - row.old_logprobs
        if not np.isfinite(log_ratio[trained]).all():
            raise ValueError(
                f"logprobs of row {index} must be finite wherever a label is trained on"
            )
        for member, start, end in zip(
            row.members, row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True
        ):
            by_member[member] = log_ratio[start:end][trained[start:end]]
    if not by_member:
        raise ValueError("rows must hold at least one trajectory")
    everything = np.concatenate(list(by_member.values()))
    return DriftReport(
        _drift(everything, clip),
        {member: _drift(by_member[member], clip) for member in sorted(by_member)},
    )


def _drift(log_ratio: NDArray[np.float64], clip: float) -> Drift:
    ratio = np.exp(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    return Drift(
        tokens=log_ratio.size,
        k1=float(-log_ratio.mean()),
        k3=float((ratio - 1.0 - log_ratio).mean()),
        clip_fraction=float(((ratio < 1.0 - clip) | (ratio > 1.0 + clip)).mean()),
        max_ratio=float(
            np.exp(np.abs(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)).max())
        ),
        mean_abs=float(np.abs(log_ratio).mean()),
    )


def measure_staleness(trajectory: Versioned, weight_version: int) -> int:
    """Return how many versions the oldest sampled token is behind the trainer's present one
    (RollArt's asynchronous bound); 0 for a trajectory without a sampled token. Raises ValueError
    for versions that are no integers."""
    names = [span.weight_version for span in trajectory.version_spans]
    try:
        return max(
            (weight_version - int(0 if name == LAUNCH_VERSION else name) for name in names),
            default=0,
        )
    except ValueError:
        named = ", ".join(sorted(set(names)))
        where = f"trajectory {trajectory.trajectory_id}"
        raise ValueError(
            f"{where}: weight versions must be integers for a staleness, are {named}"
        ) from None
