"""The learned model at work: serving sees of facts what training saw of transcripts; what is read
is kept within bounds and read ahead."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.learned_models import BOUNDS, random_head
from support.tiny_backbone import HIDDEN, tiny_backbone
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle_cli.predictor.facts import facts_of
from treadle_core.ranking.estimator import Estimator, Prior, Progress, Source
from treadle_core.ranking.evidence import Evidence
from treadle_learned.backbone import Backbone
from treadle_learned.checkpoint import Checkpoint
from treadle_learned.examples import States
from treadle_learned.moments import FEATURES, Moment, replay
from treadle_learned.reading import Read, windows
from treadle_learned.transcript import Transcript, Turn
from treadle_predictor.convert import learn
from treadle_predictor.facts import Recordings
from treadle_predictor.model import READING_BYTES, LearnedModel, Readings
from treadle_predictor.question import Question, make_question

MUCH = 1 << 30


def transcript(name: str, turns: int, rollout: str = "r1", prompt_id: str = "p") -> Transcript:
    return Transcript(
        f"{prompt_id}-{name}",
        rollout,
        prompt_id,
        30,
        tuple(
            Turn(
                20 + 7 * at,
                5 + at,
                f"{name}: step {at} does this and that",
                f"tool said {at} times {name}",
            )
            for at in range(turns)
        ),
        prompt=f"please do what {prompt_id} asks of you",
    )


EARLIER = [transcript("a", 3, "r0"), transcript("b", 9, "r0"), transcript("c", 2, "r1")]
ASKED = transcript("d", 8)


class Counting(Backbone):
    """Notes how many ids each run reads."""

    runs: list[int]

    def read_on(self, ids: Sequence[int], before: Read | None) -> tuple[torch.Tensor, Read]:
        known = before.usable_for(tuple(ids)) if before is not None else None
        self.runs.append(len(ids) - (len(known.ids) if known is not None else 0))
        return super().read_on(ids, before)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    plain = Backbone.load(
        str(tiny_backbone(tmp_path_factory.mktemp("b"))), device="cpu", dtype=torch.float32
    )
    return Counting(plain.name, plain.tokenizer, plain.model, plain.device)


def model_of(backbone: Backbone | None, most_bytes: int = MUCH) -> LearnedModel:
    return LearnedModel(
        Checkpoint("v1", "", "", HIDDEN, BOUNDS, random_head(), {}), backbone, most_bytes
    )


class Served:
    """A service's state, fed with facts."""

    def __init__(self, backbone: Backbone) -> None:
        self.evidence = Evidence()
        self.recordings = Recordings(backbone.tokenizer.decode)
        self.estimator = Estimator(self.evidence, Prior())

    def hear(self, *facts: Fact) -> None:
        for fact in facts:
            learn(self.evidence, fact)
            self.recordings.on_fact(fact)

    def asked(self, of: Transcript, turn: int, cap: int = 0) -> Question:
        gen = sum(each.gen_tokens for each in of.turns[:turn])
        observed = sum(each.obs_tokens for each in of.turns[: max(0, turn - 1)])
        progress = Progress(
            of.trajectory_id,
            of.prompt_id,
            turn,
            gen,
            of.prompt_tokens + gen + observed,
            of.prompt_tokens,
            cap,
        )
        recording = self.recordings.get(of.trajectory_id, turn)
        assert recording is not None
        prompt = self.recordings.prompt_of(of.prompt_id)
        found = make_question(
            progress, recording, self.estimator.estimate(progress), self.evidence, prompt
        )
        assert found is not None
        return found


def questions(backbone: Backbone) -> Iterator[Question]:
    """Of the last trajectory, when the others have ended."""
    served = Served(backbone)
    for each in EARLIER:
        served.hear(*facts_of(each, backbone.tokenize))
    for turn, fact in enumerate(facts_of(ASKED, backbone.tokenize, close=False)):
        served.hear(fact, fact)  # told twice
        if turn < len(ASKED.turns):
            yield served.asked(ASKED, turn)


def trained_on() -> list[Moment]:
    return replay([ASKED], EARLIER)


def test_serving_asks_what_training_asked(backbone: Backbone) -> None:
    for served, moment in zip(questions(backbone), trained_on(), strict=True):
        np.testing.assert_allclose(served.features, moment.features, rtol=1e-6)
        assert served.progress.turn == moment.turn
        assert served.prompt == ASKED.prompt
        texts = [(turn.text, turn.obs_text) for turn in ASKED.turns[: moment.turn]]
        seen = [(turn.text, turn.obs_text) for turn in served.turns]
        assert [text for text, _ in seen] == [text for text, _ in texts]
        assert [said for _, said in seen[:-1]] == [said for _, said in texts[:-1]]


def expected(backbone: Backbone) -> torch.Tensor:
    moments = trained_on()
    told = States(backbone, [ASKED], BOUNDS).examples(moments)
    return torch.expm1(random_head()(told.hidden, told.features, told.has_text))


@pytest.mark.parametrize("most_bytes", [MUCH, 1])
@pytest.mark.parametrize("pieces_ahead", [0, 1, 100])
def test_step_by_step_it_answers_what_it_would_at_once(
    backbone: Backbone, most_bytes: int, pieces_ahead: int
) -> None:
    """Reading on from what is kept, from what was read ahead, all of it or some, and afresh where
    nothing can be kept; over more than one window."""
    model, wanted = model_of(backbone, most_bytes), expected(backbone)
    assert model.readings is not None
    for served, row in zip(questions(backbone), wanted, strict=True):
        (forecast,) = model.answer([served])
        for _ in range(pieces_ahead):
            model.readings.read_ahead()
        assert forecast is not None
        assert (forecast.source, forecast.model_version) == (Source.MODEL, "v1")
        tokens, turns = forecast.remaining_tokens, forecast.remaining_turns
        said = [[tokens.p10, tokens.p50, tokens.p90], [turns.p10, turns.p50, turns.p90]]
        torch.testing.assert_close(torch.tensor(said), row, rtol=1e-3, atol=1e-3)


def test_together_they_get_what_each_gets_alone(backbone: Backbone) -> None:
    served = Served(backbone)
    several = [
        transcript(name, turns, prompt_id=name) for name, turns in (("x", 1), ("y", 4), ("z", 6))
    ]
    for each in several:
        served.hear(*facts_of(each, backbone.tokenize, close=False))
    asked = [served.asked(each, len(each.turns)) for each in several]
    alone = [model_of(backbone).answer([each])[0] for each in asked]
    for one, other in zip(model_of(backbone).answer(asked), alone, strict=True):
        assert one is not None and other is not None
        assert one.remaining_tokens.p50 == pytest.approx(other.remaining_tokens.p50, rel=1e-3)


def test_a_cap_bounds_the_forecast(backbone: Backbone) -> None:
    served = Served(backbone)
    served.hear(*list(facts_of(ASKED, backbone.tokenize, close=False))[:3])
    gen = sum(turn.gen_tokens for turn in ASKED.turns[:2])
    (forecast,) = model_of(backbone).answer([served.asked(ASKED, 2, cap=gen + 3)])
    assert forecast is not None
    assert forecast.remaining_tokens.p90 == 3.0


def test_one_that_reads_text_says_nothing_before_there_is_any(backbone: Backbone) -> None:
    silent = Question(Progress("t", "p"), trained_on()[0].features, "", ())
    spoken = next(questions(backbone))
    answers = model_of(backbone).answer([silent, spoken])
    assert answers[0] is None and answers[1] is not None
    assert model_of(None).answer([silent])[0] is not None


WIDE = replace(BOUNDS, window_tokens=128)
ID_BYTES = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, float32
TURNS = 20
HALF_FULL = 7  # turns after which two steps of the next window are known
HEAD = WIDE.prompt_tokens + WIDE.plan_tokens
STEP = WIDE.step_tokens + WIDE.obs_tokens


@pytest.fixture(autouse=True)
def _none_yet(backbone: Counting) -> None:
    backbone.runs = []


def turns(name: str) -> tuple[Turn, ...]:
    return tuple(
        Turn(5, 5, f"{name} step {at} was this", f"said {at} {name}") for at in range(TURNS)
    )


def asked(name: str, turn: int, prompt: str = "") -> Question:
    told = prompt or f"what {name} is to do and why"
    return Question(
        Progress(name, "p", turn), np.zeros(len(FEATURES), np.float32), told, turns(name)[:turn]
    )


def at_once(backbone: Backbone, name: str) -> list[torch.Tensor]:
    """The state after each step, by one pass over each window as in training."""
    whole = Transcript(name, "r", "p", 10, turns(name), prompt=asked(name, 0).prompt)
    return [
        state
        for window in windows(whole, backbone.tokenize, WIDE)
        for state in backbone.hidden(window.ids, [end for _, end in window.ends])
    ]


def everything_ahead(readings: Readings) -> None:
    while readings.read_ahead():
        pass


def test_with_the_next_window_read_no_question_reads_more_than_its_step(backbone: Counting) -> None:
    """Over several windows. Without it some question reads half a window."""
    most = {}
    for ahead in (True, False):
        readings = Readings(backbone, WIDE, MUCH)
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
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(0, 4)),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 3 * WIDE.window_tokens * ID_BYTES),
)
def test_states_are_those_of_reading_at_once_whatever_was_read_ahead(
    backbone: Counting, happens: list[tuple[str, int, int]], most_bytes: int
) -> None:
    """Two trajectories, some steps of which nobody asks about, pieces read ahead in between, and
    little room."""
    wanted = {name: at_once(backbone, name) for name in "ab"}
    readings, at = Readings(backbone, WIDE, most_bytes), {"a": 0, "b": 0}
    for name, steps, pieces in happens:
        at[name] = min(TURNS - 1, at[name] + steps)
        (state,) = readings.states([asked(name, at[name])])
        torch.testing.assert_close(state, wanted[name][at[name]], atol=1e-4, rtol=1e-4)
        for _ in range(pieces):
            readings.read_ahead()
        assert readings.kept_bytes <= most_bytes


def test_what_is_read_ahead_goes_before_what_is_kept(backbone: Counting) -> None:
    """Room for two windows and half of what is ahead of one. Result: both windows are kept, what
    was ahead is not."""
    window = HEAD + (HALF_FULL - 1) * STEP
    both_bytes = 2 * (READING_BYTES + window * ID_BYTES)
    readings = Readings(backbone, WIDE, both_bytes + STEP * ID_BYTES)
    readings.states([asked("a", HALF_FULL)])
    everything_ahead(readings)
    assert readings.kept_bytes == both_bytes // 2 + (HEAD + 2 * STEP) * ID_BYTES
    readings.states([asked("b", HALF_FULL)])
    assert readings.kept_bytes == both_bytes
    assert not readings.read_ahead(), "it would push a window out"


def test_one_that_ended_is_not_read_ahead(backbone: Counting) -> None:
    readings = Readings(backbone, WIDE, MUCH)
    readings.states([asked("a", HALF_FULL)])
    assert readings.read_ahead()
    readings.forget("a")
    assert readings.kept_bytes == 0
    assert not readings.read_ahead()


def test_a_prompt_that_was_read_while_the_first_step_ran_is_not_read_again(
    backbone: Counting,
) -> None:
    readings = Readings(backbone, WIDE, MUCH)
    readings.begin("a", asked("a", 0).prompt)
    readings.begin("a", asked("a", 0).prompt)
    everything_ahead(readings)
    wanted = at_once(backbone, "a")
    for turn, reads in enumerate((0, WIDE.plan_tokens, STEP)):
        backbone.runs.clear()
        (state,) = readings.states([asked("a", turn)])
        assert sum(backbone.runs) == reads
        torch.testing.assert_close(state, wanted[turn], atol=1e-4, rtol=1e-4)


def test_a_prompt_is_not_begun_where_there_is_no_room_for_it(backbone: Counting) -> None:
    readings = Readings(backbone, WIDE, 2 * READING_BYTES + HALF_FULL * STEP * ID_BYTES)
    readings.states([asked("a", HALF_FULL)])
    kept_bytes = readings.kept_bytes
    for name in "bcdefgh":
        readings.begin(name, asked(name, 0).prompt)
        everything_ahead(readings)
    assert readings.kept_bytes == kept_bytes


def test_samples_of_a_prompt_read_it_once(backbone: Counting) -> None:
    prompt = "a prompt that is long enough to be worth a copy"
    readings = Readings(backbone, WIDE, MUCH)
    readings.states([asked("a", 1, prompt)])
    readings.states([asked("b", 1, prompt)])
    assert backbone.runs == [HEAD, WIDE.plan_tokens]
    (state,) = readings.states([asked("c", 0, prompt)])
    alone = Readings(backbone, WIDE, MUCH).states([asked("c", 0, prompt)])[0]
    torch.testing.assert_close(state, alone, atol=1e-4, rtol=1e-4)
