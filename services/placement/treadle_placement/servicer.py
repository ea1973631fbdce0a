"""PlacementService: validate, convert, solve, convert back. A pure question: nothing is kept between calls."""

import asyncio
import time
from typing import Any, TypeAlias

import grpc.aio
from treadle.placement.v1 import placement_pb2, placement_pb2_grpc
from treadle_core.model import DecodeCurve
from treadle_core.placing.costs import CostModel
from treadle_core.placing.placement import plan

from treadle_placement.convert import engines_of, model_of, response_of, trajectories_of

# From this size on a plan is made in a thread: below, it takes under 2 ms, about what handing it over could cost.
LARGE = 1_000  # trajectories and engines together

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class PlacementServicer(placement_pb2_grpc.PlacementServiceServicer):
    """`model` and `curve` are what a request that names none gets."""

    def __init__(self, model: CostModel, curve: DecodeCurve) -> None:
        self._model = model
        self._curve = curve

    async def PlanPlacement(
        self, request: placement_pb2.PlanPlacementRequest, context: Context
    ) -> placement_pb2.PlanPlacementResponse:
        if len(request.trajectories) + len(request.engines) >= LARGE:
            return await asyncio.to_thread(self._answer, request)
        return self._answer(request)

    def _answer(self, request: placement_pb2.PlanPlacementRequest) -> placement_pb2.PlanPlacementResponse:
        model = model_of(request, self._model)
        trajectories, engines = trajectories_of(request), engines_of(request, self._curve)
        began = time.perf_counter()
        found = plan(trajectories, engines, model)
        return response_of(found, time.perf_counter() - began)
