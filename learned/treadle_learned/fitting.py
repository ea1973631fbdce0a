"""Fits the head to hidden states that are computed already: the backbone stays as it is, or has been trained before.

Purpose: seconds instead of hours where there is no GPU. Every member of the head is fitted without a fold of the
prompts, all at once. Invariants: a member is never fitted on its fold; what comes back is the head of the epoch that
was best on what each has not seen, then set right by calibration (`calibration`); the same seed gives the same head.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW

from treadle_learned.calibration import FEWEST, calibrate, unseen
from treadle_learned.epochs import Bar, State, run, silent
from treadle_learned.errors import TooFewError
from treadle_learned.examples import Examples
from treadle_learned.head import QuantileHead, pinball


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
    """A head, the epoch it is of, and its loss before calibration on what its members were not fitted on."""

    head: QuantileHead
    epoch: int
    loss: float


def fit(examples: Examples, folds: Tensor, hidden_size: int, how: Fitting | None = None) -> Fitted:
    """folds [n]: the member that is fitted without the example, from 0; below 0 for none. A prompt's are of one. Raises
    TooFewError."""
    work = Fit(examples, folds, hidden_size, how)
    run(work, "head")
    return work.fitted()


class Fit:
    """`fit` an epoch at a time (`epochs.Epochs`). Raises TooFewError."""

    def __init__(self, examples: Examples, folds: Tensor, hidden_size: int, how: Fitting | None = None) -> None:
        members = int(folds.max()) + 1 if len(folds) else 0
        self._fitted_on = folds != torch.arange(members)[:, None]  # [members, n]
        fewest = min(map(int, self._fitted_on.sum(dim=1)), default=0)
        for name, count in (("training", fewest), ("validation", int((folds >= 0).sum()))):
            if count < FEWEST:
                raise TooFewError(f"{count} {name} examples, at least {FEWEST} are needed: harvest more rollouts")
        self._examples, self._folds = examples, folds
        self._how = how = how or Fitting()
        self.epoch = 0
        torch.manual_seed(how.seed)
        self._order = torch.Generator().manual_seed(how.seed)
        self._head = QuantileHead(hidden_size, members)
        self._head.scale_to(examples.features[self._fitted_on.any(dim=0)])
        self._optimizer = AdamW(self._head.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay)
        self._best = Fitted(copy.deepcopy(self._head).eval(), 0, loss_unseen(self._head, examples, folds))
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
        for rows in torch.randperm(len(self._examples), generator=self._order).split(self._how.batch):
            batch, fitted_on = self._examples.of(rows), self._fitted_on[:, rows]
            loss = pinball(self._head.each(batch.hidden, batch.features, batch.has_text), batch.targets, batch.censored)
            self._optimizer.zero_grad()
            (loss * fitted_on).sum().div(max(1, int(fitted_on.sum()))).backward()
            self._optimizer.step()
        self._draws = torch.get_rng_state()
        self.epoch += 1
        now = loss_unseen(self._head, self._examples, self._folds)
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
        calibrate(self._best.head, self._examples, self._folds)
        return self._best


@torch.inference_mode()
def loss_of(head: QuantileHead, examples: Examples) -> float:
    """The pinball loss over tokens and turns."""
    head.eval()
    quantiles = head(examples.hidden, examples.features, examples.has_text)
    return float(pinball(quantiles, examples.targets, examples.censored).mean())


def loss_unseen(head: QuantileHead, examples: Examples, folds: Tensor) -> float:
    """The same before calibration, of each by the member that was not fitted on it."""
    judged, quantiles = unseen(head, examples, folds)
    return float(pinball(quantiles, judged.targets, judged.censored).mean())
