"""Puts the predictor together."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle_core.ranking.estimator import Prior, learned_from
from treadle_core.ranking.evidence import Evidence
from treadle_runtime.errors import StartError
from treadle_runtime.server import Runtime, Wiring

from treadle_predictor.asking import Asking, LearnedPart
from treadle_predictor.config import PredictorSettings
from treadle_predictor.convert import FACT_KINDS
from treadle_predictor.history import HistoryStore
from treadle_predictor.recordings import Learner
from treadle_predictor.servicer import PredictorServicer

SERVICE = predictor_pb2.DESCRIPTOR.services_by_name["PredictorService"].full_name


async def wire(runtime: Runtime) -> Wiring:
    """Load the histories and the learned model, hear the facts that are kept, then serve. Raises StartError."""
    settings = runtime.settings
    if not isinstance(settings, PredictorSettings):
        raise TypeError(f"expected PredictorSettings, got {type(settings).__name__}")
    evidence = Evidence()
    prior = Prior(
        settings.prior_median_tokens,
        settings.prior_sigma_tokens,
        settings.prior_median_turns,
        settings.prior_sigma_turns,
    )
    learned, tasks = await _learned(settings) if settings.models else (None, [])
    store = await HistoryStore.open(runtime.bus, evidence)
    learner = (
        Learner(store)
        if learned is None
        else Learner(store, learned.recordings, on_begun=learned.begun, on_ended=learned.worker.forget)
    )
    # No durable place: the state is in memory, so each process hears all facts that are kept from the first.
    await runtime.bus.subscribe(FACT_KINDS, learner.hear, replay=True)
    await runtime.bus.catch_up()
    servicer = PredictorServicer(evidence, Asking(evidence, learned_from(evidence, prior), learned), learner)
    return Wiring(
        services={SERVICE: lambda server: predictor_pb2_grpc.add_PredictorServiceServicer_to_server(servicer, server)},
        tasks=[store.run, *tasks],
    )


async def _learned(settings: PredictorSettings) -> tuple[LearnedPart, list[Callable[[], Coroutine[Any, Any, None]]]]:
    try:
        from treadle_predictor.learned import learned_part
    except ModuleNotFoundError as error:
        raise StartError(
            f"TREADLE_PREDICTOR_MODELS is set and {error.name} is not installed: pip install 'treadle[learned]'"
        ) from error
    return await learned_part(settings, Path(settings.models))
