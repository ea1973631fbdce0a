"""The predictor as a process with a learned model: it answers from the texts that sidecars told,
versions are swapped under it, and whatever is wrong with a new one, the old one goes on."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import psutil
import pytest
from support.conditions import until, until_said
from support.learned_models import models_with, saved_version
from support.processes import StartService
from treadle.common.v1.tokens_pb2 import TokenIds
from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle_cli.predictor.transcripts import facts_of
from treadle_learned.backbone import Backbone
from treadle_learned.checkpoint import HEAD, POINTER, load
from treadle_learned.transcript import Transcript, Turn
from treadle_predictor.config import PredictorSettings
from treadle_predictor.wire import wire
from treadle_runtime.bus import Bus
from treadle_runtime.errors import StartError
from treadle_runtime.server import serving

CALL_S = 20.0
WITHIN_S = 60.0
ENDED = 64  # enough of them in each part of the split
PATIENT = {"TREADLE_PREDICTOR_DEADLINE_S": "20"}


class Asked:
    """A client of one predictor."""

    def __init__(self, stub: predictor_pb2_grpc.PredictorServiceAsyncStub) -> None:
        self._stub = stub

    async def of(
        self, trajectory: Transcript, turn: int, context: Iterable[int] = ()
    ) -> predictor_pb2.Prediction:
        """What it says after so many steps."""
        query = predictor_pb2.Query(
            trajectory_id=trajectory.trajectory_id,
            prompt_id=trajectory.prompt_id,
            turn=turn,
            gen_tokens=sum(each.gen_tokens for each in trajectory.turns[:turn]),
            context=TokenIds(int32_le=array("i", context).tobytes()),
        )
        request = predictor_pb2.PredictRemainingRequest(query=query)
        return (await self._stub.PredictRemaining(request, timeout=CALL_S)).prediction

    async def learned(self) -> predictor_pb2.LearnedModel:
        """What it says of the learned model."""
        info = await self._stub.GetModelInfo(predictor_pb2.GetModelInfoRequest(), timeout=CALL_S)
        assert info.HasField("learned")
        return info.learned

    async def until(
        self, holds: Callable[[predictor_pb2.LearnedModel], bool]
    ) -> predictor_pb2.LearnedModel:
        """Once that holds of it."""
        return await until_said(self.learned, holds, WITHIN_S)

    async def until_model(
        self, trajectory: Transcript, turn: int, context: Iterable[int] = ()
    ) -> predictor_pb2.Prediction:
        """What the learned model says, once it has heard of so many steps."""

        def is_its(prediction: predictor_pb2.Prediction) -> bool:
            return prediction.estimator == predictor_pb2.ESTIMATOR_MODEL

        return await until_said(lambda: self.of(trajectory, turn, context), is_its, WITHIN_S)


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[Asked]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Asked(predictor_pb2_grpc.PredictorServiceStub(channel))


def refitting(models: Path) -> list[psutil.Process]:
    """Refits of this folder that run."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"treadle_learned", str(models)} <= set(process.info["cmdline"] or ())
    ]


async def publish(bus: Bus, facts: Iterable[Fact]) -> None:
    for fact in facts:
        await bus.publish(fact)
    await bus.flush()


def transcript(name: str, turns: int = 3) -> Transcript:
    said = tuple(Turn(30 + at, 4, f"{name} does thing {at}", "done") for at in range(turns))
    return Transcript(name, "r", f"prompt of {name}", 20, said, prompt=f"do what {name} says")


async def test_it_answers_from_what_was_told_and_follows_the_pointer(
    start_service: StartService, bus: Bus, tmp_path: Path
) -> None:
    """One version answers; another is promoted, one that is broken, one that siblings beat, and a
    kill.

    Result: each answer names its version; the broken one is refused by name while the one before it
    answers; the one that does not lead is not asked; a process started anew answers the same.
    """
    models = models_with(tmp_path, "v1", "v2")
    tokenize = Backbone.load(str(tmp_path / "backbone"), device="cpu").tokenize
    env = {"TREADLE_PREDICTOR_MODELS": str(models.folder), **PATIENT}
    service = await start_service("treadle_predictor", env)
    one = transcript("one")
    async with asking(service.address) as asked:
        said = await asked.learned()
        assert (said.version, said.leads, said.refused) == ("v1", True, "")
        unheard = await asked.of(one, 0, tokenize(one.prompt))
        assert unheard.estimator == predictor_pb2.ESTIMATOR_PRIOR, "nobody has opened it"
        facts = list(facts_of(one, tokenize, close=False))
        await publish(bus, facts[:1])
        await asked.until_model(one, 0, tokenize(one.prompt))
        assert (await asked.of(one, 0)).estimator == predictor_pb2.ESTIMATOR_PRIOR, (
            "no word of it is known yet"
        )
        await publish(bus, facts[1:3])
        prediction = await asked.until_model(one, 2)
        assert prediction.model_version == "v1"

        models.promote("v2")
        await asked.until(lambda said: said.version == "v2")
        second = await asked.of(one, 2)
        assert second.model_version == "v2"
        assert second.remaining_tokens.p50 != prediction.remaining_tokens.p50

        saved_version(models.folder, "v3", backbone=str(tmp_path / "backbone"))
        (models.folder / "v3" / HEAD).write_bytes(b"half")
        (models.folder / POINTER).write_text("v3\n")
        said = await asked.until(lambda said: said.refused != "")
        assert "v3/head.safetensors: is not the file that was saved" in said.refused
        assert (said.version, (await asked.of(one, 2)).model_version) == ("v2", "v2")

        models.promote("v1")
        await asked.until(lambda said: said.version == "v1" and not said.refused)
        again = await asked.of(one, 2)
        assert again.remaining_tokens == prediction.remaining_tokens

    service.kill()
    service = await start_service("treadle_predictor", env)
    async with asking(service.address) as asked:
        assert (await asked.of(one, 2)).remaining_tokens == prediction.remaining_tokens

        saved_version(models.folder, "v4", backbone=str(tmp_path / "backbone"), chosen="siblings")
        models.promote("v4")
        said = await asked.until(lambda said: said.version == "v4")
        assert not said.leads
        assert (await asked.of(one, 2)).estimator == predictor_pb2.ESTIMATOR_PRIOR


async def test_a_model_that_is_late_is_not_waited_for_and_is_counted(
    start_service: StartService, bus: Bus, tmp_path: Path
) -> None:
    models = models_with(tmp_path, "v1")
    env = {"TREADLE_PREDICTOR_MODELS": str(models.folder), "TREADLE_PREDICTOR_DEADLINE_S": "0"}
    service = await start_service("treadle_predictor", env)
    one = transcript("one")
    await publish(
        bus,
        facts_of(
            one, Backbone.load(str(tmp_path / "backbone"), device="cpu").tokenize, close=False
        ),
    )
    async with asking(service.address) as asked:

        async def ask() -> tuple[predictor_pb2.Prediction, predictor_pb2.LearnedModel]:
            return await asked.of(one, 3), await asked.learned()

        prediction, _ = await until_said(ask, lambda said: said[1].late > 0, WITHIN_S)
        assert prediction.estimator == predictor_pb2.ESTIMATOR_PRIOR


async def test_a_tokenizer_that_is_not_there_ends_the_start_with_a_line(
    nats_url: str, tmp_path: Path
) -> None:
    models, tokenizer = str(tmp_path / "models"), str(tmp_path / "nothing")
    settings = PredictorSettings(
        listen="127.0.0.1:0", nats_url=nats_url, models=models, tokenizer=tokenizer
    )
    with pytest.raises(StartError, match=r"TREADLE_PREDICTOR_TOKENIZER=.* cannot be loaded"):
        async with serving(settings, wire):
            raise AssertionError("not reached")


@pytest.mark.timeout(300)  # four processes import torch, one after the other
async def test_it_learns_from_what_ended_and_a_kill_in_the_middle_costs_nothing(
    start_service: StartService, bus: Bus, tmp_path: Path
) -> None:
    """Rollouts end while a version answers; the service is killed as its refit begins, and started
    again.

    Result: the old version answers all along; in the end a refit is done, and the version that
    answers is one that is whole.
    """
    models = models_with(tmp_path, "v1", reads_text=False)
    env = {
        "TREADLE_PREDICTOR_MODELS": str(models.folder),
        "TREADLE_PREDICTOR_REFIT_EVERY": str(ENDED),
        **PATIENT,
    }
    service = await start_service("treadle_predictor", env)
    ended = [transcript(f"{number}", 2 + number % 7) for number in range(ENDED)]
    await publish(bus, (fact for each in ended for fact in facts_of(each, lambda text: [])))
    await until(lambda: refitting(models.folder), WITHIN_S, "a refit begins")
    service.kill()
    await until(lambda: not refitting(models.folder), WITHIN_S, "a refit ends with its service")
    assert models.current() == models.folder / "v1"

    service = await start_service("treadle_predictor", env)
    async with asking(service.address) as asked:
        said = await asked.learned()
        assert (said.version, said.harvested) == ("v1", ENDED)
        await until(lambda: "refitted" in service.stderr_text(), WITHIN_S)
        said = await asked.until(lambda said: models.current() == models.folder / said.version)
        assert not said.refused
        load(models.folder / said.version)
