"""What is read of trajectories before it is asked for: the same states, fewer ids left to read, bytes within bounds."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.learned_models import BOUNDS as NARROW
from support.tiny_backbone import tiny_backbone
from treadle_core.ranking.estimator import Progress
from treadle_learned.backbone import Backbone
from treadle_learned.moments import FEATURES
from treadle_learned.reading import Read, windows
from treadle_learned.transcript import Transcript, Turn
from treadle_predictor.model import READING_BYTES, Readings
from treadle_predictor.worker import Question

BOUNDS = replace(NARROW, window_tokens=128)
MUCH = 1 << 30
ID_BYTES = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, float32
TURNS = 20
HALF_FULL = 7  # turns after which two steps of the next window are known
HEAD = BOUNDS.prompt_tokens + BOUNDS.plan_tokens
STEP = BOUNDS.step_tokens + BOUNDS.obs_tokens


class Counting(Backbone):
    """Notes how many ids each run reads."""

    runs: list[int]

    def read_on(self, ids: Sequence[int], before: Read | None) -> tuple[torch.Tensor, Read]:
        known = before.usable_for(tuple(ids)) if before is not None else None
        self.runs.append(len(ids) - (len(known.ids) if known is not None else 0))
        return super().read_on(ids, before)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    plain = Backbone.load(str(tiny_backbone(tmp_path_factory.mktemp("b"))), device="cpu", dtype=torch.float32)
    return Counting(plain.name, plain.tokenizer, plain.model, plain.device)


@pytest.fixture(autouse=True)
def _none_yet(backbone: Counting) -> None:
    backbone.runs = []


def turns(name: str) -> tuple[Turn, ...]:
    return tuple(Turn(5, 5, f"{name} step {at} was this", f"said {at} {name}") for at in range(TURNS))


def asked(name: str, turn: int, prompt: str = "") -> Question:
    told = prompt or f"what {name} is to do and why"
    return Question(Progress(name, "p", turn), np.zeros(len(FEATURES), np.float32), told, turns(name)[:turn])


def at_once(backbone: Backbone, name: str) -> list[torch.Tensor]:
    """The state after each step, by one pass over each window as in training."""
    whole = Transcript(name, "r", "p", 10, turns(name), prompt=asked(name, 0).prompt)
    return [
        state
        for window in windows(whole, backbone.tokenize, BOUNDS)
        for state in backbone.hidden(window.ids, [end for _, end in window.ends])
    ]


def everything_ahead(readings: Readings) -> None:
    while readings.read_ahead():
        pass


def test_with_the_next_window_read_no_question_reads_more_than_its_step(backbone: Counting) -> None:
    """Over several windows. Without it some question reads half a window."""
    most = {}
    for ahead in (True, False):
        readings = Readings(backbone, BOUNDS, MUCH)
        readings.states([asked("a", 1)])
        backbone.runs.clear()
        most[ahead] = 0
        for turn in range(2, TURNS):
            readings.states([asked("a", turn)])
            most[ahead] = max(most[ahead], backbone.runs[-1])
            if ahead:
                everything_ahead(readings)
    assert most[True] == STEP < most[False]
    assert max(backbone.runs) <= most[False]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=20),
    st.integers(0, 3 * BOUNDS.window_tokens * ID_BYTES),
)
def test_states_are_those_of_reading_at_once_whatever_was_read_ahead(
    backbone: Counting, happens: list[tuple[str, int, int]], most_bytes: int
) -> None:
    """Two trajectories, some steps of which nobody asks about, pieces read ahead in between, and little room."""
    wanted = {name: at_once(backbone, name) for name in "ab"}
    readings, at = Readings(backbone, BOUNDS, most_bytes), {"a": 0, "b": 0}
    for name, steps, pieces in happens:
        at[name] = min(TURNS - 1, at[name] + steps)
        (state,) = readings.states([asked(name, at[name])])
        torch.testing.assert_close(state, wanted[name][at[name]], atol=1e-4, rtol=1e-4)
        for _ in range(pieces):
            readings.read_ahead()
        assert readings.kept_bytes <= most_bytes


def test_what_is_read_ahead_goes_before_what_is_kept(backbone: Counting) -> None:
    """Room for two windows and half of what is ahead of one. Result: both windows are kept, what was ahead is not."""
    window = HEAD + (HALF_FULL - 1) * STEP
    both_bytes = 2 * (READING_BYTES + window * ID_BYTES)
    readings = Readings(backbone, BOUNDS, both_bytes + STEP * ID_BYTES)
    readings.states([asked("a", HALF_FULL)])
    everything_ahead(readings)
    assert readings.kept_bytes == both_bytes // 2 + (HEAD + 2 * STEP) * ID_BYTES
    readings.states([asked("b", HALF_FULL)])
    assert readings.kept_bytes == both_bytes
    assert not readings.read_ahead(), "it would push a window out"


def test_one_that_ended_is_not_read_ahead(backbone: Counting) -> None:
    readings = Readings(backbone, BOUNDS, MUCH)
    readings.states([asked("a", HALF_FULL)])
    assert readings.read_ahead()
    readings.forget("a")
    assert readings.kept_bytes == 0
    assert not readings.read_ahead()


def test_a_prompt_that_was_read_while_the_first_step_ran_is_not_read_again(backbone: Counting) -> None:
    readings = Readings(backbone, BOUNDS, MUCH)
    readings.begin("a", asked("a", 0).prompt)
    readings.begin("a", asked("a", 0).prompt)
    everything_ahead(readings)
    wanted = at_once(backbone, "a")
    for turn, reads in enumerate((0, BOUNDS.plan_tokens, STEP)):
        backbone.runs.clear()
        (state,) = readings.states([asked("a", turn)])
        assert sum(backbone.runs) == reads
        torch.testing.assert_close(state, wanted[turn], atol=1e-4, rtol=1e-4)


def test_a_prompt_is_not_begun_where_there_is_no_room_for_it(backbone: Counting) -> None:
    readings = Readings(backbone, BOUNDS, 2 * READING_BYTES + HALF_FULL * STEP * ID_BYTES)
    readings.states([asked("a", HALF_FULL)])
    kept_bytes = readings.kept_bytes
    for name in "bcdefgh":
        readings.begin(name, asked(name, 0).prompt)
        everything_ahead(readings)
    assert readings.kept_bytes == kept_bytes


def test_samples_of_a_prompt_read_it_once(backbone: Counting) -> None:
    prompt = "a prompt that is long enough to be worth a copy"
    readings = Readings(backbone, BOUNDS, MUCH)
    readings.states([asked("a", 1, prompt)])
    readings.states([asked("b", 1, prompt)])
    assert backbone.runs == [HEAD, BOUNDS.plan_tokens]
    (state,) = readings.states([asked("c", 0, prompt)])
    alone = Readings(backbone, BOUNDS, MUCH).states([asked("c", 0, prompt)])[0]
    torch.testing.assert_close(state, alone, atol=1e-4, rtol=1e-4)
