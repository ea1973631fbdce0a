"""A policy whose weights move on while it is sampled: what its older samples came to is no longer what is to come."""

import numpy as np
import pytest
from treadle_learned.features import FEATURES
from treadle_learned.moments import Moment, replay
from treadle_learned.transcript import Transcript, Turn

BEHIND = FEATURES.index("versions_behind")


def asked(transcripts: list[Transcript]) -> list[Moment]:
    """Of the new samples, once the old ones have ended."""
    return replay(transcripts, asked=lambda turn: turn == 1)


@pytest.mark.parametrize(
    ("versions", "behind"),
    [(("3", "7"), 4.0), (("7", "3"), 0.0), (("", "7"), 0.0), (("3", ""), 0.0), (("step-3", "7"), 0.0)],
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
        return Transcript(f"{prompt}-{version}", "before", prompt, 9, (Turn(10),), weight_version=str(version))

    earlier = [ended("p", 2), ended("p", 4), ended("q", 6)]
    now = [Transcript(name, "now", name, 9, (Turn(20),), weight_version="8") for name in ("p", "other")]
    behind = [float(np.expm1(moment.features[BEHIND])) for moment in replay(now, earlier)]
    assert behind == pytest.approx([5.0, 4.0], rel=1e-5)
