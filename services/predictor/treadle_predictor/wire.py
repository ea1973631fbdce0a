"""Puts the predictor together."""

from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle_core.estimator import Prior, learned_from
from treadle_core.evidence import Evidence
from treadle_runtime.server import Runtime, Wiring

from treadle_predictor.config import PredictorSettings
from treadle_predictor.convert import FACT_KINDS
from treadle_predictor.history_store import HistoryStore
from treadle_predictor.learner import Learner
from treadle_predictor.servicer import PredictorServicer

SERVICE = predictor_pb2.DESCRIPTOR.services_by_name["PredictorService"].full_name


async def wire(runtime: Runtime) -> Wiring:
    """Load the histories, hear the facts that are kept, then serve."""
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
    store = await HistoryStore.open(runtime.bus, evidence)
    learner = Learner(store)
    # No durable place: the state is in memory, so each process hears all facts that are kept from the first.
    await runtime.bus.subscribe(FACT_KINDS, learner.hear, replay=True)
    await runtime.bus.caught_up()
    servicer = PredictorServicer(evidence, learned_from(evidence, prior), learner)
    return Wiring(
        services={SERVICE: lambda server: predictor_pb2_grpc.add_PredictorServiceServicer_to_server(servicer, server)},
        tasks=[store.run],
    )
