"""From what the backbone made of the text, and the numeric features, to quantiles of what is left.

Purpose: p10, p50, p90 of ln(1 + remaining tokens) and of ln(1 + remaining turns). The medians are corrections of what
the estimators without a model say (a feature), so that a head that has learned nothing repeats them.
It may have several members, small networks of which each was fitted without another part of the prompts, and says their
mean: where prompts are few, what one of them made of chance is outvoted, and each prompt is judged by one that has not
seen it.
Invariants: quantiles never fall with the probability and are never below 0; where there is no text the hidden state
counts for nothing.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from treadle_learned.features import FEATURES
from treadle_learned.scores import QUANTILES

TARGETS = ("remaining_tokens", "remaining_turns")
MEDIANS = (FEATURES.index("forecast_tokens_p50"), FEATURES.index("forecast_turns_p50"))
WIDTH = 64
DROPOUT = 0.2
TURN = FEATURES.index("turn")
BANDS = (0, 1, 2, 3, 6)  # steps seen from which calibration is another: errors shrink with what is known, and grow late
# ln of a factor of 2.7 from the median to either side, before anything is learned: softplus of this is about 1.
INITIAL_SPREAD = 0.54


class QuantileHead(nn.Module):
    """[n, hidden_size] and [n, len(FEATURES)] to [n, len(TARGETS), len(QUANTILES)]. `shift`: what calibration
    adds in each of BANDS."""

    def __init__(self, hidden_size: int, members: int = 1, width: int = WIDTH, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.members = members
        self.normed = nn.LayerNorm(hidden_size, elementwise_affine=False)
        self.dropout = nn.Dropout(dropout)
        self.text = _Linear(members, hidden_size, width)
        self.numbers = _Linear(members, len(FEATURES), width)
        self.joined = _Linear(members, width, width)
        self.out = _Linear(members, width, len(TARGETS) * len(QUANTILES))
        nn.init.zeros_(self.out.weight)
        with torch.no_grad():
            self.out.bias.copy_(torch.tensor([INITIAL_SPREAD, 0.0, INITIAL_SPREAD] * len(TARGETS)))
        self.register_buffer("mean", torch.zeros(len(FEATURES)))
        self.register_buffer("deviation", torch.ones(len(FEATURES)))
        self.register_buffer("shift", torch.zeros(len(BANDS), len(TARGETS), len(QUANTILES)))

    def scale_to(self, features: Tensor) -> None:
        """Takes what is usual of each feature from these, [n, len(FEATURES)]."""
        cast("Tensor", self.mean).copy_(features.mean(dim=0))
        cast("Tensor", self.deviation).copy_(features.std(dim=0, correction=0).clamp_min(1e-3))

    def forward(self, hidden: Tensor, features: Tensor, has_text: Tensor) -> Tensor:
        """`has_text`: bool [n]."""
        return self.shifted(self.each(hidden, features, has_text).mean(dim=0), features)

    def shifted(self, quantiles: Tensor, features: Tensor) -> Tensor:
        """What calibration makes of them, [n, len(TARGETS), len(QUANTILES)]."""
        shifted = quantiles + cast("Tensor", self.shift)[band_of(features)]
        return torch.cummax(shifted, dim=-1).values.clamp_min(0.0)

    def each(self, hidden: Tensor, features: Tensor, has_text: Tensor) -> Tensor:
        """What each member says before calibration, [members, n, len(TARGETS), len(QUANTILES)]."""
        scaled = (features - cast("Tensor", self.mean)) / cast("Tensor", self.deviation)
        text = self.text(self.dropout(self.normed(hidden).expand(self.members, -1, -1))) * has_text[:, None]
        joined = silu(self.joined(self.dropout(silu(self.numbers(scaled.expand(self.members, -1, -1)) + text))))
        low, middle, high = self.out(joined).unflatten(-1, (len(TARGETS), len(QUANTILES))).unbind(dim=-1)
        median = features[:, list(MEDIANS)] + middle
        return torch.stack([median - softplus(low), median, median + softplus(high)], dim=-1)


class _Linear(nn.Module):
    """[members, n, inputs] to [members, n, outputs], each member by its own weights, that begin as `nn.Linear`'s."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        most = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-most, most))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-most, most))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, inputs, self.weight)


def band_of(features: Tensor) -> Tensor:
    """[n], by the steps that were seen: the index in BANDS."""
    edges = torch.log1p(torch.tensor(BANDS[1:], dtype=features.dtype, device=features.device) - 0.5)
    return torch.bucketize(features[:, TURN].contiguous(), edges)


def pinball(quantiles: Tensor, targets: Tensor, censored: Tensor) -> Tensor:
    """The pinball loss [..., n], the mean over targets and quantiles, of [..., n, targets, quantiles] for targets
    [n, targets], all in ln(1 + x). What is `censored`, bool [n], is at least its target: it costs only where less was
    predicted."""
    short = targets[..., None] - quantiles
    levels = torch.tensor(QUANTILES, dtype=quantiles.dtype, device=quantiles.device)
    loss = torch.maximum(levels * short, (levels - 1.0) * short)
    return torch.where(censored[:, None, None] & (short < 0.0), torch.zeros_like(loss), loss).mean(dim=(-2, -1))
