"""Reading several trajectories in one run: each gets what it would get alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_backbone import tiny_backbone
from treadle_learned.backbone import Backbone
from treadle_learned.reading import Read
from treadle_learned.together import read_together, runs

TEXT = "a plan, then one step, then another, and what the tool answered to it; then the end"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return Backbone.load(str(tiny_backbone(tmp_path_factory.mktemp("b"))), device="cpu", dtype=torch.float32)


@given(lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=2, max_size=5))
@settings(max_examples=40, deadline=None)
def test_each_gets_the_state_that_it_would_get_alone(backbone: Backbone, lengths: list[tuple[int, int]]) -> None:
    """`lengths`: tokens that were read before, and tokens more; twice over, so that what is left can be read on."""
    ids = backbone.tokenize(TEXT)
    before: list[Read | None] = [
        backbone.read_on(ids[at : at + done], None)[1] if done else None for at, (done, _) in enumerate(lengths)
    ]
    for _ in range(2):
        asked = []
        for at, (done, more) in enumerate(lengths):
            read = before[at]
            known = len(read.ids) if read is not None else done
            asked.append((ids[at : at + known + more], read))
        found = read_together(backbone, asked)
        alone = torch.stack([backbone.hidden(told, [len(told)])[0] for told, _ in asked])
        torch.testing.assert_close(torch.stack([state for state, _ in found]), alone, atol=1e-4, rtol=1e-4)
        before = [read for _, read in found]
        assert [read.ids for _, read in found] == [tuple(told) for told, _ in asked]


def test_what_begins_differently_is_read_from_the_start(backbone: Backbone) -> None:
    ids = backbone.tokenize(TEXT)
    reads = [backbone.read_on(ids[:10], None)[1] for _ in range(2)]
    found = read_together(backbone, [(ids[:20], reads[0]), (ids[5:15], reads[1])])
    torch.testing.assert_close(found[1][0], backbone.hidden(ids[5:15], [10])[0])


def test_the_size_of_a_cache_grows_with_what_is_read(backbone: Backbone) -> None:
    ids = backbone.tokenize(TEXT)
    sizes = [backbone.read_on(ids[:count], None)[1].size_bytes for count in (10, 20)]
    assert sizes[1] == 2 * sizes[0] == 10 * 2 * 2 * (2 * 2 * 8 * 4)  # layers, keys and values, heads, width, float32


def test_who_has_little_to_read_is_not_padded_to_a_whole_window() -> None:
    assert runs([48, 300, 40, 32, 288]) == [[3, 2, 0], [4, 1]]
    assert runs([]) == []
    assert runs([5]) == [[0]]
