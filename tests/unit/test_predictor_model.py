"""The learned model as it serves: what training saw of a transcript, serving sees of the facts about it."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.learned_models import BOUNDS, random_head
from support.tiny_backbone import HIDDEN, tiny_backbone
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle_core.ranking.estimator import Prior, Progress, Source, learned_from
from treadle_core.ranking.evidence import Evidence
from treadle_learned.backbone import Backbone
from treadle_learned.checkpoint import Checkpoint
from treadle_learned.examples import States
from treadle_learned.moments import Moment, replay
from treadle_learned.transcript import Transcript, Turn
from treadle_predictor.convert import learn
from treadle_predictor.facts import Recordings
from treadle_predictor.model import LearnedModel
from treadle_predictor.worker import Question, make_question

from treadle_bench.predictor.facts import facts_of

MUCH = 1 << 30


def transcript(name: str, turns: int, rollout: str = "r1", prompt_id: str = "p") -> Transcript:
    return Transcript(
        f"{prompt_id}-{name}",
        rollout,
        prompt_id,
        30,
        tuple(
            Turn(20 + 7 * at, 5 + at, f"{name}: step {at} does this and that", f"tool said {at} times {name}")
            for at in range(turns)
        ),
        prompt=f"please do what {prompt_id} asks of you",
    )


EARLIER = [transcript("a", 3, "r0"), transcript("b", 9, "r0"), transcript("c", 2, "r1")]
ASKED = transcript("d", 8)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return Backbone.load(str(tiny_backbone(tmp_path_factory.mktemp("b"))), device="cpu", dtype=torch.float32)


def model_of(backbone: Backbone | None, most_bytes: int = MUCH) -> LearnedModel:
    return LearnedModel(Checkpoint("v1", "", "", HIDDEN, BOUNDS, random_head(), {}), backbone, most_bytes)


class Served:
    """A service's state, fed with facts."""

    def __init__(self, backbone: Backbone) -> None:
        self.evidence = Evidence()
        self.recordings = Recordings(backbone.tokenizer.decode)
        self.estimator = learned_from(self.evidence, Prior())

    def hear(self, fact: Fact) -> None:
        learn(self.evidence, fact)
        self.recordings.on_fact(fact)

    def asked(self, of: Transcript, turn: int, cap: int = 0) -> Question:
        gen = sum(each.gen_tokens for each in of.turns[:turn])
        observed = sum(each.obs_tokens for each in of.turns[: max(0, turn - 1)])
        progress = Progress(
            of.trajectory_id, of.prompt_id, turn, gen, of.prompt_tokens + gen + observed, of.prompt_tokens, cap
        )
        recording = self.recordings.get(of.trajectory_id, turn)
        assert recording is not None
        prompt = self.recordings.prompt_of(of.prompt_id)
        found = make_question(progress, recording, self.estimator.estimate(progress), self.evidence, prompt)
        assert found is not None
        return found


def questions(backbone: Backbone) -> Iterator[Question]:
    """Of the last trajectory, when the others have ended."""
    served = Served(backbone)
    for each in EARLIER:
        for fact in facts_of(each, backbone.tokenize):
            served.hear(fact)
    for turn, fact in enumerate(facts_of(ASKED, backbone.tokenize, close=False)):
        served.hear(fact)
        served.hear(fact)  # told again
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
def test_step_by_step_it_answers_what_it_would_at_once(backbone: Backbone, most_bytes: int, pieces_ahead: int) -> None:
    """Reading on from what is kept, from what was read ahead, all of it or some, and afresh where nothing can be kept;
    over more than one window."""
    model, wanted = model_of(backbone, most_bytes), expected(backbone)
    for served, row in zip(questions(backbone), wanted, strict=True):
        (forecast,) = model.answer([served])
        for _ in range(pieces_ahead):
            model.read_ahead()
        assert forecast is not None
        assert (forecast.source, forecast.model_version) == (Source.MODEL, "v1")
        tokens, turns = forecast.remaining_tokens, forecast.remaining_turns
        said = [[tokens.p10, tokens.p50, tokens.p90], [turns.p10, turns.p50, turns.p90]]
        torch.testing.assert_close(torch.tensor(said), row, rtol=1e-3, atol=1e-3)


def test_together_they_get_what_each_gets_alone(backbone: Backbone) -> None:
    served = Served(backbone)
    several = [transcript(name, turns, prompt_id=name) for name, turns in (("x", 1), ("y", 4), ("z", 6))]
    for each in several:
        for fact in facts_of(each, backbone.tokenize, close=False):
            served.hear(fact)
    asked = [served.asked(each, len(each.turns)) for each in several]
    alone = [model_of(backbone).answer([each])[0] for each in asked]
    for one, other in zip(model_of(backbone).answer(asked), alone, strict=True):
        assert one is not None and other is not None
        assert one.remaining_tokens.p50 == pytest.approx(other.remaining_tokens.p50, rel=1e-3)


def test_a_cap_bounds_the_forecast(backbone: Backbone) -> None:
    served = Served(backbone)
    for fact in list(facts_of(ASKED, backbone.tokenize, close=False))[:3]:
        served.hear(fact)
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
