"""Trajectories in packed rows: the same loss as padded, and exactly the tokens that were
sampled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from treadle.training import IGNORED, Normalisation, pack

VOCABULARY, WIDTH = 11, 8


@dataclass(frozen=True)
class Made:
    """A trajectory as `pack` reads it."""

    trajectory_id: str
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float]


@st.composite
def batches(draw: st.DrawFn) -> list[Made]:
    made = []
    for index in range(draw(st.integers(1, 6))):
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=0, max_size=12))]
        tokens = [draw(st.integers(0, VOCABULARY - 1)) for _ in mask]
        made.append(Made(f"t{index}", tokens, mask, [-0.25 * sampled for sampled in mask]))
    return made


class TinyModel:
    """One causal attention layer over token and position embeddings, in float64."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        shapes = [
            (VOCABULARY, WIDTH),
            (64, WIDTH),
            (WIDTH, WIDTH),
            (WIDTH, WIDTH),
            (WIDTH, WIDTH),
            (WIDTH, VOCABULARY),
        ]
        self.parts = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, allowed: torch.Tensor
    ) -> torch.Tensor:
        """[n, VOCABULARY]. allowed: [n, n], whether a position (row) may look at another
        (column)."""
        embedding, position, query, key, value, out = self.parts
        states = embedding[tokens] + position[positions]
        scores = (states @ query) @ (states @ key).T / math.sqrt(WIDTH)
        mixed = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ (states @ value)
        return (states + mixed) @ out


def padded_loss(
    model: TinyModel, batch: Sequence[Made], normalise: Normalisation, constant: int
) -> float:
    """Each trajectory alone, padded to the longest, weighted as the papers write it."""
    longest = max(len(each.tokens) for each in batch)
    sums, counts = [], []
    for each in batch:
        padding = longest - len(each.tokens)
        tokens = torch.tensor(each.tokens + [0] * padding)
        mask = torch.tensor(each.loss_mask[1:] + [0] * padding, dtype=torch.float64)
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        losses = cross_entropy(
            model.logits(tokens, torch.arange(longest), causal)[:-1], tokens[1:], reduction="none"
        )
        sums.append(float((losses * mask[: longest - 1]).sum()))
        counts.append(sum(each.loss_mask))
    trained = [(total, count) for total, count in zip(sums, counts, strict=True) if count]
    if not trained:
        return 0.0
    if normalise == "token":
        return math.fsum(total for total, _ in trained) / sum(count for _, count in trained)
    return math.fsum(total / (constant or count) for total, count in trained) / len(trained)


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(),
    spare=st.integers(0, 20),
    normalise=st.sampled_from([("trajectory", 0), ("token", 0), ("constant", 7)]),
    seed=st.integers(0, 3),
)
def test_the_loss_of_packed_rows_is_that_of_padded_trajectories(
    batch: list[Made], spare: int, normalise: tuple[Normalisation, int], seed: int
) -> None:
    model = TinyModel(seed)
    kind, constant = normalise
    row_tokens = max(len(each.tokens) for each in batch) + spare
    loss = 0.0
    for row in pack(batch, row_tokens, normalise=kind, constant_tokens=constant):
        assert len(row.tokens) == row.cu_seqlens[-1] <= row_tokens
        segments = torch.from_numpy(row.segments)
        causal = torch.ones(len(segments), len(segments), dtype=torch.bool).tril()
        allowed = causal & (segments[:, None] == segments[None, :])
        logits = model.logits(
            torch.from_numpy(row.tokens), torch.from_numpy(row.position_ids), allowed
        )
        losses = cross_entropy(
            logits, torch.from_numpy(row.labels), reduction="none", ignore_index=IGNORED
        )
        loss += float((losses * torch.from_numpy(row.weights)).sum())
    expected = padded_loss(model, batch, kind, constant)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(batches(), st.integers(0, 20))
def test_every_sampled_token_is_a_label_once_with_its_own_logprob_and_advantage(
    batch: list[Made], spare: int
) -> None:
    row_tokens = max(len(each.tokens) for each in batch) + spare
    advantages = [float(index + 1) for index in range(len(batch))]
    found: dict[int, list[tuple[int, float, float]]] = {}
    for row in pack(batch, row_tokens, advantages=advantages):
        for member, start, end in zip(
            row.members, row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True
        ):
            assert row.tokens[start:end].tolist() == batch[member].tokens
            trained = row.labels[start:end] != IGNORED
            found[member] = list(
                zip(
                    row.labels[start:end][trained].tolist(),
                    row.old_logprobs[start:end][trained].tolist(),
                    row.advantages[start:end][trained].tolist(),
                    strict=True,
                )
            )
    assert found == {
        index: [
            (token, logprob, advantages[index])
            for token, sampled, logprob in zip(
                each.tokens, each.loss_mask, each.logprobs, strict=True
            )
            if sampled
        ]
        for index, each in enumerate(batch)
        if any(each.loss_mask)
    }


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 60))
def test_rows_are_as_full_as_best_fit_makes_them(lengths: list[int], row_tokens: int) -> None:
    """No trajectory of a later row would have fitted into an earlier one, and no row can be merged
    with another."""
    batch = [Made(str(n), [1] * (n + 1), [0] + [1] * n, [0.0] * (n + 1)) for n in lengths]
    sizes = [len(row.tokens) for row in pack(batch, row_tokens + 1)]
    assert sum(sizes) == sum(lengths) + len(lengths)
    assert all(a + b > row_tokens + 1 for index, a in enumerate(sizes) for b in sizes[index + 1 :])


def test_a_trajectory_that_sampled_nothing_is_left_out_and_not_counted() -> None:
    batch = [Made("silent", [1, 2], [0, 0], [0.0, 0.0]), Made("one", [1, 2], [0, 1], [0.0, -0.5])]
    [row] = pack(batch, 8)
    assert row.members == (1,)
    assert row.weights.sum() == 1.0
    assert pack(batch[:1], 8) == []


@pytest.mark.parametrize(
    ("trajectory", "options", "message"),
    [
        (
            Made("t9", [1, 2, 3], [0, 1, 1], [0.0] * 3),
            {"row_tokens": 2},
            "t9 has 3 tokens: row_tokens must be at",
        ),
        (
            Made("t9", [1, 2], [0, 1], [0.0]),
            {},
            "t9: .* equally long: 2 tokens, 2 of loss_mask, 1 logprobs",
        ),
        (Made("t9", [1, 2], [1, 1], [0.0] * 2), {}, "t9: its first token counts as sampled"),
        (Made("t9", [1, 2], [0, 2], [0.0] * 2), {}, "t9: loss_mask must be 0 or 1"),
        (
            Made("t9", [1, 2], [0, 1], [0.0] * 2),
            {"advantages": [1.0, 2.0]},
            "one a trajectory: 2 for 1",
        ),
        (Made("t9", [1, 2], [0, 1], [0.0] * 2), {"normalise": "mean"}, "normalise must be"),
        (
            Made("t9", [1, 2], [0, 1], [0.0] * 2),
            {"normalise": "constant"},
            "constant_tokens must be > 0",
        ),
        (Made("t9", [1, 2], [0, 1], [0.0] * 2), {"constant_tokens": 5}, "and 0 otherwise"),
    ],
)
def test_what_cannot_be_packed_is_named(
    trajectory: Made, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack([trajectory], **{"row_tokens": 8, **options})  # type: ignore[arg-type]
