"""Assemble the placement service."""

import asyncio
from functools import partial
from typing import cast

import numpy as np
from treadle.placement.v1.placement_pb2_grpc import add_PlacementServiceServicer_to_server
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import plan
from treadle_core.placing.question import PlanEngine
from treadle_core.refusals import CoreError
from treadle_runtime.errors import InvalidArgument
from treadle_runtime.server import Runtime, Wiring

from treadle_placement.config import PlacementSettings
from treadle_placement.servicer import PlacementServicer


async def wire(runtime: Runtime) -> Wiring:
    """Compile or load the solver before serving, so that the first caller does not wait for a
    compiler."""
    settings = cast(PlacementSettings, runtime.settings)
    curve = DecodeCurve(
        settings.default_base_s,
        settings.default_per_sequence_s,
        settings.default_per_kv_token_s,
        settings.default_prefill_tokens_per_s,
    )
    await asyncio.to_thread(compile_kernels)
    servicer = PlacementServicer(CostModel[settings.cost_model.upper()], curve, runtime.metrics)
    return Wiring(
        services={
            "treadle.placement.v1.PlacementService": partial(
                add_PlacementServiceServicer_to_server, servicer
            )
        },
        # The core names the fields as the request does.
        errors={CoreError: lambda error: InvalidArgument(error.field, error.description)},
    )


def compile_kernels() -> None:
    """Run every kernel once: a small plan under each cost model, for unlike engines and
    trajectories."""
    curve = DecodeCurve()
    engines = [PlanEngine("some", 1, 0, 1, curve), PlanEngine("other", 2, 0, 1, curve)]
    ones, current, started = np.ones(2), np.zeros(2, np.int64), np.array([True, False])
    for model in CostModel:
        plan(ones, ones, current, engines, model, bound=True, log_sigma=0.5 * ones, started=started)
