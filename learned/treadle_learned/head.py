"""From what the backbone made of the text, and the numeric features, to quantiles of what is left.

Purpose: p10, p50, p90 of ln(1 + remaining tokens) and of ln(1 + remaining turns). The medians are corrections of what
the estimators without a model say (a feature), so that a head that has learned nothing repeats them.
Invariants: quantiles never fall with the probability and are never below 0; where there is no text the hidden state
counts for nothing.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from treadle_learned.features import FEATURES
from treadle_learned.scores import QUANTILES

TARGETS = ("remaining_tokens", "remaining_turns")
MEDIANS = (FEATURES.index("forecast_tokens_p50"), FEATURES.index("forecast_turns_p50"))
WIDTH = 64
DROPOUT = 0.2
TURN = FEATURES.index("turn")
BANDS = (0, 1, 3, 6)  # steps seen from which calibration is another: errors shrink with what is known, and grow late
# ln of a factor of 2.7 from the median to either side, before anything is learned: softplus of this is about 1.
INITIAL_SPREAD = 0.54


class QuantileHead(nn.Module):
    """[n, hidden_size] and [n, len(FEATURES)] to [n, len(TARGETS), len(QUANTILES)]. `shift`: what calibration
    adds in each of BANDS."""

    def __init__(self, hidden_size: int, width: int = WIDTH, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.LayerNorm(hidden_size), nn.Dropout(dropout), nn.Linear(hidden_size, width))
        self.numbers = nn.Linear(len(FEATURES), width)
        self.joined = nn.Sequential(nn.SiLU(), nn.Dropout(dropout), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, len(TARGETS) * len(QUANTILES))
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
        scaled = (features - cast("Tensor", self.mean)) / cast("Tensor", self.deviation)
        joined = self.joined(self.numbers(scaled) + self.text(hidden) * has_text[:, None])
        low, middle, high = self.out(joined).view(-1, len(TARGETS), len(QUANTILES)).unbind(dim=-1)
        median = features[:, list(MEDIANS)] + middle
        quantiles = torch.stack([median - softplus(low), median, median + softplus(high)], dim=-1)
        shifted = quantiles + cast("Tensor", self.shift)[band_of(features)]
        return torch.cummax(shifted, dim=-1).values.clamp_min(0.0)


def band_of(features: Tensor) -> Tensor:
    """[n], by the steps that were seen: the index in BANDS."""
    edges = torch.log1p(torch.tensor(BANDS[1:], dtype=features.dtype, device=features.device) - 0.5)
    return torch.bucketize(features[:, TURN].contiguous(), edges)


def pinball(quantiles: Tensor, targets: Tensor, censored: Tensor) -> Tensor:
    """The mean pinball loss of [n, targets, quantiles] for targets [n, targets], all in ln(1 + x). What is `censored`,
    bool [n], is at least its target: it costs only where less was predicted."""
    short = targets[..., None] - quantiles
    levels = torch.tensor(QUANTILES, dtype=quantiles.dtype, device=quantiles.device)
    loss = torch.maximum(levels * short, (levels - 1.0) * short)
    return torch.where(censored[:, None, None] & (short < 0.0), torch.zeros_like(loss), loss).mean()
