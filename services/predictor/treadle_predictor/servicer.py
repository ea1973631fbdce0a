"""Answer PredictorService by the best estimator that is ready: the learned model where it leads and
is in time, else siblings, history, the prior."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc.aio
from opentelemetry import propagate, trace
from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle_core.ranking.estimator import Estimator, Forecast, Progress, Source
from treadle_core.ranking.evidence import Evidence
from treadle_runtime.fields import number_of, require
from treadle_runtime.telemetry import SCOPE

from treadle_predictor.convert import context_of, prediction_of, progress_of
from treadle_predictor.facts import Learner
from treadle_predictor.metrics import Meters
from treadle_predictor.question import make_question

if TYPE_CHECKING:  # a service without a learned model needs no torch
    from treadle_predictor.learned import LearnedPart

MOST_QUERIES = 4_096
# Predictions made before other tasks run on the event loop; one takes from 40 us to 0.3 ms.
QUERIES_AT_ONCE = 128

# The fact of a step and the query after it travel at the same time; a fact that is later than this
# counts as lost.
FACT_WITHIN_S = 0.1

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class PredictorServicer(predictor_pb2_grpc.PredictorServiceServicer):
    """Servicer that answers from the facts so far; it waits for nothing but the learned model, and
    for that not long.

    learned: None where no models folder is given.
    """

    def __init__(
        self,
        evidence: Evidence,
        estimator: Estimator,
        learned: "LearnedPart | None",
        learner: Learner,
        meters: Meters,
    ) -> None:
        self._evidence = evidence
        self._estimator = estimator
        self._learned = learned
        self._learner = learner
        self._meters = meters

    async def PredictRemaining(
        self, request: predictor_pb2.PredictRemainingRequest, context: Context
    ) -> predictor_pb2.PredictRemainingResponse:
        require(request.HasField("query"), "query", "must be set")
        progress = progress_of(request.query, "query")
        began_s = time.monotonic()
        forecast = await self._forecast(progress, context_of(request.query))
        self._meters.record_answers(time.monotonic() - began_s, [progress], [forecast])
        return predictor_pb2.PredictRemainingResponse(
            prediction=prediction_of(progress.trajectory_id, forecast)
        )

    async def BatchPredictRemaining(
        self, request: predictor_pb2.BatchPredictRemainingRequest, context: Context
    ) -> predictor_pb2.BatchPredictRemainingResponse:
        count = len(request.queries)
        require(1 <= count <= MOST_QUERIES, "queries", f"must be 1 to {MOST_QUERIES}, are {count}")
        began_s, began_ns = time.monotonic(), time.time_ns()
        asked = [
            progress_of(query, f"queries[{index}]") for index, query in enumerate(request.queries)
        ]
        if self._learned is not None and self._learned.loader.leads:
            contexts = [context_of(query) for query in request.queries]
            forecasts = await asyncio.gather(*map(self._forecast, asked, contexts))
        else:
            forecasts = []
            for index, progress in enumerate(asked, start=1):
                forecasts.append(self._estimator.estimate(progress))
                if index % QUERIES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        self._meters.record_answers(time.monotonic() - began_s, asked, forecasts)
        _trace_queries(request.queries, began_ns)
        return predictor_pb2.BatchPredictRemainingResponse(
            predictions=[
                prediction_of(progress.trajectory_id, forecast)
                for progress, forecast in zip(asked, forecasts, strict=True)
            ]
        )

    async def GetModelInfo(
        self, request: predictor_pb2.GetModelInfoRequest, context: Context
    ) -> predictor_pb2.GetModelInfoResponse:
        leading = (
            self._learned.loader
            if self._learned is not None and self._learned.loader.leads
            else None
        )
        without_model = Source.SIBLINGS if self._evidence.closed_total else Source.PRIOR
        best = Source.MODEL if leading is not None else without_model
        version = f"{best.name.lower()}-{self._evidence.closed_total}"
        return predictor_pb2.GetModelInfoResponse(
            model_version=leading.version if leading is not None else version,
            best_estimator=number_of(best, predictor_pb2.Estimator),
            finished_trajectories=self._evidence.closed_total,
            known_prompts=self._evidence.known_prompts,
            updated_at=self._learner.updated_at,
            learned=_describe(self._learned) if self._learned is not None else None,
        )

    async def _forecast(self, progress: Progress, context: list[int]) -> Forecast:
        """Return an answer within the model's deadline.

        context: the trajectory's token ids by its query, or none; they are the prompt before the
        first step.
        """
        learned = self._learned
        if learned is None or not learned.loader.leads:
            return self._estimator.estimate(progress)
        recordings = learned.recordings
        recording = await recordings.wait_for(progress.trajectory_id, progress.turn, FACT_WITHIN_S)
        forecast = self._estimator.estimate(progress)
        if recording is None:
            return forecast
        prompt = recordings.prompt_of(progress.prompt_id)
        if not prompt and not progress.turn and context:
            prompt = recordings.decode(context)
        question = make_question(progress, recording, forecast, self._evidence, prompt)
        answer = await learned.worker.ask(question) if question is not None else None
        return replace(answer, turn_use=forecast.turn_use) if answer is not None else forecast


def _describe(part: "LearnedPart") -> predictor_pb2.LearnedModel:
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


def _trace_queries(queries: Iterable[predictor_pb2.Query], began_ns: int) -> None:
    """Send a span for each query of the present call, in the trace of its trajectory: one call has
    queries about many."""
    call = trace.get_current_span()
    if not call.is_recording():
        return
    tracer, links = trace.get_tracer(SCOPE), [trace.Link(call.get_span_context())]
    for query in queries:
        if query.traceparent:
            context = propagate.extract({"traceparent": query.traceparent})
            said: dict[str, str | int] = {
                "treadle.trajectory_id": query.trajectory_id,
                "treadle.turn": query.turn,
            }
            tracer.start_span(
                "predict", context, attributes=said, links=links, start_time=began_ns
            ).end()
