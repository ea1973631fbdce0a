"""PredictorService: validate, convert, ask the estimators, convert back."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeAlias

import grpc.aio
from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle_core.ranking.estimator import Forecast, Progress, Source, best_source
from treadle_core.ranking.evidence import Evidence
from treadle_runtime.errors import require

from treadle_predictor.convert import ESTIMATORS, context_of, prediction_of, progress_of
from treadle_predictor.facts import Learner
from treadle_predictor.forecaster import Forecaster

MOST_QUERIES = 4_096
# Predictions made before other tasks run on the event loop; one takes from 40 us to 0.3 ms.
QUERIES_AT_ONCE = 128

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class PredictorServicer(predictor_pb2_grpc.PredictorServiceServicer):
    """Answers from the facts so far; waits for nothing but the learned model, and for that not long."""

    def __init__(self, evidence: Evidence, forecaster: Forecaster, learner: Learner) -> None:
        self._evidence = evidence
        self._forecaster = forecaster
        self._learner = learner

    async def PredictRemaining(
        self, request: predictor_pb2.PredictRemainingRequest, context: Context
    ) -> predictor_pb2.PredictRemainingResponse:
        require(request.HasField("query"), "query", "must be set")
        progress = progress_of(request.query, "query")
        forecast = await self._forecaster.forecast(progress, context_of(request.query))
        return predictor_pb2.PredictRemainingResponse(prediction=prediction_of(progress.trajectory_id, forecast))

    async def BatchPredictRemaining(
        self, request: predictor_pb2.BatchPredictRemainingRequest, context: Context
    ) -> predictor_pb2.BatchPredictRemainingResponse:
        count = len(request.queries)
        require(1 <= count <= MOST_QUERIES, "queries", f"must be 1 to {MOST_QUERIES}, are {count}")
        asked = [progress_of(query, f"queries[{index}]") for index, query in enumerate(request.queries)]
        if self._forecaster.model_leads:
            contexts = [context_of(query) for query in request.queries]
            forecasts = await asyncio.gather(*map(self._forecaster.forecast, asked, contexts))
        else:
            forecasts = [forecast async for forecast in self._in_turns(asked)]
        return predictor_pb2.BatchPredictRemainingResponse(
            predictions=[
                prediction_of(progress.trajectory_id, forecast)
                for progress, forecast in zip(asked, forecasts, strict=True)
            ]
        )

    async def GetModelInfo(
        self, request: predictor_pb2.GetModelInfoRequest, context: Context
    ) -> predictor_pb2.GetModelInfoResponse:
        learned = self._learned()
        best = Source.MODEL if learned is not None and learned.leads else best_source(self._evidence)
        version = f"{best.name.lower()}-{self._evidence.closed_total}"
        return predictor_pb2.GetModelInfoResponse(
            model_version=learned.version if learned is not None and learned.leads else version,
            best_estimator=ESTIMATORS[best],
            finished_trajectories=self._evidence.closed_total,
            known_prompts=self._evidence.known_prompts,
            updated_at=self._learner.updated_at,
            learned=learned,
        )

    async def _in_turns(self, asked: Sequence[Progress]) -> AsyncIterator[Forecast]:
        for index, progress in enumerate(asked):
            yield self._forecaster.forecast_without_model(progress)
            if index % QUERIES_AT_ONCE == QUERIES_AT_ONCE - 1:
                await asyncio.sleep(0)

    def _learned(self) -> predictor_pb2.LearnedModel | None:
        part = self._forecaster.learned
        if part is None:
            return None
        counts = part.worker.counts
        return predictor_pb2.LearnedModel(
            version=part.loader.version,
            leads=part.loader.leads,
            refused=part.loader.refused,
            answered=counts.answered,
            late=counts.late,
            replaced=counts.replaced,
            harvested=len(part.recordings.ended),
        )
