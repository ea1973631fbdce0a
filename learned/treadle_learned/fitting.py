"""Fits the head to hidden states that are computed already: the backbone stays as it is, or has been trained before.

Purpose: seconds instead of hours where there is no GPU. Invariants: validation examples are never trained on; what
comes back is the best epoch's head by their pinball loss, then set right by calibration; the same seed gives the same
head.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW

from treadle_learned.epochs import Bar, State, run, silent
from treadle_learned.errors import TooFewError
from treadle_learned.examples import Examples
from treadle_learned.head import BANDS, QuantileHead, band_of, pinball
from treadle_learned.scores import QUANTILES

FEWEST = 8  # examples of either part
BAND_WEIGHT = 300  # examples of a band that count as much as all others: those of one prompt err together


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
    work = Fit(train, validation, hidden_size, how)
    run(work, "head")
    return work.fitted()


class Fit:
    """`fit` an epoch at a time (`epochs.Epochs`). Raises TooFewError."""

    def __init__(self, train: Examples, validation: Examples, hidden_size: int, how: Fitting | None = None) -> None:
        for name, part in (("training", train), ("validation", validation)):
            if len(part) < FEWEST:
                raise TooFewError(f"{len(part)} {name} examples, at least {FEWEST} are needed: harvest more rollouts")
        self._train, self._validation = train, validation
        self._how = how = how or Fitting()
        self.epoch = 0
        torch.manual_seed(how.seed)
        self._order = torch.Generator().manual_seed(how.seed)
        self._head = QuantileHead(hidden_size)
        self._head.scale_to(train.features)
        self._optimizer = AdamW(self._head.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay)
        self._best = Fitted(copy.deepcopy(self._head).eval(), 0, loss_of(self._head, validation))
        self._draws = torch.get_rng_state()  # of dropout: whoever else draws between epochs changes nothing

    @property
    def most(self) -> int:
        """See `epochs.Epochs`."""
        return self._how.epochs

    @property
    def done(self) -> bool:
        """After the last epoch, or enough of them without a better one."""
        return self.epoch >= self._how.epochs or self.epoch - self._best.epoch >= self._how.patience

    def run_epoch(self, bar: Bar = silent) -> None:
        """One pass over the training examples: a moment, that needs no bar."""
        del bar
        torch.set_rng_state(self._draws)
        self._head.train()
        for rows in torch.randperm(len(self._train), generator=self._order).split(self._how.batch):
            batch = self._train.of(rows)
            quantiles = self._head(batch.hidden, batch.features, batch.has_text)
            self._optimizer.zero_grad()
            pinball(quantiles, batch.targets, batch.censored).backward()
            self._optimizer.step()
        self._draws = torch.get_rng_state()
        self.epoch += 1
        now = loss_of(self._head, self._validation)
        if now < self._best.loss:
            self._best = Fitted(copy.deepcopy(self._head).eval(), self.epoch, now)

    def state(self) -> State:
        """See `epochs.Epochs`."""
        return {
            "epoch": self.epoch,
            "head": self._head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "order": self._order.get_state(),
            "draws": self._draws,
            "best": {"head": self._best.head.state_dict(), "epoch": self._best.epoch, "loss": self._best.loss},
        }

    def restore(self, state: State) -> None:
        """See `epochs.Epochs`."""
        self.epoch = state["epoch"]
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._order.set_state(state["order"])
        self._draws = state["draws"]
        best = state["best"]
        self._best.head.load_state_dict(best["head"])
        self._best = Fitted(self._best.head, best["epoch"], best["loss"])

    def fitted(self) -> Fitted:
        """The best so far, set right by calibration; its loss is of before."""
        calibrate(self._best.head, self._validation)
        return self._best


@torch.inference_mode()
def loss_of(head: QuantileHead, examples: Examples) -> float:
    """The pinball loss over tokens and turns."""
    head.eval()
    quantiles = head(examples.hidden, examples.features, examples.has_text)
    return float(pinball(quantiles, examples.targets, examples.censored))


def calibrate(head: QuantileHead, examples: Examples) -> None:
    """Shifts each quantile so that on these examples it is what it says. See `calibrate_across`."""
    calibrate_across(head, [(head, examples)])


@torch.inference_mode()
def calibrate_across(head: QuantileHead, held_out: Sequence[tuple[QuantileHead, Examples]]) -> None:
    """Shifts each quantile of `head` by what it takes on examples that each of some heads, fitted alike, was not fitted
    on (split conformal, Romano et al. 2019, on each side by itself; pooled over heads as in cross-conformal, Vovk
    2015). By steps seen (`head.BANDS`), drawn to the shift of all where a band has few. What is censored is left out;
    fewer than FEWEST others shift nothing. The heads of `held_out` lose their shifts."""
    over, bands = [], []
    for other, examples in held_out:
        other.get_buffer("shift").zero_()
        whole = ~examples.censored
        quantiles = other(examples.hidden, examples.features, examples.has_text)[whole]
        over.append(examples.targets[whole][..., None] - quantiles)  # [n, targets, quantiles]
        bands.append(band_of(examples.features)[whole])
    errors, band = torch.cat(over), torch.cat(bands)
    shift: Tensor = head.get_buffer("shift")
    shift.zero_()
    if len(errors) < FEWEST:
        return
    of_all = _quantiles(errors)
    for at in range(len(BANDS)):
        own = errors[band == at]
        trust = len(own) / (len(own) + BAND_WEIGHT)
        shift[at] = trust * _quantiles(own) + (1.0 - trust) * of_all if len(own) else of_all


def _quantiles(errors: Tensor) -> Tensor:
    """Of [n, targets, quantiles], each at its own level."""
    return torch.stack([torch.quantile(errors[:, :, at], level, dim=0) for at, level in enumerate(QUANTILES)], dim=-1)
