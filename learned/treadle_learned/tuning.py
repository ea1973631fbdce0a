"""Trains the backbone and the head together: one pass over a window answers all its questions, with gradients.

The head comes fitted to the states of the backbone as it was, so that the first gradients already say what would help
it (Kumar et al. 2022, fine-tuning after linear probing). Invariants: validation examples are never trained on; what
comes back is the best epoch's pair, the untouched one being epoch 0; the same seed gives the same pair.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from treadle_learned.backbone_tuned import Tunable
from treadle_learned.calibration import calibrate
from treadle_learned.epochs import Bar, State
from treadle_learned.examples import Examples, States, examples
from treadle_learned.fitting import loss_of
from treadle_learned.head import QuantileHead, pinball
from treadle_learned.moments import Moment
from treadle_learned.questions import Questions
from treadle_learned.reading import Bounds, Ids, windows

MOST_GRADIENT = 1.0  # the norm that gradients are cut to


@dataclass(frozen=True)
class TuneHow:
    """How. windows: read before each update. learning rates: of adapters, of whole weights, of the head."""

    epochs: int = 3
    patience: int = 1
    windows: int = 8
    lora_rate: float = 2e-4
    full_rate: float = 2e-5
    head_rate: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class _Passage:
    """What one pass reads: ids, none for transcripts without text; and the example that each of its ends asks."""

    ids: Ids
    ends: list[int]
    rows: list[int]


class Tuning:
    """An epoch at a time (`epochs.Epochs`). `head`: of one member. `rate`: the backbone's learning rate."""

    def __init__(
        self, tunable: Tunable, head: QuantileHead, asked: Questions, bounds: Bounds, how: TuneHow, rate: float
    ) -> None:
        self.epoch = 0
        self._tunable, self._asked, self._bounds, self._how = tunable, asked, bounds, how
        self._head = copy.deepcopy(head)
        self._head.get_buffer("shift").zero_()  # the loss is of what is said before calibration
        self._passages = _passages(asked, tunable, bounds)
        self._train = _without_states(asked.train, tunable.backbone.hidden_size)
        self._optimizer = AdamW(
            [
                {"params": list(tunable.trained.values()), "lr": rate},
                {"params": list(self._head.parameters()), "lr": how.head_rate},
            ],
            weight_decay=how.weight_decay,
        )
        self._order = torch.Generator().manual_seed(how.seed)
        torch.manual_seed(how.seed)
        self._draws = torch.get_rng_state()
        self.best_epoch, self.loss = 0, float("inf")
        self._best_head = copy.deepcopy(self._head)
        self._best_weights = tunable.weights()

    @property
    def most(self) -> int:
        """See `epochs.Epochs`."""
        return self._how.epochs

    @property
    def done(self) -> bool:
        """After the last epoch, or enough of them without a better one."""
        return self.epoch >= self._how.epochs or self.epoch - self.best_epoch >= self._how.patience

    def run_epoch(self, bar: Bar) -> None:
        """One pass over the training windows; before the first, what the untouched pair is worth."""
        if self.epoch == 0:
            self.loss = loss_of(self._head, self._validation(bar))
        torch.set_rng_state(self._draws)
        self._head.train()
        order = torch.randperm(len(self._passages), generator=self._order).tolist()
        groups = [order[at : at + self._how.windows] for at in range(0, len(order), self._how.windows)]
        for at in bar(f"epoch {self.epoch + 1}: windows")(range(len(groups)), len(groups)):
            self._update([self._passages[which] for which in groups[at]])
        self._draws = torch.get_rng_state()
        self.epoch += 1
        now = loss_of(self._head, self._validation(bar))
        if now < self.loss:
            self.best_epoch, self.loss = self.epoch, now
            self._best_head, self._best_weights = copy.deepcopy(self._head), self._tunable.weights()

    def state(self) -> State:
        """See `epochs.Epochs`."""
        return {
            "epoch": self.epoch,
            "head": self._head.state_dict(),
            "weights": self._tunable.weights(),
            "optimizer": self._optimizer.state_dict(),
            "order": self._order.get_state(),
            "draws": self._draws,
            "best": {"epoch": self.best_epoch, "loss": self.loss},
            "best_head": self._best_head.state_dict(),
            "best_weights": self._best_weights,
        }

    def restore(self, state: State) -> None:
        """See `epochs.Epochs`."""
        self.epoch = state["epoch"]
        self._head.load_state_dict(state["head"])
        self._tunable.put(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._order.set_state(state["order"])
        self._draws = state["draws"]
        self.best_epoch, self.loss = state["best"]["epoch"], state["best"]["loss"]
        self._best_head.load_state_dict(state["best_head"])
        self._best_weights = state["best_weights"]

    def tuned(self, bar: Bar) -> QuantileHead:
        """The best head, set right by calibration; the tunable then holds what it was trained with."""
        self._tunable.put(self._best_weights)
        judged = self._validation(bar)
        calibrate(self._best_head, judged, torch.zeros(len(judged), dtype=torch.long))
        return self._best_head

    def _update(self, group: Sequence[_Passage]) -> None:
        questions = sum(len(passage.rows) for passage in group)
        self._optimizer.zero_grad()
        for passage in group:
            part = self._train.of(torch.tensor(passage.rows))
            hidden = self._tunable.states(passage.ids, passage.ends) if passage.ids else part.hidden
            has_text = torch.full((len(passage.rows),), bool(passage.ids))
            loss = pinball(self._head.each(hidden, part.features, has_text), part.targets, part.censored).mean()
            (loss * len(passage.rows) / questions).backward()
        for trained in (self._tunable.trained.values(), self._head.parameters()):
            clip_grad_norm_(trained, MOST_GRADIENT)
        self._optimizer.step()

    def _validation(self, bar: Bar) -> Examples:
        states = States(self._tunable.backbone, self._asked.transcripts, self._bounds)
        moments = self._asked.validation
        return examples(moments, *states.read(moments, bar("validation: reading")))


def _passages(asked: Questions, tunable: Tunable, bounds: Bounds) -> list[_Passage]:
    rows: dict[int, dict[int, int]] = {}
    for row, moment in enumerate(asked.train):
        rows.setdefault(moment.index, {})[moment.turn] = row
    found: list[_Passage] = []
    for index, of_turn in rows.items():
        transcript = asked.transcripts[index]
        if not transcript.has_text:
            found.append(_Passage((), [], list(of_turn.values())))
            continue
        for window in windows(transcript, tunable.backbone.tokenize, bounds):
            ends = [end for _, end in window.ends]
            found.append(_Passage(window.ids, ends, [of_turn[turn] for turn, _ in window.ends]))
    return found


def _without_states(moments: Sequence[Moment], hidden_size: int) -> Examples:
    return examples(moments, torch.zeros(len(moments), hidden_size), [False] * len(moments))
