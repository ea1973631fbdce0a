"""The head and its fit: what it can learn, what it repeats before it has, and that its quantiles
mean what they say."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_backbone import HIDDEN, tiny_backbone
from torch import Tensor
from treadle_learned import head as head_module
from treadle_learned.backbone import Backbone
from treadle_learned.examples import Examples, States
from treadle_learned.head import (
    BANDS,
    MEDIANS,
    SAID,
    TURN,
    QuantileHead,
    band_of,
    calibrate,
    loss_held_out,
    loss_of,
    pinball,
    predict_held_out,
)
from treadle_learned.moments import FEATURES, replay
from treadle_learned.reading import Bounds
from treadle_learned.training import Fitting, fit
from treadle_learned.transcript import LearnedError, Transcript, Turn

QUICK = Fitting(epochs=60, patience=10, batch=64, learning_rate=5e-3)
LEVELS = torch.tensor([0.1, 0.5, 0.9])


def synthetic(count: int, seed: int, *, noise: float = 0.3) -> Examples:
    """ln(1 + remaining) is told by the hidden state's first column alone, up to noise."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=draw)
    features = torch.zeros(count, len(FEATURES))
    features[:, list(MEDIANS)] = 6.0
    left = 6.0 + hidden[:, 0] + noise * torch.randn(count, generator=draw)
    flags = torch.ones(count, dtype=torch.bool)
    return Examples(
        hidden, features, flags, torch.stack([left, left], dim=1), ~flags, torch.arange(count)
    )


def folds(count: int, members: int = 4) -> Tensor:
    """Dealt in turn."""
    return torch.arange(count) % members


def below(head: QuantileHead, told: Examples) -> Tensor:
    """The share of truths at or below each quantile."""
    quantiles: Tensor = head(told.hidden, told.features, told.has_text)[:, 0]
    return (told.targets[:, :1] <= quantiles).float().mean(dim=0)


def test_a_head_that_has_learned_nothing_repeats_the_estimators_medians() -> None:
    told = synthetic(5, 0)
    quantiles = QuantileHead(HIDDEN).eval()(told.hidden, told.features, told.has_text)
    assert quantiles.shape == (5, 2, 3)
    torch.testing.assert_close(quantiles[:, :, 1], torch.full((5, 2), 6.0))
    assert (quantiles.diff(dim=-1) > 0.9).all()


def test_it_learns_what_the_text_says_and_not_where_there_is_none() -> None:
    train, test = synthetic(1_300, 1), synthetic(300, 3)
    before = loss_of(QuantileHead(HIDDEN), test)
    head = fit(train, folds(1_300), QUICK).head
    assert loss_of(head, test) < 0.5 * before
    silent = replace(test, has_text=~test.has_text)
    quantiles = head(silent.hidden, silent.features, silent.has_text)
    assert (quantiles - quantiles[0]).abs().max() < 1e-5


def test_its_quantiles_hold_what_they_say_on_what_it_never_saw() -> None:
    head = fit(synthetic(2_000, 1), folds(2_000), QUICK).head
    torch.testing.assert_close(below(head, synthetic(2_000, 3)), LEVELS, atol=0.05, rtol=0.0)


def test_calibration_shifts_what_is_off_by_a_constant() -> None:
    told = synthetic(2_000, 4, noise=0.0)
    head = QuantileHead(HIDDEN).eval()
    calibrate(head, told, folds(2_000, 1))
    torch.testing.assert_close(below(head, told), LEVELS, atol=2e-3, rtol=0.0)


def test_calibration_knows_that_errors_are_another_after_more_steps() -> None:
    """Six steps and more halve the spread. Result: each holds what it says, and a band of which
    nothing was seen is shifted as all are."""
    told = synthetic(6_000, 5, noise=1.0)
    told.targets[:] -= 6.0 + told.hidden[:, :1]  # noise alone
    told.targets[3_000:] *= 0.5
    told.targets[:] += 6.0
    told.features[3_000:, TURN] = math.log1p(7)
    early, late = told.of(torch.arange(3_000)), told.of(torch.arange(3_000, 6_000))
    head = QuantileHead(HIDDEN).eval()
    calibrate(head, told, folds(6_000, 1))
    assert band_of(told.features).unique().tolist() == [0, len(BANDS) - 1]
    for part in (early, late):
        torch.testing.assert_close(below(head, part), LEVELS, atol=0.01, rtol=0.0)
    shift = head.get_buffer("shift")
    assert torch.equal(shift[1], shift[2])
    assert bool(
        (shift[1, :, 0] > shift[0, :, 0]).all() and (shift[1, :, 0] < shift[-1, :, 0]).all()
    )


def test_the_head_counts_at_the_steps_at_which_it_is_ahead() -> None:
    """What is said without a model is exact late, and too sure early. Result: late it counts alone,
    early the head; turns are the head's own."""
    told = synthetic(2_000, 5, noise=1.0)
    told.features[:, SAID] = 6.0
    told.features[1_000:, TURN] = math.log1p(7)
    told.features[1_000:, SAID] = told.targets[1_000:, :1]
    head = QuantileHead(HIDDEN).eval()
    alone = head(told.hidden, told.features, told.has_text)
    calibrate(head, told, folds(2_000, 1))
    weight = head.get_buffer("weight")
    assert weight[0] > 0.9 and weight[-1] < 0.1
    head.get_buffer("shift").zero_()
    mixed = head(told.hidden, told.features, told.has_text)
    torch.testing.assert_close(
        mixed[1_000:, 0], told.targets[1_000:, :1].expand(-1, 3), atol=0.1, rtol=0.0
    )
    torch.testing.assert_close(mixed[:, 1], alone[:, 1])


def test_questions_of_one_prompt_bend_a_band_as_one() -> None:
    """Late questions are off by 1, of few prompts or of many. Result: the many bend their band, the
    few hardly."""
    told = synthetic(1_000, 5)
    told.targets[900:] += 1.0
    told.features[900:, TURN] = math.log1p(7)
    shifts = []
    for prompts in (2, 100):
        head = QuantileHead(HIDDEN).eval()
        of = torch.cat([torch.arange(900), 900 + torch.arange(100) % prompts])
        calibrate(head, replace(told, prompts=of), folds(1_000, 1))
        shifts.append(float(head.get_buffer("shift")[-1, 0, 1]))
    assert shifts[0] < 0.3 and shifts[1] > 0.7


def test_each_fold_is_judged_by_a_member_that_was_fitted_without_it() -> None:
    """Four folds that differ by a constant that the text tells: the members have seen the constants
    of three. Result: each misses that of the fourth, and the calibrated mean holds them all."""
    told, of = synthetic(1_200, 1), folds(1_200)
    offsets = torch.tensor([-2.0, -1.0, 1.0, 2.0])
    told.hidden[:, 1:5] = 3.0 * torch.nn.functional.one_hot(of, 4)
    told.targets[:] += offsets[of][:, None]
    fitted = fit(told, of, QUICK)
    assert fitted.head.members == 4
    assert fitted.loss == pytest.approx(loss_held_out(fitted.head, told, of))
    judged, _ = predict_held_out(fitted.head, told, of)
    assert len(judged) == 1_200
    others = (of + 1) % 4  # who has seen the fold
    assert loss_held_out(fitted.head, told, others) < 0.7 * fitted.loss
    assert float(below(fitted.head, told)[0]) < 0.1 and float(below(fitted.head, told)[2]) > 0.9


def test_many_questions_are_asked_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told, of = synthetic(50, 1), folds(50)
    head = QuantileHead(HIDDEN, 4).eval()
    torch.nn.init.normal_(head.out.weight)
    _, at_once = predict_held_out(head, told, of)
    monkeypatch.setattr(head_module, "ROWS", 7)
    _, in_parts = predict_held_out(head, told, of)
    torch.testing.assert_close(at_once, in_parts)


def test_what_is_in_no_fold_is_fitted_on_and_judges_nobody() -> None:
    told = synthetic(400, 1)
    some = torch.where(torch.arange(400) < 100, 0, -1)
    fitted = fit(told, some, QUICK)
    assert fitted.head.members == 1
    assert fitted.loss == pytest.approx(
        loss_held_out(fitted.head, told.of(torch.arange(100)), folds(100, 1)), rel=1e-4
    )


def test_the_same_seed_gives_the_same_head() -> None:
    one, other = (fit(synthetic(250, 1), folds(250), QUICK).head.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_was_cut_costs_only_where_less_was_predicted() -> None:
    quantiles = torch.tensor([[[4.0, 5.0, 6.0]], [[4.0, 5.0, 6.0]]])
    targets = torch.tensor([[3.0], [7.0]])
    cut = torch.tensor([True, True])
    longer, shorter = pinball(quantiles, targets, cut).tolist()
    assert longer == 0.0
    assert shorter == pinball(quantiles, targets, ~cut).tolist()[1] > 0.0


def test_too_few_examples_are_refused_by_name() -> None:
    told = synthetic(20, 0)
    with pytest.raises(LearnedError, match="3 validation examples, at least 8"):
        fit(told, torch.where(torch.arange(20) < 3, 0, -1))
    with pytest.raises(LearnedError, match="0 training examples, at least 8"):
        fit(told, folds(20, 1))


def test_states_are_read_once_and_none_where_nothing_was_said(tmp_path: Path) -> None:
    backbone = Backbone.load(str(tiny_backbone(tmp_path)), device="cpu", dtype=torch.float32)
    spoken = Transcript(
        "a",
        "r",
        "p",
        10,
        (Turn(5, 2, "first", "ok"), Turn(5, 2, "second", "ok"), Turn(5)),
        prompt="Do it",
    )
    silent = Transcript("b", "r", "q", 10, (Turn(5), Turn(5)))
    moments = replay([spoken, silent])
    read: list[int] = []

    def track(over: Iterable[int], count: int) -> Iterable[int]:
        read.append(count)
        return over

    states = States(backbone, [spoken, silent], Bounds())
    told, again = (states.examples(moments, track) for _ in range(2))

    assert read == [1, 0]
    assert told.has_text.tolist() == [moment.index == 0 for moment in moments]
    assert torch.equal(told.hidden, again.hidden)
    ids = backbone.tokenize("Do it") + backbone.tokenize("first")
    (at,) = [at for at, moment in enumerate(moments) if (moment.index, moment.turn) == (0, 1)]
    torch.testing.assert_close(told.hidden[at], backbone.hidden(ids, [len(ids)])[0])
    assert len(told) == len(moments) and told.targets.shape == (5, 2)
