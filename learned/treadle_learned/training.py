"""From transcripts to a checkpoint: fits the head with the text and without it, and says which was better on prompts
that it was not fitted to, and whether either was better than the estimators without a model.

Invariants: the test prompts are never looked at; the checkpoint appears whole or not at all, and nothing that was there
before is changed; training that was interrupted goes on from its partial folder and ends as if it had not been.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from treadle_learned.backbone import Backbone
from treadle_learned.backbone_tuned import Tunable, Tune, load_tuned
from treadle_learned.checkpoint import FORMAT, Checkpoint, load, save
from treadle_learned.epochs import Bar, run, silent
from treadle_learned.errors import TrainingError
from treadle_learned.examples import Examples, States, examples
from treadle_learned.fitting import Fit, Fitted, Fitting
from treadle_learned.partial import Partial
from treadle_learned.questions import Questions, loss_without_a_model, questions
from treadle_learned.reading import Bounds
from treadle_learned.transcript import Transcript
from treadle_learned.tuning import TuneHow, Tuning

NO_TEXT = 1  # the width of the state of a head that reads nothing; a head has at least one


@dataclass(frozen=True)
class Training:
    """How. version: the checkpoint's name. backbone: folder or hub name, empty to learn from numbers alone; tuned: what
    an earlier training made of it. epochs, max_tuples: at most, 0 for as many as are usual, or there. seed: of the
    split, the drawing and the fits."""

    version: str
    backbone: str = ""
    tuned: Path | None = None
    tune: Tune = Tune.FROZEN
    seed: int = 0
    epochs: int = 0
    max_tuples: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    fitting: Fitting = field(default_factory=Fitting)
    tuning: TuneHow = field(default_factory=TuneHow)


@dataclass(frozen=True)
class _Candidate:
    """A head with what it reads. notes: on how it came about."""

    head: Fitted
    backbone: Backbone | None = None
    tuned: Path | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def train(
    transcripts: list[Transcript], how: Training, out: Path, *, partial: Path | None = None, bar: Bar = silent
) -> Checkpoint:
    """Writes the checkpoint at `out`, where nothing may be yet. `partial`: where it is gone on from after an
    interruption; removed at the end. Raises LearnedError, OSError."""
    if out.exists():
        raise TrainingError(f"{out}: is there already, and a predictor is never written over: name another folder")
    if how.tune is not Tune.FROZEN and (not how.backbone or how.tuned is not None):
        raise TrainingError(f"tune: {how.tune} needs a backbone that nobody has trained yet")
    asked = questions(transcripts, how.seed, how.max_tuples)
    if how.tune is not Tune.FROZEN and not asked.has_text:
        raise TrainingError(f"tune: {how.tune} needs texts, and no transcript has any")
    if how.tune is not Tune.FROZEN or how.tuned is not None:
        asked = asked.for_one()
    backbone = _backbone(how) if asked.has_text and how.backbone else None
    with ExitStack() as until_saved:
        kept = None if partial is None else Partial(partial, _about(how, backbone, transcripts))
        if kept is not None:
            until_saved.callback(kept.close)
        beside = Path(until_saved.enter_context(tempfile.TemporaryDirectory())) if kept is None else kept.folder
        candidates = {"numbers": _numbers(asked, how, kept, bar)}
        if backbone is not None:
            candidates["learned"] = _learned(asked, how, backbone, kept, beside, bar)
        checkpoint = _checkpoint(asked, how, candidates)
        save(checkpoint, out)
        if kept is not None:
            kept.remove()
    return load(out)


def _numbers(asked: Questions, how: Training, kept: Partial | None, bar: Bar) -> _Candidate:
    moments = asked.moments
    told = examples(moments, torch.zeros(len(moments), NO_TEXT), [False] * len(moments))
    return _Candidate(_fitted("numbers", told, asked, NO_TEXT, how, kept, bar))


def _backbone(how: Training) -> Backbone:
    return Backbone.load(how.backbone) if how.tuned is None else load_tuned(how.backbone, how.tuned)


def _learned(
    asked: Questions, how: Training, backbone: Backbone, kept: Partial | None, beside: Path, bar: Bar
) -> _Candidate:
    states = States(backbone, asked.transcripts, how.bounds, kept)
    told = examples(asked.moments, *states.read(asked.moments, bar("reading")))
    fitted = _fitted("learned", told, asked, backbone.hidden_size, how, kept, bar)
    if how.tune is Tune.FROZEN:
        return _Candidate(fitted, backbone, how.tuned)
    del backbone, states
    exact = Backbone.load(how.backbone, dtype=torch.float32)
    tunable = Tunable(exact, how.tune, how.seed)
    wanted = replace(how.tuning, seed=how.seed, epochs=how.epochs or how.tuning.epochs)
    rate = how.tuning.lora_rate if how.tune is Tune.LORA else how.tuning.full_rate
    tuning = Tuning(tunable, fitted.head, asked, how.bounds, wanted, rate)
    run(tuning, how.tune.value, kept, bar)
    notes = {"frozen": fitted.loss, "tune_epoch": tuning.best_epoch}
    if tuning.best_epoch == 0:
        return _Candidate(fitted, exact, None, notes)
    head = tuning.tuned(bar)
    return _Candidate(Fitted(head, tuning.best_epoch, tuning.loss), exact, tunable.save(beside), notes)


def _fitted(
    name: str, told: Examples, asked: Questions, hidden_size: int, how: Training, kept: Partial | None, bar: Bar
) -> Fitted:
    epochs = how.epochs if how.epochs and how.tune is Tune.FROZEN else how.fitting.epochs
    fit = Fit(told, torch.tensor(asked.folds), hidden_size, replace(how.fitting, seed=how.seed, epochs=epochs))
    run(fit, name, kept, bar)
    return fit.fitted()


def _checkpoint(asked: Questions, how: Training, candidates: Mapping[str, _Candidate]) -> Checkpoint:
    losses = {name: candidate.head.loss for name, candidate in candidates.items()}
    best = min(losses, key=losses.__getitem__)
    losses["siblings"] = loss_without_a_model(asked.judged)
    chosen = candidates[best]
    backbone = chosen.backbone
    notes = {
        "validation": losses,
        "chosen": min(losses, key=losses.__getitem__),
        "tune": how.tune.value,
        "seed": how.seed,
        "epoch": chosen.head.epoch,
        "parts": asked.counts(),
        **chosen.notes,
    }
    return Checkpoint(
        version=how.version,
        backbone=how.backbone if backbone else "",
        fingerprint=backbone.fingerprint if backbone else "",
        hidden_size=backbone.hidden_size if backbone else NO_TEXT,
        bounds=how.bounds,
        head=chosen.head.head,
        notes=notes,
        reads_text=backbone is not None,
        tuned=chosen.tuned,
    )


def _about(how: Training, backbone: Backbone | None, transcripts: list[Transcript]) -> dict[str, Any]:
    """All that the outcome depends on, by name."""
    told = hashlib.sha256()
    for transcript in transcripts:
        told.update(repr(transcript).encode())
    fingerprint = backbone.fingerprint if backbone else ""
    return {
        "format": FORMAT,
        **asdict(how),
        "tuned": str(how.tuned or ""),
        "fingerprint": fingerprint,
        "transcripts": told.hexdigest(),
    }
