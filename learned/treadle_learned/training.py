"""Train a predictor: from transcripts to a checkpoint, or to the next version of a models folder.

`fit` fits a head to hidden states that are computed already, and leaves the backbone as it is:
seconds instead of hours where there is no GPU. Every member of the head is fitted without its fold
of the prompts, all members at once. `tune` trains the backbone too: one pass over a window answers
all its questions, with gradients. The head comes fitted to the untrained backbone's states, so that
already the first gradients point to what would help it (Kumar et al. 2022, fine-tuning after linear
probing).

`train` fits a head with the text and one without it; the checkpoint is the one with the lower loss
on prompts that it was not fitted on, and notes whether it was lower than that of the estimators
without a model. `refit` trains the next version, and promotes it if it is better.

Invariants: no member is fitted on its fold; the result of a fit is of the epoch with the least loss
on examples that each member has not seen, then calibrated; the same seed gives the same result. The
test prompts are never looked at; a checkpoint appears whole or not at all, and no existing one is
changed. A version that is worse on the validation prompts than the one in use is never promoted;
the one in use stays until a better one is whole.
"""

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from treadle_learned.backbone import Backbone, Tunable, Tune, load_tuned
from treadle_learned.checkpoint import Checkpoint, ModelsFolder, load, save
from treadle_learned.examples import (
    FEWEST,
    Bar,
    Examples,
    States,
    TrainingSet,
    silent,
    training_set,
    without_text,
)
from treadle_learned.head import QuantileHead, calibrate, loss_held_out, loss_of, pinball
from treadle_learned.moments import Moment
from treadle_learned.reading import Bounds, Ids, windows
from treadle_learned.transcript import LearnedError, Transcript

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
    questions: TrainingSet,
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
        _passages(questions, tunable, bounds),
        without_text(questions.train, backbone.hidden_size),
    )

    def read_validation() -> Examples:
        states = States(backbone, questions.transcripts, bounds)
        return states.examples(questions.validation, bar("validation: reading"))

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


def _passages(questions: TrainingSet, tunable: Tunable, bounds: Bounds) -> list[_Passage]:
    rows: dict[int, dict[int, int]] = {}
    for row, moment in enumerate(questions.train):
        rows.setdefault(moment.index, {})[moment.turn] = row
    found: list[_Passage] = []
    for index, of_turn in rows.items():
        transcript = questions.transcripts[index]
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


NO_TEXT = 1  # the width of the state of a head that reads nothing; a head has at least one


@dataclass(frozen=True)
class Training:
    """Options of a training. version: the checkpoint's name. backbone: folder or hub name, empty to
    learn from numbers alone; tuned: its trained part from an earlier training. epochs, max_tuples:
    at most, 0 for the usual number, or all. seed: of the split, the drawing and the fits."""

    version: str
    backbone: str = ""
    tuned: Path | None = None
    tune: Tune = Tune.FROZEN
    seed: int = 0
    epochs: int = 0
    max_tuples: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    fitting: Fitting = field(default_factory=Fitting)
    tuning: Tuning = field(default_factory=Tuning)


@dataclass(frozen=True)
class _Candidate:
    """Head with the backbone that it reads by. notes: how it was made."""

    fitted: Fitted
    backbone: Backbone | None = None
    tuned: Path | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def train(
    transcripts: list[Transcript], how: Training, out: Path, *, bar: Bar = silent
) -> Checkpoint:
    """Train a predictor and write its checkpoint at `out`, where nothing may exist yet. Raises
    LearnedError, OSError."""
    if out.exists():
        raise LearnedError(
            f"{out}: is there already, and a predictor is never written over: name another folder"
        )
    trains_backbone = how.tune is not Tune.FROZEN
    if trains_backbone and (not how.backbone or how.tuned is not None):
        raise LearnedError(f"tune: {how.tune} needs a backbone that nobody has trained yet")
    questions = training_set(transcripts, how.seed, how.max_tuples)
    if trains_backbone and not questions.has_text:
        raise LearnedError(f"tune: {how.tune} needs texts, and no transcript has any")
    if trains_backbone or how.tuned is not None:
        questions = questions.for_one_member()
    backbone = None
    if questions.has_text and how.backbone:
        backbone = (
            Backbone.load(how.backbone)
            if how.tuned is None
            else load_tuned(how.backbone, how.tuned)
        )
    with tempfile.TemporaryDirectory() as beside:
        numbers = _fit("numbers", without_text(questions.moments, NO_TEXT), questions, how, bar)
        candidates = {"numbers": _Candidate(numbers)}
        if backbone is not None:
            candidates["learned"] = _learn(questions, how, backbone, Path(beside), bar)
        save(_choose(questions, how, candidates), out)
    return load(out)


def loss_without_a_model(moments: Sequence[Moment]) -> float:
    """Return the pinball loss over tokens and turns (`head.loss_of`) of the estimators without a
    model."""
    forecasts = [
        (moment.forecast.remaining_tokens, moment.forecast.remaining_turns) for moment in moments
    ]
    quantiles = torch.tensor(
        [[[each.p10, each.p50, each.p90] for each in both] for both in forecasts]
    )
    answers = torch.tensor(
        [[moment.remaining_tokens, moment.remaining_turns] for moment in moments]
    ).float()
    censored = torch.tensor([moment.censored for moment in moments])
    return float(pinball(torch.log1p(quantiles.float()), torch.log1p(answers), censored).mean())


def _learn(
    questions: TrainingSet, how: Training, backbone: Backbone, beside: Path, bar: Bar
) -> _Candidate:
    examples = States(backbone, questions.transcripts, how.bounds).examples(
        questions.moments, bar("reading")
    )
    fitted = _fit("learned", examples, questions, how, bar)
    if how.tune is Tune.FROZEN:
        return _Candidate(fitted, backbone, how.tuned)
    del backbone, examples
    tunable = Tunable(Backbone.load(how.backbone, dtype=torch.float32), how.tune, how.seed)
    tuning = replace(how.tuning, seed=how.seed, epochs=how.epochs or how.tuning.epochs)
    tuned = tune(tunable, fitted.head, questions, how.bounds, tuning, bar)
    notes = {"frozen": fitted.loss, "tune_epoch": tuned.epoch}
    if tuned.epoch == 0:
        return _Candidate(fitted, tunable.backbone, None, notes)
    return _Candidate(tuned, tunable.backbone, tunable.save(beside), notes)


def _fit(name: str, examples: Examples, questions: TrainingSet, how: Training, bar: Bar) -> Fitted:
    epochs = how.epochs if how.epochs and how.tune is Tune.FROZEN else how.fitting.epochs
    fitting = replace(how.fitting, seed=how.seed, epochs=epochs)
    return fit(examples, torch.tensor(questions.folds), fitting, bar, name)


def _choose(
    questions: TrainingSet, how: Training, candidates: Mapping[str, _Candidate]
) -> Checkpoint:
    losses = {name: candidate.fitted.loss for name, candidate in candidates.items()}
    chosen = candidates[min(losses, key=losses.__getitem__)]
    losses["siblings"] = loss_without_a_model(questions.held_out)
    backbone = chosen.backbone
    notes = {
        "validation": losses,
        "chosen": min(losses, key=losses.__getitem__),
        "tune": how.tune.value,
        "seed": how.seed,
        "epoch": chosen.fitted.epoch,
        "parts": questions.counts(),
        **chosen.notes,
    }
    return Checkpoint(
        version=how.version,
        backbone=how.backbone if backbone else "",
        fingerprint=backbone.fingerprint if backbone else "",
        hidden_size=backbone.hidden_size if backbone else NO_TEXT,
        bounds=how.bounds,
        head=chosen.fitted.head,
        notes=notes,
        reads_text=backbone is not None,
        tuned=chosen.tuned,
    )


@dataclass(frozen=True)
class Refit:
    """Result of a training. loss: over the validation questions, of the member that was fitted
    without them; current_loss: of the version that was in use, on the same questions; None where
    there was none."""

    version: str
    promoted: bool
    loss: float
    current_loss: float | None


def refit(
    transcripts: list[Transcript],
    models: ModelsFolder,
    version: str,
    *,
    seed: int = 0,
    backbone: str = "",
) -> Refit:
    """Train `version`, and promote it if its loss is lower than that of the version in use, or none
    is in use.

    The split, the backbone and its adapter are those of the version in use: by another split it
    would be scored on prompts that it was trained on. Raises LearnedError, OSError.
    """
    models.check_new(version)
    folder = models.current()
    current = None if folder is None else load(folder)
    found = train(transcripts, _how(version, current, seed, backbone), models.folder / version)
    questions = training_set(transcripts, found.notes["seed"])
    loss = _loss(found, questions)
    current_loss = None if current is None else _loss(current, questions)
    promoted = current_loss is None or loss < current_loss
    if promoted:
        models.promote(version)
    return Refit(version, promoted, loss, current_loss)


def _how(version: str, current: Checkpoint | None, seed: int, backbone: str) -> Training:
    if current is None:
        return Training(version, backbone, seed=seed)
    seed = current.notes.get("seed", seed)
    if not current.reads_text:
        return Training(version, backbone, seed=seed)
    return Training(
        version, current.backbone, tuned=current.tuned, seed=seed, bounds=current.bounds
    )


def _loss(checkpoint: Checkpoint, questions: TrainingSet) -> float:
    examples = checkpoint.examples(questions.validation, questions.transcripts)
    return loss_held_out(checkpoint.head, examples, torch.zeros(len(examples), dtype=torch.long))
