"""The backbone: a real small Qwen3 with random weights, read at once, in parts, and several in one
run."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_backbone import HIDDEN, tiny_backbone
from treadle_learned.backbone import Backbone, fitting_dtype, read_together, runs
from treadle_learned.reading import Read
from treadle_learned.transcript import LearnedError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def backbone(folder: Path) -> Backbone:
    return Backbone.load(str(folder), device="cpu", dtype=torch.float32)


def test_states_after_a_prefix_are_those_of_the_prefix_alone(backbone: Backbone) -> None:
    ids = backbone.tokenize("1. read the file\n2. run the tests")
    after = backbone.hidden(ids, [3, 10, len(ids)])
    assert after.shape == (3, HIDDEN)
    torch.testing.assert_close(after[1], backbone.hidden(ids[:10], [10])[0])


def test_reading_on_gives_the_states_of_reading_at_once(backbone: Backbone) -> None:
    ids = backbone.tokenize("a plan, then one step, then another")
    at_once = backbone.hidden(ids, [6, 20, len(ids)])
    first, read = backbone.read_on(ids[:6], None)
    second, read = backbone.read_on(ids[:20], read)
    third, read = backbone.read_on(ids, read)
    torch.testing.assert_close(torch.stack([first, second, third]), at_once)
    assert read.ids == tuple(ids)


def test_reading_on_gives_the_same_from_whatever_beginning_is_shared(backbone: Backbone) -> None:
    """Of another context, of the whole of its own, of one that goes further, and none."""
    whole = "a plan, then one step, then another"
    ids = backbone.tokenize(whole)
    at_once = backbone.hidden(ids, [len(ids)])[0]
    for other in ("a plan, then nothing", whole, f"{whole}!", "no plan"):
        _, read = backbone.read_on(backbone.tokenize(other), None)
        state, read = backbone.read_on(ids, read)
        torch.testing.assert_close(state, at_once)
        assert read.ids == tuple(ids)


def test_a_copy_of_a_beginning_is_its_own(backbone: Backbone) -> None:
    ids = backbone.tokenize("a plan, then one step, then another")
    _, read = backbone.read_on(ids[:20], None)
    copy = read.beginning(8)
    backbone.read_on(ids, read)
    state, _ = backbone.read_on(ids, copy)
    torch.testing.assert_close(state, backbone.hidden(ids, [len(ids)])[0])


def test_the_fingerprint_is_of_the_model_and_its_tokenizer_not_of_the_place(
    backbone: Backbone, tmp_path: Path
) -> None:
    elsewhere = Backbone.load(str(tiny_backbone(tmp_path / "elsewhere")), device="cpu")
    wider = Backbone.load(str(tiny_backbone(tmp_path / "wider", vocabulary=300)), device="cpu")
    assert elsewhere.fingerprint == backbone.fingerprint != wider.fingerprint


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    folder = tiny_backbone(tmp_path / "small", vocabulary=100)
    with pytest.raises(LearnedError, match="has 257 tokens and the model embeds 100"):
        Backbone.load(str(folder), device="cpu")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(LearnedError, match=r"folder '.*nothing' cannot be loaded .*config\.json"):
        (tmp_path / "nothing").mkdir()
        Backbone.load(str(tmp_path / "nothing"), device="cpu")


@pytest.mark.parametrize(
    ("info", "dtype"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_tile\n", torch.bfloat16),
        ("Features\t: fp asimd bf16\n", torch.bfloat16),
        ("flags\t\t: fpu avx2\nmodel name\t: bf16\n", torch.float32),
        (None, torch.float32),
    ],
)
def test_a_processor_without_instructions_for_bf16_computes_in_float32(
    tmp_path: Path, info: str | None, dtype: torch.dtype
) -> None:
    if info is not None:
        (tmp_path / "cpuinfo").write_text(info)
    assert fitting_dtype("cpu", tmp_path / "cpuinfo") is dtype
    assert fitting_dtype("cuda", tmp_path / "cpuinfo") is torch.bfloat16


TEXT = "a plan, then one step, then another, and what the tool answered to it; then the end"


@given(lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=2, max_size=5))
@settings(max_examples=40, deadline=None)
def test_each_gets_the_state_that_it_would_get_alone(
    backbone: Backbone, lengths: list[tuple[int, int]]
) -> None:
    """`lengths`: tokens that were read before, and tokens more; twice over, so that what is left
    can be read on."""
    ids = backbone.tokenize(TEXT)
    before: list[Read | None] = [
        backbone.read_on(ids[at : at + done], None)[1] if done else None
        for at, (done, _) in enumerate(lengths)
    ]
    for _ in range(2):
        asked = []
        for at, (done, more) in enumerate(lengths):
            read = before[at]
            known = len(read.ids) if read is not None else done
            asked.append((ids[at : at + known + more], read))
        found = read_together(backbone, asked)
        alone = torch.stack([backbone.hidden(told, [len(told)])[0] for told, _ in asked])
        torch.testing.assert_close(
            torch.stack([state for state, _ in found]), alone, atol=1e-4, rtol=1e-4
        )
        before = [read for _, read in found]
        assert [read.ids for _, read in found] == [tuple(told) for told, _ in asked]


def test_of_several_one_that_begins_differently_is_read_from_the_start(backbone: Backbone) -> None:
    ids = backbone.tokenize(TEXT)
    reads = [backbone.read_on(ids[:10], None)[1] for _ in range(2)]
    found = read_together(backbone, [(ids[:20], reads[0]), (ids[5:15], reads[1])])
    torch.testing.assert_close(found[1][0], backbone.hidden(ids[5:15], [10])[0])


def test_the_size_of_a_cache_grows_with_what_is_read(backbone: Backbone) -> None:
    ids = backbone.tokenize(TEXT)
    sizes = [backbone.read_on(ids[:count], None)[1].size_bytes for count in (10, 20)]
    # layers, keys and values, heads, width, float32
    assert sizes[1] == 2 * sizes[0] == 10 * 2 * 2 * (2 * 2 * 8 * 4)


def test_who_has_little_to_read_is_not_padded_to_a_whole_window() -> None:
    assert runs([48, 300, 40, 32, 288]) == [[3, 2, 0], [4, 1]]
    assert runs([]) == []
    assert runs([5]) == [[0]]
