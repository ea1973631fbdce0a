"""The head and its fit: what it can learn, what it repeats before it has, and that its quantiles mean what they say."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.tiny_backbone import HIDDEN, tiny_backbone
from treadle_learned.backbone import Backbone
from treadle_learned.crossfit import fit_across, joined
from treadle_learned.errors import TooFewError
from treadle_learned.examples import Examples, States, examples
from treadle_learned.features import FEATURES
from treadle_learned.fitting import Fitting, calibrate, fit, loss_of
from treadle_learned.head import MEDIANS, TURN, QuantileHead, band_of, pinball
from treadle_learned.moments import replay
from treadle_learned.reading import Bounds
from treadle_learned.transcript import Transcript, Turn

QUICK = Fitting(epochs=60, patience=10, batch=64, learning_rate=5e-3)


def synthetic(count: int, seed: int, *, noise: float = 0.3) -> Examples:
    """ln(1 + remaining) is told by the hidden state's first column alone, up to noise."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=draw)
    features = torch.zeros(count, len(FEATURES))
    features[:, list(MEDIANS)] = 6.0
    left = 6.0 + hidden[:, 0] + noise * torch.randn(count, generator=draw)
    flags = torch.ones(count, dtype=torch.bool)
    return Examples(hidden, features, flags, torch.stack([left, left], dim=1), ~flags)


def test_a_head_that_has_learned_nothing_repeats_the_estimators_medians() -> None:
    told = synthetic(5, 0)
    quantiles = QuantileHead(HIDDEN).eval()(told.hidden, told.features, told.has_text)
    assert quantiles.shape == (5, 2, 3)
    torch.testing.assert_close(quantiles[:, :, 1], torch.full((5, 2), 6.0))
    assert (quantiles.diff(dim=-1) > 0.9).all()


def test_it_learns_what_the_text_says_and_not_where_there_is_none() -> None:
    train, validation, test = synthetic(1_000, 1), synthetic(300, 2), synthetic(300, 3)
    before = loss_of(QuantileHead(HIDDEN), test)
    head = fit(train, validation, HIDDEN, QUICK).head
    assert loss_of(head, test) < 0.5 * before
    silent = Examples(test.hidden, test.features, ~test.has_text, test.targets, test.censored)
    quantiles = head(silent.hidden, silent.features, silent.has_text)
    assert (quantiles - quantiles[0]).abs().max() < 1e-5


def test_its_quantiles_hold_what_they_say_on_what_it_never_saw() -> None:
    head = fit(synthetic(1_000, 1), synthetic(2_000, 2), HIDDEN, QUICK).head
    test = synthetic(2_000, 3)
    quantiles = head(test.hidden, test.features, test.has_text)
    for at, level in enumerate((0.1, 0.5, 0.9)):
        below = (test.targets[..., None] <= quantiles)[:, 0, at].float().mean()
        assert abs(float(below) - level) < 0.05


def test_calibration_shifts_what_is_off_by_a_constant() -> None:
    told = synthetic(2_000, 4, noise=0.0)
    head = QuantileHead(HIDDEN).eval()
    calibrate(head, told)
    quantiles = head(told.hidden, told.features, told.has_text)[:, 0]
    below = (told.targets[:, :1] <= quantiles).float().mean(dim=0)
    torch.testing.assert_close(below, torch.tensor([0.1, 0.5, 0.9]), atol=1e-3, rtol=0.0)


def test_calibration_knows_that_errors_are_another_after_more_steps() -> None:
    """Six steps and more halve the spread. Result: each holds what it
    says, and a band of which nothing was seen is shifted as all are."""
    early, late = synthetic(3_000, 5, noise=1.0), synthetic(3_000, 6, noise=0.5)
    late.features[:, TURN] = math.log1p(7)
    told = joined([early, late])
    told.targets[:] -= told.hidden[:, :1]  # noise alone
    head = QuantileHead(HIDDEN).eval()
    calibrate(head, told)
    assert band_of(told.features).unique().tolist() == [0, 3]
    quantiles = head(told.hidden, told.features, told.has_text)[:, 0]
    for rows in (slice(0, 3_000), slice(3_000, 6_000)):
        below = (told.targets[rows, :1] <= quantiles[rows]).float().mean(dim=0)
        torch.testing.assert_close(below, torch.tensor([0.1, 0.5, 0.9]), atol=0.05, rtol=0.0)
    shift = head.get_buffer("shift")
    assert torch.equal(shift[1], shift[2])
    assert bool((shift[1, :, 0] > shift[0, :, 0]).all() and (shift[1, :, 0] < shift[3, :, 0]).all())


def test_across_parts_each_prompt_judges_a_head_that_was_fitted_without_it() -> None:
    """Three parts that differ by a constant each. Result: calibrated by its own part alone, a head would miss the
    others' constants; across parts its spread holds them."""
    parts = []
    for number, offset in enumerate((-1.0, 0.0, 1.0)):
        part = synthetic(300, number)
        part.targets[:] += offset
        parts.append(part)
    alone, across = fit(joined(parts[:2]), parts[2], HIDDEN, QUICK), fit_across(parts, HIDDEN, QUICK)
    assert (alone.epoch, alone.loss) == (across.epoch, across.loss)
    new = joined([synthetic(300, 10 + number) for number in range(3)])
    new.targets[:] += torch.tensor([-1.0, 0.0, 1.0]).repeat_interleave(300)[:, None]

    def covered(head: QuantileHead) -> float:
        said = head(new.hidden, new.features, new.has_text)[:, 0]
        return float(((said[:, 0] <= new.targets[:, 0]) & (new.targets[:, 0] <= said[:, 2])).float().mean())

    assert abs(covered(across.head) - 0.8) < abs(covered(alone.head) - 0.8)
    assert abs(covered(across.head) - 0.8) < 0.1
    with pytest.raises(ValueError, match="parts must be >= 2"):
        fit_across(parts[:1], HIDDEN, QUICK)


def test_the_same_seed_gives_the_same_head() -> None:
    one, other = (fit(synthetic(200, 1), synthetic(50, 2), HIDDEN, QUICK).head.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_was_cut_costs_only_where_less_was_predicted() -> None:
    quantiles = torch.tensor([[[4.0, 5.0, 6.0]], [[4.0, 5.0, 6.0]]])
    targets = torch.tensor([[3.0], [7.0]])
    cut = torch.tensor([True, True])
    assert float(pinball(quantiles[:1], targets[:1], cut[:1])) == 0.0
    assert float(pinball(quantiles[1:], targets[1:], cut[1:])) == float(pinball(quantiles[1:], targets[1:], ~cut[1:]))


def test_too_few_examples_are_refused_by_name() -> None:
    with pytest.raises(TooFewError, match="3 validation examples, at least 8"):
        fit(synthetic(20, 0), synthetic(3, 0), HIDDEN)


def test_states_are_read_once_and_none_where_nothing_was_said(tmp_path: Path) -> None:
    backbone = Backbone.load(str(tiny_backbone(tmp_path)), device="cpu", dtype=torch.float32)
    spoken = Transcript(
        "a", "r", "p", 10, (Turn(5, 2, "first", "ok"), Turn(5, 2, "second", "ok"), Turn(5)), prompt="Do it"
    )
    silent = Transcript("b", "r", "q", 10, (Turn(5), Turn(5)))
    moments = replay([spoken, silent])
    read: list[int] = []

    def track(over: Iterable[int], count: int) -> Iterable[int]:
        read.append(count)
        return over

    states = States(backbone, [spoken, silent], Bounds())
    hidden, has_text = states.read(moments, track)
    again, _ = states.read(moments, track)

    assert read == [1, 0]
    assert has_text == [moment.index == 0 for moment in moments]
    assert torch.equal(hidden, again)
    ids = backbone.tokenize("Do it") + backbone.tokenize("first")
    (at,) = [at for at, moment in enumerate(moments) if (moment.index, moment.turn) == (0, 1)]
    torch.testing.assert_close(hidden[at], backbone.hidden(ids, [len(ids)])[0])
    told = examples(moments, hidden, has_text)
    assert len(told) == len(moments) and told.targets.shape == (5, 2)
