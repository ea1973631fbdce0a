"""Train a predictor: from transcripts to a checkpoint.

A head is fitted with the text and one without it; the checkpoint is the one with the lower loss on
prompts that it was not fitted on, and notes whether it was lower than that of the estimators
without a model. Invariants: the test prompts are never looked at; the checkpoint appears whole or
not at all, and no existing one is changed.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from treadle_learned.backbone import Backbone, Tunable, Tune, load_tuned
from treadle_learned.checkpoint import Checkpoint, load, save
from treadle_learned.errors import LearnedError
from treadle_learned.examples import (
    Bar,
    Examples,
    States,
    TrainingSet,
    silent,
    training_set,
    without_text,
)
from treadle_learned.fitting import Fitted, Fitting, Tuning, fit, tune
from treadle_learned.head import pinball
from treadle_learned.moments import Moment
from treadle_learned.reading import Bounds
from treadle_learned.transcript import Transcript

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
    asked = training_set(transcripts, how.seed, how.max_tuples)
    if trains_backbone and not asked.has_text:
        raise LearnedError(f"tune: {how.tune} needs texts, and no transcript has any")
    if trains_backbone or how.tuned is not None:
        asked = asked.for_one_member()
    backbone = None
    if asked.has_text and how.backbone:
        backbone = (
            Backbone.load(how.backbone)
            if how.tuned is None
            else load_tuned(how.backbone, how.tuned)
        )
    with tempfile.TemporaryDirectory() as beside:
        numbers = _fit("numbers", without_text(asked.moments, NO_TEXT), asked, how, bar)
        candidates = {"numbers": _Candidate(numbers)}
        if backbone is not None:
            candidates["learned"] = _learn(asked, how, backbone, Path(beside), bar)
        save(_choose(asked, how, candidates), out)
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
    asked: TrainingSet, how: Training, backbone: Backbone, beside: Path, bar: Bar
) -> _Candidate:
    examples = States(backbone, asked.transcripts, how.bounds).examples(
        asked.moments, bar("reading")
    )
    fitted = _fit("learned", examples, asked, how, bar)
    if how.tune is Tune.FROZEN:
        return _Candidate(fitted, backbone, how.tuned)
    del backbone, examples
    tunable = Tunable(Backbone.load(how.backbone, dtype=torch.float32), how.tune, how.seed)
    tuning = replace(how.tuning, seed=how.seed, epochs=how.epochs or how.tuning.epochs)
    tuned = tune(tunable, fitted.head, asked, how.bounds, tuning, bar)
    notes = {"frozen": fitted.loss, "tune_epoch": tuned.epoch}
    if tuned.epoch == 0:
        return _Candidate(fitted, tunable.backbone, None, notes)
    return _Candidate(tuned, tunable.backbone, tunable.save(beside), notes)


def _fit(name: str, examples: Examples, asked: TrainingSet, how: Training, bar: Bar) -> Fitted:
    epochs = how.epochs if how.epochs and how.tune is Tune.FROZEN else how.fitting.epochs
    fitting = replace(how.fitting, seed=how.seed, epochs=epochs)
    return fit(examples, torch.tensor(asked.folds), fitting, bar, name)


def _choose(asked: TrainingSet, how: Training, candidates: Mapping[str, _Candidate]) -> Checkpoint:
    losses = {name: candidate.fitted.loss for name, candidate in candidates.items()}
    chosen = candidates[min(losses, key=losses.__getitem__)]
    losses["siblings"] = loss_without_a_model(asked.held_out)
    backbone = chosen.backbone
    notes = {
        "validation": losses,
        "chosen": min(losses, key=losses.__getitem__),
        "tune": how.tune.value,
        "seed": how.seed,
        "epoch": chosen.fitted.epoch,
        "parts": asked.counts(),
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
