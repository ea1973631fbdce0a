"""Fit a head to hidden states that are computed already, and train a backbone together with its
head.

`fit` leaves the backbone as it is: seconds instead of hours where there is no GPU. Every member of
the head is fitted without its fold of the prompts, all members at once. `tune` trains the backbone
too: one pass over a window answers all its questions, with gradients. The head comes fitted to the
untrained backbone's states, so that already the first gradients point to what would help it (Kumar
et al. 2022, fine-tuning after linear probing).

Invariants: no member is fitted on its fold; the result is of the epoch with the least loss on
examples that each member has not seen, then calibrated; the same seed gives the same result.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from treadle_learned.backbone import Tunable
from treadle_learned.errors import LearnedError
from treadle_learned.examples import (
    FEWEST,
    Bar,
    Examples,
    States,
    TrainingSet,
    silent,
    without_text,
)
from treadle_learned.head import QuantileHead, calibrate, loss_held_out, loss_of, pinball
from treadle_learned.reading import Bounds, Ids, windows

MOST_GRADIENT = 1.0  # the norm that the gradients of a backbone and its head are cut to


@dataclass(frozen=True)
class Fitting:
    """Options of the fit of a head. patience: epochs without a better validation loss before it
    stops."""

    epochs: int = 200
    patience: int = 20
    batch: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class Tuning:
    """Options of the training of a backbone. windows: read before each update. Learning rates: of
    adapters, of whole weights, of the head."""

    epochs: int = 3
    patience: int = 1
    windows: int = 8
    lora_rate: float = 2e-4
    full_rate: float = 2e-5
    head_rate: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Fitted:
    """Calibrated head, its epoch, and its loss before calibration on examples that its members were
    not fitted on."""

    head: QuantileHead
    epoch: int
    loss: float


def fit(
    examples: Examples, folds: Tensor, how: Fitting | None = None, bar: Bar = silent, name: str = ""
) -> Fitted:
    """Fit a head to examples. folds [n]: the member that is fitted without the example, from 0;
    below 0 for none. A prompt is in one fold. Raises LearnedError."""
    how = how or Fitting()
    members = int(folds.max()) + 1 if len(folds) else 0
    fitted_on = folds != torch.arange(members)[:, None]  # [members, n]
    fewest = min(map(int, fitted_on.sum(dim=1)), default=0)
    for part, count in (("training", fewest), ("validation", int((folds >= 0).sum()))):
        if count < FEWEST:
            raise LearnedError(
                f"{count} {part} examples, at least {FEWEST} are needed: harvest more rollouts"
            )
    torch.manual_seed(how.seed)
    order = torch.Generator().manual_seed(how.seed)
    head = QuantileHead(examples.hidden.shape[1], members)
    head.scale_to(examples.features[fitted_on.any(dim=0)])
    optimizer = AdamW(head.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay)
    best = Fitted(copy.deepcopy(head).eval(), 0, loss_held_out(head, examples, folds))
    for epoch in bar(f"{name}: epochs")(range(1, how.epochs + 1), how.epochs):
        head.train()
        for rows in torch.randperm(len(examples), generator=order).split(how.batch):
            batch, used = examples.of(rows), fitted_on[:, rows]
            loss = pinball(
                head.each(batch.hidden, batch.features, batch.has_text),
                batch.targets,
                batch.censored,
            )
            optimizer.zero_grad()
            (loss * used).sum().div(max(1, int(used.sum()))).backward()
            optimizer.step()
        now = loss_held_out(head, examples, folds)
        if now < best.loss:
            best = Fitted(copy.deepcopy(head).eval(), epoch, now)
        if epoch - best.epoch >= how.patience:
            break
    calibrate(best.head, examples, folds)
    return best


def tune(
    tunable: Tunable,
    head: QuantileHead,
    asked: TrainingSet,
    bounds: Bounds,
    how: Tuning,
    bar: Bar = silent,
) -> Fitted:
    """Train the backbone with `head`, which has one member. The tunable then holds the weights of
    the best epoch; epoch 0 is the untrained pair."""
    head = copy.deepcopy(head)
    head.get_buffer("weight").fill_(1.0)  # the loss is of the quantiles before calibration
    head.get_buffer("shift").zero_()
    trained, backbone = list(tunable.trained.values()), tunable.backbone
    rate = how.lora_rate if tunable.is_adapter else how.full_rate
    optimizer = AdamW(
        [{"params": trained, "lr": rate}, {"params": list(head.parameters()), "lr": how.head_rate}],
        weight_decay=how.weight_decay,
    )
    order = torch.Generator().manual_seed(how.seed)
    torch.manual_seed(how.seed)
    passages, examples = (
        _passages(asked, tunable, bounds),
        without_text(asked.train, backbone.hidden_size),
    )

    def read_validation() -> Examples:
        states = States(backbone, asked.transcripts, bounds)
        return states.examples(asked.validation, bar("validation: reading"))

    best, weights = (
        Fitted(copy.deepcopy(head), 0, loss_of(head, read_validation())),
        tunable.weights(),
    )
    for epoch in bar("epochs")(range(1, how.epochs + 1), how.epochs):
        head.train()
        shuffled = torch.randperm(len(passages), generator=order).tolist()
        groups = [shuffled[at : at + how.windows] for at in range(0, len(shuffled), how.windows)]
        for at in bar(f"epoch {epoch}: windows")(range(len(groups)), len(groups)):
            optimizer.zero_grad()
            _backward(tunable, head, examples, [passages[which] for which in groups[at]])
            for parameters in (trained, list(head.parameters())):
                clip_grad_norm_(parameters, MOST_GRADIENT)
            optimizer.step()
        now = loss_of(head, read_validation())
        if now < best.loss:
            best, weights = Fitted(copy.deepcopy(head), epoch, now), tunable.weights()
        if epoch - best.epoch >= how.patience:
            break
    if best.epoch:
        tunable.restore(weights)
        held_out = read_validation()
        calibrate(best.head, held_out, torch.zeros(len(held_out), dtype=torch.long))
    return best


@dataclass(frozen=True)
class _Passage:
    """One pass of the backbone: ids, none for transcripts without text, and the example that each
    of its ends answers."""

    ids: Ids
    ends: list[int]
    rows: list[int]


def _passages(asked: TrainingSet, tunable: Tunable, bounds: Bounds) -> list[_Passage]:
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


def _backward(
    tunable: Tunable, head: QuantileHead, examples: Examples, group: Sequence[_Passage]
) -> None:
    questions = sum(len(passage.rows) for passage in group)
    for passage in group:
        part = examples.of(torch.tensor(passage.rows))
        hidden = tunable.states(passage.ids, passage.ends) if passage.ids else part.hidden
        has_text = torch.full((len(passage.rows),), bool(passage.ids))
        loss = pinball(
            head.each(hidden, part.features, has_text), part.targets, part.censored
        ).mean()
        (loss * len(passage.rows) / questions).backward()
