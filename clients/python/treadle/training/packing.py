"""Pack trajectories of different lengths into rows of at most so many tokens, without padding.

Every array of a row has one value a position. The values of a prediction (label, weight, old
logprob, advantage) are at the position that predicts, which is one before the token: with `logits`
of shape [n, vocabulary] the loss of a row is the sum of `weights * cross_entropy(logits, labels)`,
and the loss of the batch the sum over its rows. Invariants: a trajectory is in exactly one row and
whole; its tokens are those that came from the engine, in order; a label is IGNORED exactly where
the policy did not sample the next token.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

# label of a position that is not trained on; the default ignore_index of PyTorch's cross entropy
IGNORED = -100

Normalisation = Literal["trajectory", "token", "constant"]
T = TypeVar("T", bound=np.generic)


class Sampled(Protocol):
    """A trajectory that can be packed: TrainingTrajectory or TrajectoryResult."""

    @property
    def trajectory_id(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def loss_mask(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[float]: ...


@dataclass(frozen=True)
class PackedRow:
    """Row of n tokens, with some trajectories one after another.

    members: their indexes in what was packed, in order. cu_seqlens: int32 [members + 1], where each
    begins, and n: as variable-length attention kernels take it. tokens, position_ids: int64 [n];
    positions begin at 0 in each trajectory. labels: int64 [n], the next token or IGNORED. weights,
    old_logprobs, advantages: float32 [n], 0 where the label is IGNORED. old_logprobs: of the label
    when it was sampled (natural logarithm).
    """

    members: tuple[int, ...]
    cu_seqlens: NDArray[np.int32]
    tokens: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]
    old_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]

    @property
    def segments(self) -> NDArray[np.int64]:
        """Return int64 [n]: which trajectory of the row each position belongs to. Attention is
        allowed from a position to itself and earlier ones of equal segment."""
        lengths = np.diff(self.cu_seqlens)
        return np.repeat(np.arange(len(lengths)), lengths)


def pack(
    trajectories: Sequence[Sampled],
    row_tokens: int,
    *,
    advantages: Sequence[float] | None = None,
    normalise: Normalisation = "trajectory",
    constant_tokens: int = 0,
) -> list[PackedRow]:
    """Pack trajectories into few rows of at most `row_tokens` tokens, by best fit with the longest
    first.

    advantages: one a trajectory, for all its sampled tokens; None: 1. normalise: what the weights
    of all rows together sum to 1 over. "trajectory": every trajectory weighs the same, so a token
    of a long one weighs less (GRPO, DeepSeekMath eq. 3). "token": every sampled token weighs the
    same (DAPO, section 3.3). "constant": a token weighs 1 over (trajectories x constant_tokens),
    e.g. the most tokens that a trajectory may sample, so that its weight depends on no length (Dr.
    GRPO); the sum is then not 1. A trajectory without a sampled token is left out and not counted.

    A trainer of several ranks that each pack a part scales its loss by (its own part's trajectories
    or tokens x ranks) over those of all, where gradients are averaged. Raises ValueError that names
    the trajectory and what to change.
    """
    if normalise not in ("trajectory", "token", "constant"):
        raise ValueError(f'normalise must be "trajectory", "token" or "constant", is {normalise!r}')
    if (normalise == "constant") != (constant_tokens > 0):
        raise ValueError('constant_tokens must be > 0 with normalise="constant", and 0 otherwise')
    if advantages is not None and len(advantages) != len(trajectories):
        raise ValueError(
            f"advantages must be one a trajectory: {len(advantages)} for {len(trajectories)}"
        )
    for each in trajectories:
        _check(each, row_tokens)
    sampled = [sum(each.loss_mask) for each in trajectories]
    trained = [index for index, count in enumerate(sampled) if count]
    total = sum(sampled)
    shares = {
        "trajectory": [len(trained) * count for count in sampled],
        "token": [total] * len(sampled),
        "constant": [len(trained) * constant_tokens] * len(sampled),
    }[normalise]
    lengths = {index: len(trajectories[index].tokens) for index in trained}
    return [
        _make_row(
            members,
            [trajectories[index] for index in members],
            [1.0 / shares[index] for index in members],
            [1.0 if advantages is None else advantages[index] for index in members],
        )
        for members in _fill(lengths, row_tokens)
    ]


def _check(trajectory: Sampled, row_tokens: int) -> None:
    name, count = f"trajectory {trajectory.trajectory_id}", len(trajectory.tokens)
    if not count == len(trajectory.loss_mask) == len(trajectory.logprobs):
        lengths = (
            f"{count} tokens, {len(trajectory.loss_mask)} of loss_mask, "
            f"{len(trajectory.logprobs)} logprobs"
        )
        raise ValueError(f"{name}: tokens, loss_mask and logprobs must be equally long: {lengths}")
    if count > row_tokens:
        raise ValueError(
            f"{name} has {count} tokens: row_tokens must be at least that, is {row_tokens}"
        )
    if set(trajectory.loss_mask) - {0, 1}:
        raise ValueError(f"{name}: loss_mask must be 0 or 1")
    if count and trajectory.loss_mask[0]:
        raise ValueError(f"{name}: its first token counts as sampled, and no position predicts it")


def _fill(lengths: dict[int, int], row_tokens: int) -> list[list[int]]:
    """Fill rows with indexes by best-fit decreasing: each into the fullest row that has room, as
    close to the fewest rows as first-fit decreasing (at most 11/9 of them and one more) and found
    in O(log rows)."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(lengths, key=lambda index: (-lengths[index], index)):
        at = bisect_left(room, (lengths[index], -1))
        if at == len(room):
            rows.append([])
            left, row = row_tokens, len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append(index)
        insort(room, (left - lengths[index], row))
    return rows


def _make_row(
    members: Sequence[int],
    trajectories: Sequence[Sampled],
    weights: Sequence[float],
    advantages: Sequence[float],
) -> PackedRow:
    lengths = [len(each.tokens) for each in trajectories]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.concatenate([np.asarray(each.tokens, dtype=np.int64) for each in trajectories])
    mask = _ahead(np.concatenate([np.asarray(each.loss_mask, dtype=bool) for each in trajectories]))
    logprobs = _ahead(
        np.concatenate([np.asarray(each.logprobs, dtype=np.float32) for each in trajectories])
    )
    spread = np.repeat(np.array([weights, advantages], dtype=np.float32), lengths, axis=1) * mask
    return PackedRow(
        members=tuple(members),
        cu_seqlens=starts,
        tokens=tokens,
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        labels=np.where(mask, _ahead(tokens), IGNORED),
        weights=spread[0],
        old_logprobs=np.where(mask, logprobs, np.float32(0.0)),
        advantages=spread[1],
    )


def _ahead(values: NDArray[T]) -> NDArray[T]:
    """Return the value of the next token. At the last token of a trajectory it is that of another
    trajectory's first token, which is never a sampled one."""
    return np.roll(values, -1)
