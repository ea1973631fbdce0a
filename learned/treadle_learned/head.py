"""Head that maps the backbone's hidden states and the numeric features to quantiles of what is
left.

It gives p10, p50 and p90 of ln(1 + remaining tokens) and of ln(1 + remaining turns). The medians
are corrections of the answers of the estimators without a model (a feature), so that a head that
has learned nothing repeats them. A head may have several members, small networks of which each was
fitted without another fold of the prompts, and gives their mean: that averages out what a member
has learned from chance, and a prompt is scored by a member that has not seen it.

How far the head is ahead of those estimators differs by step: its quantiles of tokens are mixed
with theirs, with the weight that has the least loss on prompts that a member was not fitted on, one
for each band of steps.

Calibration then shifts each quantile by the errors on prompts that a member was not fitted on:
split conformal prediction (Romano et al. 2019) on each side by itself, pooled over the members as
in cross-conformal prediction (Vovk 2015). There is no correction for few prompts, (n + 1) / n: one
member errs by more than the mean of all, which makes up for it (over 20 draws of 50 mcpmark prompts
.10 and .89 were below p10 and p90; with it, over 8 of them, .08 and .92).

Invariants: quantiles never fall with the probability and are never below 0; without text the hidden
state counts for nothing; examples that a member was fitted on do not calibrate it, and neither do
censored ones.
"""

import math
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from treadle_learned.examples import FEWEST, Examples
from treadle_learned.moments import FEATURES
from treadle_learned.scores import QUANTILES, Floats

TARGETS = ("remaining_tokens", "remaining_turns")
MEDIANS = (FEATURES.index("forecast_tokens_p50"), FEATURES.index("forecast_turns_p50"))
SAID = [FEATURES.index(f"forecast_tokens_p{level}") for level in (10, 50, 90)]  # without a model
WIDTH = 64
DROPOUT = 0.2
TURN = FEATURES.index("turn")
# steps from which on calibration differs: errors shrink with what is known, and grow late
BANDS = (0, 1, 2, 3, 6)
BAND_PROMPTS = 10  # of a band that count as much as all bands together
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the head that are tried
ROWS = 4_096  # questions at once: each member has a copy of the states
# ln of a factor of 2.7 from the median to either side, before anything is learned: softplus of this
# is about 1.
INITIAL_SPREAD = 0.54


class QuantileHead(nn.Module):
    """Network from [n, hidden_size] and [n, len(FEATURES)] to [n, len(TARGETS), len(QUANTILES)]. In
    each of BANDS, `weight`: of its own quantiles of tokens beside those without a model; `shift`:
    the correction by calibration."""

    def __init__(
        self, hidden_size: int, members: int = 1, width: int = WIDTH, dropout: float = DROPOUT
    ) -> None:
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
        self.register_buffer("weight", torch.ones(len(BANDS)))
        self.register_buffer("shift", torch.zeros(len(BANDS), len(TARGETS), len(QUANTILES)))

    def scale_to(self, features: Tensor) -> None:
        """Set the mean and deviation of each feature from these features, [n, len(FEATURES)]."""
        cast("Tensor", self.mean).copy_(features.mean(dim=0))
        cast("Tensor", self.deviation).copy_(features.std(dim=0, correction=0).clamp_min(1e-3))

    def forward(self, hidden: Tensor, features: Tensor, has_text: Tensor) -> Tensor:
        """Return the mixed and calibrated quantiles of the members' mean. has_text: bool [n]."""
        return self.finish(self.each(hidden, features, has_text).mean(dim=0), features)

    def finish(self, quantiles: Tensor, features: Tensor) -> Tensor:
        """Mix and calibrate quantiles, [n, len(TARGETS), len(QUANTILES)]."""
        bands = band_of(features)
        mixed = mix(quantiles, features, cast("Tensor", self.weight)[bands])
        return torch.cummax(mixed + cast("Tensor", self.shift)[bands], dim=-1).values.clamp_min(0.0)

    def each(self, hidden: Tensor, features: Tensor, has_text: Tensor) -> Tensor:
        """Return the quantiles of each member before calibration, [members, n, len(TARGETS),
        len(QUANTILES)]."""
        scaled = (features - cast("Tensor", self.mean)) / cast("Tensor", self.deviation)
        text = (
            self.text(self.dropout(self.normed(hidden).expand(self.members, -1, -1)))
            * has_text[:, None]
        )
        joined = silu(
            self.joined(
                self.dropout(silu(self.numbers(scaled.expand(self.members, -1, -1)) + text))
            )
        )
        low, middle, high = (
            self.out(joined).unflatten(-1, (len(TARGETS), len(QUANTILES))).unbind(dim=-1)
        )
        median = features[:, list(MEDIANS)] + middle
        return torch.stack([median - softplus(low), median, median + softplus(high)], dim=-1)


class _Linear(nn.Module):
    """Linear layer from [members, n, inputs] to [members, n, outputs], each member by its own
    weights, initialised as `nn.Linear`'s."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        most = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-most, most))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-most, most))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, inputs, self.weight)


def band_of(features: Tensor) -> Tensor:
    """Return the index in BANDS of each question, [n], by the number of finished steps."""
    edges = torch.log1p(torch.tensor(BANDS[1:], dtype=features.dtype, device=features.device) - 0.5)
    return torch.bucketize(features[:, TURN].contiguous(), edges)


def mix(quantiles: Tensor, features: Tensor, weight: Tensor) -> Tensor:
    """Return the quantiles [n, targets, quantiles] whose tokens have `weight` [n] beside the
    estimate without a model."""
    tokens = torch.lerp(features[:, SAID], quantiles[:, 0], weight[:, None])
    return torch.stack([tokens, *quantiles.unbind(dim=1)[1:]], dim=1)


def pinball(quantiles: Tensor, targets: Tensor, censored: Tensor) -> Tensor:
    """Return the pinball loss [..., n], the mean over targets and quantiles, of [..., n, targets,
    quantiles] for targets [n, targets], all in ln(1 + x). A `censored` value, bool [n], is at least
    its target: it costs only where less was predicted."""
    short = targets[..., None] - quantiles
    levels = torch.tensor(QUANTILES, dtype=quantiles.dtype, device=quantiles.device)
    loss = torch.maximum(levels * short, (levels - 1.0) * short)
    return torch.where(censored[:, None, None] & (short < 0.0), torch.zeros_like(loss), loss).mean(
        dim=(-2, -1)
    )


@torch.inference_mode()
def predict_held_out(
    head: QuantileHead, examples: Examples, folds: Tensor
) -> tuple[Examples, Tensor]:
    """Return the examples that some member was not fitted on, and that member's quantiles before
    calibration, [n, targets, quantiles]. folds [n]: the member, below 0 for examples that all were
    fitted on."""
    head.eval()
    which = torch.nonzero(folds >= 0)[:, 0]
    found = []
    for rows in which.split(ROWS):
        some = examples.of(rows)
        found.append(
            head.each(some.hidden, some.features, some.has_text)[
                folds[rows], torch.arange(len(rows))
            ]
        )
    return examples.of(which), torch.cat(found)


@torch.inference_mode()
def calibrate(head: QuantileHead, examples: Examples, folds: Tensor) -> None:
    """Set `weight`, then `shift`, by the held-out examples, for each of BANDS, drawn to those of
    all where a band has few prompts."""
    weight, shift = head.get_buffer("weight"), head.get_buffer("shift")
    weight.fill_(1.0)
    shift.zero_()
    held_out, quantiles = predict_held_out(head, examples, folds)
    whole = ~held_out.censored
    if whole.sum() < FEWEST:
        return
    bands = band_of(held_out.features)
    tried = [mix(quantiles, held_out.features, torch.full(bands.shape, each)) for each in WEIGHTS]
    losses = torch.stack([pinball(each, held_out.targets, held_out.censored) for each in tried])

    def set_bands(values: Tensor, among: Tensor, find: Callable[[Tensor], Tensor]) -> None:
        values[:] = find(among)
        for at in range(len(BANDS)):
            own = among & (bands == at)
            if own.any():
                count = len(held_out.prompts[own].unique())
                values[at] += count / (count + BAND_PROMPTS) * (find(own) - values[at])

    set_bands(
        weight,
        torch.ones_like(whole),
        lambda own: torch.tensor(WEIGHTS)[losses[:, own].mean(dim=1).argmin()],
    )
    errors = held_out.targets[..., None] - mix(quantiles, held_out.features, weight[bands])
    set_bands(shift, whole, lambda own: _tails(errors[own]))


def _tails(errors: Tensor) -> Tensor:
    """Return the quantile of errors [n, targets, quantiles] at each level."""
    return torch.stack(
        [torch.quantile(errors[:, :, at], level, dim=0) for at, level in enumerate(QUANTILES)],
        dim=-1,
    )


@torch.inference_mode()
def loss_of(head: QuantileHead, examples: Examples) -> float:
    """Return the pinball loss over tokens and turns."""
    head.eval()
    quantiles = head(examples.hidden, examples.features, examples.has_text)
    return float(pinball(quantiles, examples.targets, examples.censored).mean())


def loss_held_out(head: QuantileHead, examples: Examples, folds: Tensor) -> float:
    """Return the loss of `loss_of` before calibration, of each example by the member that was not
    fitted on it."""
    held_out, quantiles = predict_held_out(head, examples, folds)
    return float(pinball(quantiles, held_out.targets, held_out.censored).mean())


@torch.inference_mode()
def remaining_tokens(head: QuantileHead, asked: Examples) -> Floats:
    """Return p10, p50, p90 of each example, [n, 3]."""
    logs = head(asked.hidden, asked.features, asked.has_text)[:, 0]
    return np.asarray(torch.expm1(logs).numpy(), np.float64)
