"""PredictorService: validate, convert, ask the estimators, convert back."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc.aio
from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle_core.estimator import FirstThatAnswers, Progress, best_source
from treadle_core.evidence import Evidence
from treadle_runtime.fields import require

from treadle_predictor.convert import ESTIMATORS, prediction_of, progress_of
from treadle_predictor.learner import Learner

MOST_QUERIES = 4_096
# Predictions made before others get their turn on the event loop; one takes from 40 us to 0.3 ms.
QUERIES_AT_ONCE = 128

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class PredictorServicer(predictor_pb2_grpc.PredictorServiceServicer):
    """Answers from what the learner has heard so far; never waits for anything."""

    def __init__(self, evidence: Evidence, estimator: FirstThatAnswers, learner: Learner) -> None:
        self._evidence = evidence
        self._estimator = estimator
        self._learner = learner

    async def PredictRemaining(
        self, request: predictor_pb2.PredictRemainingRequest, context: Context
    ) -> predictor_pb2.PredictRemainingResponse:
        require(request.HasField("query"), "query", "must be set")
        return predictor_pb2.PredictRemainingResponse(
            prediction=self._predict([progress_of(request.query, "query")])[0]
        )

    async def BatchPredictRemaining(
        self, request: predictor_pb2.BatchPredictRemainingRequest, context: Context
    ) -> predictor_pb2.BatchPredictRemainingResponse:
        count = len(request.queries)
        require(1 <= count <= MOST_QUERIES, "queries", f"must be 1 to {MOST_QUERIES}, are {count}")
        asked = [progress_of(query, f"queries[{index}]") for index, query in enumerate(request.queries)]
        response = predictor_pb2.BatchPredictRemainingResponse()
        for first in range(0, count, QUERIES_AT_ONCE):
            response.predictions.extend(self._predict(asked[first : first + QUERIES_AT_ONCE]))
            await asyncio.sleep(0)
        return response

    async def GetModelInfo(
        self, request: predictor_pb2.GetModelInfoRequest, context: Context
    ) -> predictor_pb2.GetModelInfoResponse:
        best = best_source(self._evidence)
        return predictor_pb2.GetModelInfoResponse(
            model_version=f"{best.name.lower()}-{self._evidence.closed_total}",
            best_estimator=ESTIMATORS[best],
            finished_trajectories=self._evidence.closed_total,
            known_prompts=self._evidence.known_prompts,
            updated_at=self._learner.updated_at,
        )

    def _predict(self, asked: Sequence[Progress]) -> list[predictor_pb2.Prediction]:
        return [prediction_of(each.trajectory_id, self._estimator.estimate(each)) for each in asked]
