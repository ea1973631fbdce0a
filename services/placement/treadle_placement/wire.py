"""Puts the placement together."""

import asyncio

from treadle.placement.v1 import placement_pb2, placement_pb2_grpc
from treadle_core.model import DecodeCurve
from treadle_core.placing.costs import CostModel
from treadle_core.placing.placement import plan
from treadle_core.placing.question import PlanEngine, PlanTrajectory
from treadle_core.refusals import CoreError
from treadle_runtime.errors import ErrorTable, InvalidArgument
from treadle_runtime.server import Runtime, Wiring

from treadle_placement.config import PlacementSettings
from treadle_placement.servicer import PlacementServicer

SERVICE = placement_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name

# The core names the fields as the request does.
ERRORS: ErrorTable = {CoreError: lambda error: InvalidArgument(error.field, error.description)}


async def wire(runtime: Runtime) -> Wiring:
    """Compile or load the solver, then serve: the first caller must not wait for a compiler."""
    settings = runtime.settings
    if not isinstance(settings, PlacementSettings):
        raise TypeError(f"expected PlacementSettings, got {type(settings).__name__}")
    curve = DecodeCurve(
        settings.default_base_s,
        settings.default_per_sequence_s,
        settings.default_per_kv_token_s,
        settings.default_prefill_tokens_per_s,
    )
    await asyncio.to_thread(warm_up, curve)
    servicer = PlacementServicer(CostModel[settings.cost_model.upper()], curve)
    return Wiring(
        services={SERVICE: lambda server: placement_pb2_grpc.add_PlacementServiceServicer_to_server(servicer, server)},
        errors=ERRORS,
    )


def warm_up(curve: DecodeCurve) -> None:
    """One small plan under each cost model, for unlike engines of which one holds the trajectory: all kernels run."""
    engines = [PlanEngine("warm-up", 1, 0, 1, curve), PlanEngine("warm-up-too", 2, 0, 1, curve)]
    for model in CostModel:
        for log_sigma in (0.0, 0.5):
            plan([PlanTrajectory("warm-up", 1.0, 1, "warm-up", log_sigma)], engines, model)
