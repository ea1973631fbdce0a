"""Assemble the predictor."""

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from treadle.predictor.v1.predictor_pb2_grpc import add_PredictorServiceServicer_to_server
from treadle_core.ranking.estimator import Estimator, Prior
from treadle_core.ranking.evidence import Evidence
from treadle_runtime.errors import StartError
from treadle_runtime.server import Runtime, Wiring

from treadle_predictor.config import PredictorSettings
from treadle_predictor.convert import FACT_KINDS, LEARNED_FACT_KINDS
from treadle_predictor.facts import Learner
from treadle_predictor.history import HistoryStore
from treadle_predictor.metrics import Meters
from treadle_predictor.servicer import PredictorServicer

if TYPE_CHECKING:  # a service without a learned model needs no torch
    from treadle_predictor.learned import LearnedPart


async def wire(runtime: Runtime) -> Wiring:
    """Load the histories and the learned model, take in the facts that are kept, then serve.

    Raises StartError.
    """
    settings = cast(PredictorSettings, runtime.settings)
    evidence = Evidence()
    prior = Prior(
        settings.prior_median_tokens,
        settings.prior_sigma_tokens,
        settings.prior_median_turns,
        settings.prior_sigma_turns,
    )
    learned, tasks = await _load_learned(settings) if settings.models else (None, [])
    store = await HistoryStore.open(runtime.bus, evidence)
    meters = Meters(runtime.metrics)

    def on_end(trajectory_id: str, gen_tokens: int | None) -> None:
        meters.judge(trajectory_id, gen_tokens)
        if learned is not None:
            learned.worker.forget(trajectory_id)

    if learned is not None:
        learner = Learner(store, learned.recordings, learned.on_start, on_end)
    else:
        learner = Learner(store, on_end=on_end)
    # Not durable: the state is in memory, so each process takes in all kept facts from the first.
    await runtime.bus.subscribe(
        LEARNED_FACT_KINDS if learned else FACT_KINDS, learner.on_fact, replay=True
    )
    await runtime.bus.catch_up()
    servicer = PredictorServicer(evidence, Estimator(evidence, prior), learned, learner, meters)
    return Wiring(
        services={
            "treadle.predictor.v1.PredictorService": partial(
                add_PredictorServiceServicer_to_server, servicer
            )
        },
        tasks=[store.run, *tasks],
    )


async def _load_learned(
    settings: PredictorSettings,
) -> "tuple[LearnedPart, list[Callable[[], Coroutine[Any, Any, None]]]]":
    try:
        from treadle_predictor.learned import load_learned_part
    except ModuleNotFoundError as error:
        raise StartError(
            f"TREADLE_PREDICTOR_MODELS is set and {error.name} is not installed: pip install "
            "'treadle[learned]'"
        ) from error
    return await load_learned_part(settings, Path(settings.models))
