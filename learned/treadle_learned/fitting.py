"""Fits the head to hidden states that are computed already: the backbone stays as it is, or has been trained before.

Purpose: seconds instead of hours where there is no GPU. Invariants: validation examples are never trained on; what
comes back is the best epoch's head by their pinball loss, then set right by calibration; the same seed gives the same
head.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW

from treadle_learned.errors import TooFewError
from treadle_learned.examples import Examples
from treadle_learned.head import QuantileHead, pinball
from treadle_learned.scores import QUANTILES

FEWEST = 8  # examples of either part


@dataclass(frozen=True)
class Fitting:
    """How. patience: epochs without a better validation loss before it stops."""

    epochs: int = 200
    patience: int = 20
    batch: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Fitted:
    """A head, the epoch it is of, and its validation loss before calibration."""

    head: QuantileHead
    epoch: int
    loss: float


def fit(train: Examples, validation: Examples, hidden_size: int, how: Fitting | None = None) -> Fitted:
    """Raises TooFewError."""
    how = how or Fitting()
    for name, examples in (("training", train), ("validation", validation)):
        if len(examples) < FEWEST:
            raise TooFewError(f"{len(examples)} {name} examples, at least {FEWEST} are needed: harvest more rollouts")
    torch.manual_seed(how.seed)
    order = torch.Generator().manual_seed(how.seed)
    head = QuantileHead(hidden_size)
    head.scale_to(train.features)
    optimizer = AdamW(head.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay)
    best = Fitted(copy.deepcopy(head).eval(), 0, loss_of(head, validation))
    for epoch in range(1, how.epochs + 1):
        head.train()
        for rows in torch.randperm(len(train), generator=order).split(how.batch):
            batch = train.of(rows)
            loss = pinball(head(batch.hidden, batch.features, batch.has_text), batch.targets, batch.censored)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        now = loss_of(head, validation)
        if now < best.loss:
            best = Fitted(copy.deepcopy(head).eval(), epoch, now)
        elif epoch - best.epoch >= how.patience:
            break
    calibrate(best.head, validation)
    return best


@torch.inference_mode()
def loss_of(head: QuantileHead, examples: Examples) -> float:
    """The pinball loss over tokens and turns."""
    head.eval()
    quantiles = head(examples.hidden, examples.features, examples.has_text)
    return float(pinball(quantiles, examples.targets, examples.censored))


@torch.inference_mode()
def calibrate(head: QuantileHead, examples: Examples) -> None:
    """Shifts each quantile so that on these examples it is what it says (split conformal, Romano et al. 2019, on each
    side by itself). What is censored is left out."""
    shift: Tensor = head.get_buffer("shift")
    shift.zero_()
    whole = ~examples.censored
    if int(whole.sum()) < FEWEST:
        return
    quantiles = head(examples.hidden, examples.features, examples.has_text)[whole]
    over = examples.targets[whole][..., None] - quantiles  # [n, targets, quantiles]
    for at, level in enumerate(QUANTILES):
        shift[:, at] = torch.quantile(over[:, :, at], level, dim=0)
