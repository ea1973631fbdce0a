"""The policy's weights move on: which version sampled a trajectory, and by how many its siblings are behind."""

from typing import Any, cast

import pytest
from treadle.engine.v1.engine_pb2 import EngineInfo
from treadle.telemetry.v1 import facts_pb2
from treadle_core.ranking.estimator import Prior, Progress, learned_from
from treadle_core.ranking.evidence import Ended, Evidence
from treadle_learned.moments import FEATURES
from treadle_learned.transcript import Transcript, Turn
from treadle_predictor.facts import Learner, Recordings
from treadle_predictor.history import HistoryStore, decode, encode
from treadle_predictor.worker import make_question
from treadle_runtime.facts import make_fact

from treadle_bench.predictor.facts import facts_of

BEHIND = FEATURES.index("versions_behind")


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def updated(version: str) -> facts_pb2.Fact:
    return make_fact("sidecar/e0", weights_updated=facts_pb2.WeightsUpdated(engine_id="e0", weight_version=version))


def joined(version: str) -> facts_pb2.Fact:
    info = EngineInfo(engine_id="e0", weight_version=version)
    return make_fact("scheduler", engine_joined=facts_pb2.EngineJoined(info=info))


def told(name: str) -> list[facts_pb2.Fact]:
    return list(facts_of(Transcript(name, "r", "p", 12, (Turn(10, 4, "look", "4 files"), Turn(5, 0, "done"))), letters))


class Heard:
    """A learner that keeps its histories nowhere."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self.recordings = Recordings(lambda ids: "".join(map(chr, ids)))
        self._learner = Learner(HistoryStore(cast("Any", None), self.evidence), self.recordings)

    async def hear(self, *facts: facts_pb2.Fact) -> None:
        for fact in facts:
            await self._learner.on_fact(fact)

    def behind(self, name: str) -> float:
        recording = self.recordings.get(name, 1)
        assert recording is not None
        progress = Progress(name, "p", 1, 10, 26, 12)
        estimator = learned_from(self.evidence, Prior(100.0, 1.0, 3.0, 1.0))
        asked = make_question(progress, recording, estimator.estimate(progress), self.evidence, "")
        assert asked is not None
        return float(asked.features[BEHIND])


async def test_a_trajectory_is_of_the_version_that_it_was_opened_under() -> None:
    heard = Heard()
    opened, *rest = told("one")
    await heard.hear(joined("3"), opened, updated("4"), *rest)
    await heard.hear(*told("two"))
    assert [each.weight_version for each in heard.recordings.ended] == ["3", "4"]
    assert [each.weight_version for each in heard.evidence.ended_of_prompt("p")] == [3, 4]


async def test_an_engine_that_joins_later_says_nothing_new() -> None:
    heard = Heard()
    await heard.hear(joined("3"), updated("4"), joined("3"), *told("one"))
    assert [each.weight_version for each in heard.recordings.ended] == ["4"]


async def test_a_question_says_how_far_the_siblings_are_behind() -> None:
    heard = Heard()
    await heard.hear(joined("2"), *told("one"), updated("5"), *told("two")[:2])
    assert heard.behind("two") == pytest.approx(1.386, abs=1e-3)  # ln(1 + 3)


@pytest.mark.parametrize("version", ["", "step-5"])
async def test_versions_without_a_number_are_no_distance(version: str) -> None:
    heard = Heard()
    await heard.hear(joined("2"), *told("one"), updated(version), *told("two")[:2])
    assert heard.behind("two") == 0.0


def test_histories_keep_the_version_and_those_that_were_kept_without_it_are_read() -> None:
    ended = [Ended("t", "r", "p", 30, 2, True, 7), Ended("u", "r", "p", 40, 3, False)]
    assert decode(encode("p", ended)) == ("p", ended)
    old = b'{"prompt_id": "p", "ended": [["t", "r", 30, 2, true]]}'
    assert decode(old) == ("p", [Ended("t", "r", "p", 30, 2, True)])
