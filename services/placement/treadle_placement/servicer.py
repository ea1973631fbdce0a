"""Answer PlacementService: convert the request, solve, convert the plan. Nothing is kept between
calls."""

import asyncio
import threading
import time
from typing import Any

from treadle.placement.v1 import placement_pb2 as pb
from treadle.placement.v1 import placement_pb2_grpc
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.candidates import reads_little
from treadle_core.placing.placement import plan
from treadle_runtime.telemetry import Metrics

from treadle_placement.convert import columns_of, engines_of, model_of, response_of

# From this size on a plan is made in a thread: a smaller one takes under 2 ms, about what the
# hand-over could cost.
LARGE_BYTES = 50_000  # a thousand trajectories in columns


# Of the time that a call has left when it comes, in which its search may go on; the rest is for the
# answer's way back.
SEARCH_SHARE = 0.5


class Limit:
    """Limit of a search by what it has read, by a time of time.monotonic(), or by `end`."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._ended = threading.Event()

    def end(self) -> None:
        """End the search, from any thread."""
        self._ended.set()

    def __call__(self, amounts: int) -> bool:
        if self._ended.is_set() or time.monotonic() >= self._until_s:
            return False
        return reads_little(amounts)


class PlacementServicer(placement_pb2_grpc.PlacementServiceServicer):
    """Servicer of PlacementService. `model` is the cost model of a request that names none, `curve`
    that of engines where none has a curve."""

    def __init__(self, model: CostModel, curve: DecodeCurve, metrics: Metrics) -> None:
        self._model = model
        self._curve = curve
        self._plan_s = metrics.seconds("plan", "What the solver took for a plan")
        self._placed = metrics.total("trajectories", "trajectory", "Trajectories of the plans")

    async def PlanPlacement(
        self, request: pb.PlanPlacementRequest, context: Any
    ) -> pb.PlanPlacementResponse:
        remaining_s = context.time_remaining()
        search_s = SEARCH_SHARE * remaining_s if remaining_s is not None else float("inf")
        limit = Limit(time.monotonic() + search_s)
        if request.ByteSize() < LARGE_BYTES:
            return self._solve(request, limit)
        try:
            return await asyncio.to_thread(self._solve, request, limit)
        finally:
            limit.end()  # where the caller has gone, its thread need not go on

    def _solve(self, request: pb.PlanPlacementRequest, limit: Limit) -> pb.PlanPlacementResponse:
        model = model_of(request, self._model)
        columns, engines = columns_of(request), engines_of(request, self._curve)
        began = time.perf_counter()
        found = plan(engines=engines, model=model, bound=True, goes_on=limit, **columns)
        took_s = time.perf_counter() - began
        self._plan_s(took_s)
        self._placed(len(columns["lengths"]))
        return response_of(request, found, took_s)
