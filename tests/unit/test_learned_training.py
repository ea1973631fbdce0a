"""Training: what it learns, and what it never looks at."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_backbone import tiny_backbone
from support.transcripts import told_by_the_plan
from treadle_learned import training
from treadle_learned.backbone import Backbone, Tune
from treadle_learned.checkpoint import Checkpoint, load
from treadle_learned.examples import Part, States, Track, draw, part_of, training_set
from treadle_learned.head import loss_of
from treadle_learned.moments import replay
from treadle_learned.training import Fitting, Training, Tuning, train
from treadle_learned.transcript import LearnedError, Transcript

QUICK = Training(
    "v1",
    fitting=Fitting(epochs=40, patience=15, learning_rate=5e-3),
    tuning=Tuning(epochs=2, windows=4, lora_rate=5e-3, full_rate=2e-3),
)
# something is left for a backbone to learn
FEW_HEAD_EPOCHS = replace(QUICK, fitting=replace(QUICK.fitting, epochs=4))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_backbone(tmp_path_factory.mktemp("backbone")))


def equal(one: Checkpoint, other: Checkpoint) -> bool:
    weights = one.head.state_dict(), other.head.state_dict()
    return (
        all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        and one.notes == other.notes
    )


def test_what_only_the_text_tells_is_learned_from_the_text(backbone: str, tmp_path: Path) -> None:
    found = train(told_by_the_plan(), replace(QUICK, backbone=backbone), tmp_path / "v1")
    losses = found.notes["validation"]
    assert losses["learned"] < 0.8 * min(losses["numbers"], losses["siblings"])
    assert found.notes["chosen"] == "learned" and found.leads and found.reads_text
    assert found.version == "v1" and [entry.name for entry in tmp_path.iterdir()] == ["v1"]
    assert found.load_backbone().fingerprint == found.fingerprint


def test_without_text_a_head_for_numbers_is_made_and_needs_no_backbone(tmp_path: Path) -> None:
    found = train(told_by_the_plan(text=False), replace(QUICK, backbone="nowhere"), tmp_path / "v1")
    assert not found.reads_text and found.backbone == found.fingerprint == ""
    assert set(found.notes["validation"]) == {"numbers", "siblings"}
    moments = replay(told_by_the_plan(4, text=False))
    assert len(found.examples(moments, told_by_the_plan(4, text=False))) == 16
    with pytest.raises(LearnedError, match="v1: reads no text, so it has no backbone"):
        found.load_backbone()


def test_who_is_not_better_than_the_siblings_does_not_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "loss_without_a_model", lambda moments: 0.0)
    found = train(told_by_the_plan(text=False), QUICK, tmp_path / "v1")
    assert found.notes["chosen"] == "siblings" and not found.leads


def test_test_prompts_change_nothing_and_no_prompt_is_in_two_parts(tmp_path: Path) -> None:
    transcripts = told_by_the_plan(text=False)
    tested = [each for each in transcripts if part_of(each.prompt_id) is Part.TEST]
    assert len(tested) > 5
    one = train(transcripts, QUICK, tmp_path / "one")
    other = train([each for each in transcripts if each not in tested], QUICK, tmp_path / "other")
    assert equal(one, other)
    asked = training_set(transcripts)
    parts = [
        {asked.transcripts[moment.index].prompt_id for moment in part}
        for part in (asked.train, asked.validation)
    ]
    assert not parts[0] & parts[1] and not (parts[0] | parts[1]) & {
        each.prompt_id for each in tested
    }


def test_what_was_cut_is_not_learned_as_short(tmp_path: Path) -> None:
    """Most of the long half was cut early. Result: who is told so expects more than who takes cuts
    for ends."""
    cut = told_by_the_plan(200, text=False, censored=True)
    said: dict[str, float] = {}
    for name, transcripts in (
        ("cut", cut),
        ("ended", [replace(each, censored=False) for each in cut]),
    ):
        found = train(transcripts, QUICK, tmp_path / name)
        asked = training_set(transcripts)
        found.head.get_buffer("shift").zero_()  # calibration leaves out what was cut
        begins = found.examples(
            [moment for moment in asked.validation if moment.turn == 0], asked.transcripts
        )
        with torch.inference_mode():
            said[name] = float(
                found.head(begins.hidden, begins.features, begins.has_text)[:, 0, 2].mean()
            )
        assert (found.notes["parts"]["train"]["censored"] > 0) == (name == "cut")
    assert said["cut"] > said["ended"] + 0.2


def test_a_training_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def stop(words: str) -> Track:
        raise KeyboardInterrupt(words)

    with pytest.raises(KeyboardInterrupt, match="numbers: epochs"):
        train(told_by_the_plan(text=False), QUICK, tmp_path / "v1", bar=stop)
    assert not list(tmp_path.iterdir())


def losses_of(checkpoint: Checkpoint, transcripts: list[Transcript]) -> float:
    asked = training_set(transcripts)
    backbone = checkpoint.load_backbone(device="cpu", dtype=torch.float32)
    states = States(backbone, asked.transcripts, checkpoint.bounds)
    head = checkpoint.head
    head.get_buffer("weight").fill_(1.0)
    head.get_buffer("shift").zero_()
    return loss_of(head, states.examples(asked.validation))  # of one member


@pytest.mark.parametrize(
    ("tune", "weights"),
    [(Tune.LORA, "adapter/adapter_model.safetensors"), (Tune.FULL, "backbone/model.safetensors")],
)
def test_a_trained_backbone_is_better_loads_as_it_was_and_is_refused_where_it_is_damaged(
    tune: Tune, weights: str, backbone: str, tmp_path: Path
) -> None:
    how = replace(FEW_HEAD_EPOCHS, backbone=backbone, tune=tune)
    transcripts = told_by_the_plan()
    found = train(transcripts, how, tmp_path / "v1")
    file = tmp_path / "v1" / weights
    assert found.tuned == file.parent and found.notes["tune_epoch"] >= 1
    assert found.load_backbone().fingerprint == Backbone.load(found.backbone).fingerprint, (
        "whatever was trained of it"
    )
    loss = found.notes["validation"]["learned"]
    assert loss < found.notes["frozen"]
    assert losses_of(load(tmp_path / "v1"), transcripts) == pytest.approx(loss, rel=1e-4)
    untouched = replace(load(tmp_path / "v1"), tuned=None)
    assert losses_of(untouched, transcripts) != pytest.approx(loss, rel=1e-4)
    whole = file.read_bytes()
    for damage in (whole[:-1], None):
        file.unlink() if damage is None else file.write_bytes(damage)
        with pytest.raises(LearnedError, match=rf"{file.name}: is not the file that was saved"):
            load(tmp_path / "v1")


def test_fewer_tuples_are_whole_trajectories_of_as_many_prompts_as_there_are() -> None:
    twice = told_by_the_plan(10) + [
        replace(each, trajectory_id=each.trajectory_id + "b") for each in told_by_the_plan(10)
    ]
    some = draw(twice, 0, 50)
    assert sum(len(each.turns) for each in some) == 48
    assert len({each.prompt_id for each in some}) == 10
    assert draw(twice, 0, 0) == twice


@pytest.mark.parametrize(
    ("how", "transcripts", "says"),
    [
        (
            QUICK,
            told_by_the_plan(3),
            "tuples of 3 prompts in all, at least 8 are needed: harvest more",
        ),
        (
            replace(QUICK, backbone="/nowhere"),
            told_by_the_plan(),
            "hub name '/nowhere' cannot be loaded",
        ),
        (replace(QUICK, tune=Tune.LORA), told_by_the_plan(), "tune: lora needs a backbone"),
        (
            replace(QUICK, backbone="b", tune=Tune.LORA),
            told_by_the_plan(text=False),
            "needs texts, and no transcript",
        ),
    ],
)
def test_what_cannot_be_trained_says_why(
    how: Training, transcripts: list[Transcript], says: str, tmp_path: Path
) -> None:
    with pytest.raises(LearnedError, match=says):
        train(transcripts, how, tmp_path / "v1")
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(LearnedError, match="is there already"):
        train(told_by_the_plan(text=False), QUICK, tmp_path)
