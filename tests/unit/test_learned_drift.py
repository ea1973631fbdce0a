"""A policy whose weights move on while it is sampled: what its older samples came to is no longer
what is to come."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from treadle_learned.checkpoint import Checkpoint
from treadle_learned.examples import Part, split
from treadle_learned.head import loss_of
from treadle_learned.moments import FEATURES, Moment, replay
from treadle_learned.training import Fitting, Training, train
from treadle_learned.transcript import Transcript, Turn

HOW = Training("v1", fitting=Fitting(epochs=150, patience=30, batch=64, learning_rate=5e-3))
BEHIND = FEATURES.index("versions_behind")


def drifting(count: int = 150) -> list[Transcript]:
    """Of each prompt one sample of weights 10, and one of weights that are up to 3 versions newer,
    which goes on for twice as long with each. The prompt tells how long the old one is."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        length, moved = int(100 * np.exp(rng.normal(0, 1))), int(rng.integers(0, 4))
        left = int(length * 2.0**moved * np.exp(rng.normal(0, 0.1)))
        for name, turns, version in (
            ("old", (Turn(length),), 10),
            ("new", (Turn(length + 1), Turn(left)), 10 + moved),
        ):
            made.append(
                Transcript(
                    f"{name}{number}", "r", f"p{number}", length, turns, weight_version=str(version)
                )
            )
    return made


def asked(transcripts: list[Transcript]) -> list[Moment]:
    """Of the new samples, once the old ones have ended."""
    return replay(transcripts, asked=lambda turn: turn == 1)


def loss(checkpoint: Checkpoint, transcripts: list[Transcript]) -> float:
    return loss_of(checkpoint.head, checkpoint.examples(asked(transcripts), transcripts))


def test_a_head_knows_by_how_many_versions_its_siblings_are_behind(tmp_path: Path) -> None:
    known = drifting()
    unknown = [replace(each, weight_version="") for each in known]
    informed, other = (
        train(known, HOW, tmp_path / "known"),
        train(unknown, HOW, tmp_path / "unknown"),
    )
    tested = split(known)[Part.TEST]
    assert loss(informed, tested) < 0.8 * loss(other, split(unknown)[Part.TEST])
    question = informed.examples(asked(tested)[:1], tested)
    question.features[:, BEHIND] = 0.0
    now = informed.head(question.hidden, question.features, question.has_text)
    question.features[:, BEHIND] = float(np.log1p(3))
    later = informed.head(question.hidden, question.features, question.has_text)
    assert bool((later - now)[0, 0, 1] > np.log(2))


@pytest.mark.parametrize(
    ("versions", "behind"),
    [
        (("3", "7"), 4.0),
        (("7", "3"), 0.0),
        (("", "7"), 0.0),
        (("3", ""), 0.0),
        (("step-3", "7"), 0.0),
    ],
)
def test_the_distance_is_that_to_the_siblings_and_0_where_it_is_not_known(
    versions: tuple[str, str], behind: float
) -> None:
    old, new = versions
    (moment,) = asked(
        [
            Transcript("a", "r", "p", 9, (Turn(10),), weight_version=old),
            Transcript("b", "r", "p", 9, (Turn(20), Turn(20)), weight_version=new),
        ]
    )
    assert float(np.expm1(moment.features[BEHIND])) == pytest.approx(behind)


def test_without_siblings_it_is_that_to_earlier_samples_of_the_prompt_and_then_to_all() -> None:
    def ended(prompt: str, version: int) -> Transcript:
        return Transcript(
            f"{prompt}-{version}", "before", prompt, 9, (Turn(10),), weight_version=str(version)
        )

    earlier = [ended("p", 2), ended("p", 4), ended("q", 6)]
    now = [
        Transcript(name, "now", name, 9, (Turn(20),), weight_version="8") for name in ("p", "other")
    ]
    behind = [float(np.expm1(moment.features[BEHIND])) for moment in replay(now, earlier)]
    assert behind == pytest.approx([5.0, 4.0], rel=1e-5)
