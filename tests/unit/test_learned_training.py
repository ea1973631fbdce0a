"""Training: what it learns, what it never looks at, and that an interruption changes nothing."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_backbone import tiny_backbone
from support.transcripts import told_by_the_plan
from treadle_learned import training
from treadle_learned.asking import told
from treadle_learned.backbone import Backbone
from treadle_learned.backbone_tuned import Tune
from treadle_learned.checkpoint import FORMAT, Checkpoint, backbone_of, load
from treadle_learned.epochs import Bar
from treadle_learned.errors import CheckpointError, LearnedError, TrainingError
from treadle_learned.examples import States, Track, examples
from treadle_learned.fitting import Fitting, loss_of
from treadle_learned.moments import replay
from treadle_learned.partial import Partial
from treadle_learned.questions import drawn, questions
from treadle_learned.split import Part, part_of
from treadle_learned.training import Training, train
from treadle_learned.transcript import Transcript
from treadle_learned.tuning import TuneHow

QUICK = Training(
    "v1",
    fitting=Fitting(epochs=40, patience=15, learning_rate=5e-3),
    tuning=TuneHow(epochs=2, windows=4, lora_rate=5e-3, full_rate=2e-3),
)
FEW_HEAD_EPOCHS = replace(QUICK, fitting=replace(QUICK.fitting, epochs=4))  # something is left for a backbone to learn


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_backbone(tmp_path_factory.mktemp("backbone")))


def equal(one: Checkpoint, other: Checkpoint) -> bool:
    weights = one.head.state_dict(), other.head.state_dict()
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]) and one.notes == other.notes


class KilledError(Exception):
    pass


def killed_at(words: str, after: int = 0) -> Bar:
    """Progress that raises once `words` has come to `after`."""

    def bar(said: str) -> Track:
        def track(over: Iterable[int], count: int) -> Iterable[int]:
            for number, each in enumerate(over):
                if said.startswith(words) and number >= after:
                    raise KilledError
                yield each

        return track

    return bar


def test_what_only_the_text_tells_is_learned_from_the_text(backbone: str, tmp_path: Path) -> None:
    found = train(told_by_the_plan(), replace(QUICK, backbone=backbone), tmp_path / "v1")
    losses = found.notes["validation"]
    assert losses["learned"] < 0.8 * min(losses["numbers"], losses["siblings"])
    assert found.notes["chosen"] == "learned" and found.leads and found.reads_text
    assert found.version == "v1" and [entry.name for entry in tmp_path.iterdir()] == ["v1"]
    assert backbone_of(found).fingerprint == found.fingerprint


def test_without_text_a_head_for_numbers_is_made_and_needs_no_backbone(tmp_path: Path) -> None:
    found = train(told_by_the_plan(text=False), replace(QUICK, backbone="nowhere"), tmp_path / "v1")
    assert not found.reads_text and found.backbone == found.fingerprint == ""
    assert set(found.notes["validation"]) == {"numbers", "siblings"}
    moments = replay(told_by_the_plan(4, text=False))
    assert len(told(found, moments, told_by_the_plan(4, text=False))) == 16
    with pytest.raises(CheckpointError, match="v1: reads no text, so it has no backbone"):
        backbone_of(found)


def test_who_is_not_better_than_the_siblings_does_not_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    asked = questions(transcripts)
    parts = [{asked.transcripts[moment.index].prompt_id for moment in part} for part in (asked.train, asked.validation)]
    assert not parts[0] & parts[1] and not (parts[0] | parts[1]) & {each.prompt_id for each in tested}


def test_what_was_cut_is_not_learned_as_short(tmp_path: Path) -> None:
    """Most of the long half was cut early. Result: who is told so expects more than who takes cuts for ends."""
    cut = told_by_the_plan(200, text=False, censored=True)
    said: dict[str, float] = {}
    for name, transcripts in (("cut", cut), ("ended", [replace(each, censored=False) for each in cut])):
        found = train(transcripts, QUICK, tmp_path / name)
        asked = questions(transcripts)
        found.head.get_buffer("shift").zero_()  # calibration leaves out what was cut
        begins = told(found, [moment for moment in asked.validation if moment.turn == 0], asked.transcripts)
        with torch.inference_mode():
            said[name] = float(found.head(begins.hidden, begins.features, begins.has_text)[:, 0, 2].mean())
        assert (found.notes["parts"]["train"]["censored"] > 0) == (name == "cut")
    assert said["cut"] > said["ended"] + 0.2


@pytest.mark.parametrize(("words", "after"), [("reading", 20), ("numbers: epochs", 3), ("learned: epochs", 7)])
def test_training_that_was_killed_goes_on_and_ends_the_same(
    words: str, after: int, backbone: str, tmp_path: Path
) -> None:
    how, partial = replace(QUICK, backbone=backbone), tmp_path / "partial"
    whole = train(told_by_the_plan(), how, tmp_path / "whole")
    with pytest.raises(KilledError):
        train(told_by_the_plan(), how, tmp_path / "v1", partial=partial, bar=killed_at(words, after))
    assert not (tmp_path / "v1").exists()
    read: dict[str, int] = {}

    def counted(said: str) -> Track:
        def track(over: Iterable[int], count: int) -> Iterable[int]:
            read[said] = count
            return over

        return track

    again = train(told_by_the_plan(), how, tmp_path / "v1", partial=partial, bar=counted)
    assert equal(whole, again) and not partial.exists()
    trajectories = sum(part["trajectories"] for part in whole.notes["parts"].values())
    assert read["reading"] == (
        trajectories - after if words == "reading" else trajectories if "numbers" in words else 0
    )
    assert words == "reading" or read[words] == QUICK.fitting.epochs - after


def test_other_transcripts_or_options_do_not_go_on_with_what_was_begun(tmp_path: Path) -> None:
    transcripts, partial = told_by_the_plan(text=False), tmp_path / "partial"
    with pytest.raises(KilledError):
        train(transcripts, QUICK, tmp_path / "v1", partial=partial, bar=killed_at("numbers: epochs", 2))
    for others, how, says in (
        (transcripts[:-1], QUICK, "begun there with another transcripts;"),
        (transcripts, replace(QUICK, seed=3, max_tuples=100), "begun there with another max_tuples, seed;"),
    ):
        with pytest.raises(TrainingError, match=says):
            train(others, how, tmp_path / "v1", partial=partial)
    (partial / "numbers.pt").write_bytes(b"PK")
    with pytest.raises(TrainingError, match=r"numbers\.pt: cannot be read .* to begin afresh"):
        train(transcripts, QUICK, tmp_path / "v1", partial=partial)


def test_what_was_begun_for_another_format_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transcripts, partial = told_by_the_plan(text=False), tmp_path / "partial"
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr("treadle_learned.training.FORMAT", FORMAT - 1)
        train(transcripts, QUICK, tmp_path / "v1", partial=partial, bar=killed_at("numbers: epochs", 2))
    with pytest.raises(TrainingError, match=r"begun there with another format; .* to begin afresh"):
        train(transcripts, QUICK, tmp_path / "v1", partial=partial)


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    transcripts, partial = told_by_the_plan(text=False), tmp_path / "partial"
    other = Partial(partial, {})
    with pytest.raises(TrainingError, match="another process is training there"):
        train(transcripts, QUICK, tmp_path / "v1", partial=partial)
    other.close()
    other.remove()
    train(transcripts, QUICK, tmp_path / "v1", partial=partial)


def losses_of(checkpoint: Checkpoint, transcripts: list[Transcript]) -> float:
    asked = questions(transcripts)
    states = States(backbone_of(checkpoint, device="cpu", dtype=torch.float32), asked.transcripts, checkpoint.bounds)
    head = checkpoint.head
    head.get_buffer("shift").zero_()
    return loss_of(head, examples(asked.validation, *states.read(asked.validation)))  # of one member


@pytest.mark.parametrize(("tune", "folder"), [(Tune.LORA, "adapter"), (Tune.FULL, "backbone")])
def test_a_trained_backbone_is_better_and_loads_as_it_was(
    tune: Tune, folder: str, backbone: str, tmp_path: Path
) -> None:
    how = replace(FEW_HEAD_EPOCHS, backbone=backbone, tune=tune)
    transcripts = told_by_the_plan()
    found = train(transcripts, how, tmp_path / "v1")
    assert found.tuned == tmp_path / "v1" / folder and found.notes["tune_epoch"] >= 1
    assert found.notes["validation"]["learned"] < found.notes["frozen"]
    assert losses_of(load(tmp_path / "v1"), transcripts) == pytest.approx(
        found.notes["validation"]["learned"], rel=1e-4
    )
    untouched = replace(load(tmp_path / "v1"), tuned=None)
    assert losses_of(untouched, transcripts) != pytest.approx(found.notes["validation"]["learned"], rel=1e-4)


def test_an_adapter_that_was_killed_between_epochs_ends_the_same(backbone: str, tmp_path: Path) -> None:
    how, partial = replace(FEW_HEAD_EPOCHS, backbone=backbone, tune=Tune.LORA), tmp_path / "partial"
    whole = train(told_by_the_plan(), how, tmp_path / "whole")
    with pytest.raises(KilledError):
        train(told_by_the_plan(), how, tmp_path / "v1", partial=partial, bar=killed_at("epoch 2: windows", 3))
    again = train(told_by_the_plan(), how, tmp_path / "v1", partial=partial)
    assert again.notes["tune_epoch"] >= 1 and equal(whole, again)


@pytest.fixture
def with_adapter(backbone: str, tmp_path: Path) -> Path:
    place = tiny_backbone(tmp_path / "backbone")
    how = replace(FEW_HEAD_EPOCHS, backbone=str(place), tune=Tune.LORA)
    assert train(told_by_the_plan(), how, tmp_path / "v1").tuned is not None
    return tmp_path


def test_a_damaged_adapter_is_refused_by_name(with_adapter: Path) -> None:
    weights = with_adapter / "v1" / "adapter" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for damage in (whole[:-1], None):
        weights.unlink() if damage is None else weights.write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: is not the file that was saved"):
            load(with_adapter / "v1")


def test_another_tokenizer_or_model_in_its_backbones_place_is_refused(with_adapter: Path) -> None:
    place = with_adapter / "backbone" / "tokenizer.json"
    tokenizer = json.loads(place.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["r"], vocabulary["t"] = vocabulary["t"], vocabulary["r"]
    place.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="is not the model and tokenizer that v1 was fitted"):
        backbone_of(load(with_adapter / "v1"))


def test_fewer_tuples_are_whole_trajectories_of_as_many_prompts_as_there_are() -> None:
    twice = told_by_the_plan(10) + [
        replace(each, trajectory_id=each.trajectory_id + "b") for each in told_by_the_plan(10)
    ]
    some = drawn(twice, 0, 50)
    assert sum(len(each.turns) for each in some) == 48
    assert len({each.prompt_id for each in some}) == 10
    assert drawn(twice, 0, 0) == twice


@pytest.mark.parametrize(
    ("how", "count", "says"),
    [
        (QUICK, 3, "tuples of 3 prompts in all, at least 8 are needed: harvest more"),
        (replace(QUICK, backbone="/nowhere"), 60, "hub name '/nowhere' cannot be loaded"),
        (replace(QUICK, tune=Tune.LORA), 60, "tune: lora needs a backbone"),
    ],
)
def test_what_cannot_be_trained_says_why(how: Training, count: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(LearnedError, match=says):
        train(told_by_the_plan(count), how, tmp_path / "v1", partial=tmp_path / "partial")
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    with pytest.raises(TrainingError, match="is there already"):
        train(told_by_the_plan(text=False), QUICK, tmp_path / "v1")


def test_texts_are_needed_to_train_a_backbone(backbone: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="needs texts, and no transcript has any"):
        train(told_by_the_plan(text=False), replace(QUICK, backbone=backbone, tune=Tune.LORA), tmp_path / "v1")


def test_a_backbone_has_one_fingerprint_whatever_was_trained_of_it(with_adapter: Path) -> None:
    found = load(with_adapter / "v1")
    assert backbone_of(found).fingerprint == Backbone.load(found.backbone).fingerprint
