"""Answer questions by the best estimator that is ready: the learned model where it leads and is in time, else siblings,
history, the prior."""

from typing import TYPE_CHECKING

from treadle_core.ranking.estimator import FirstThatAnswers, Forecast, Progress
from treadle_core.ranking.evidence import Evidence

from treadle_predictor.worker import make_question

if TYPE_CHECKING:  # a service without a learned model needs no torch
    from treadle_predictor.learned import LearnedPart

# The fact of a step and the question after it travel at the same time; a fact that is later than this is taken as lost.
FACT_WITHIN_S = 0.1


class Forecaster:
    """learned: None where no models folder is given."""

    def __init__(self, evidence: Evidence, estimator: FirstThatAnswers, learned: "LearnedPart | None") -> None:
        self._evidence = evidence
        self._estimator = estimator
        self.learned = learned

    @property
    def model_leads(self) -> bool:
        """Whether the learned model is asked at all."""
        return self.learned is not None and self.learned.loader.leads

    def forecast_without_model(self, progress: Progress) -> Forecast:
        """An answer at once."""
        return self._estimator.estimate(progress)

    async def forecast(self, progress: Progress, context: list[int]) -> Forecast:
        """An answer within the model's deadline. context: the trajectory's token ids by its query, or none; they are
        the prompt before the first step."""
        learned = self.learned
        if learned is None or not learned.loader.leads:
            return self.forecast_without_model(progress)
        recordings = learned.recordings
        recording = await recordings.wait_for(progress.trajectory_id, progress.turn, FACT_WITHIN_S)
        forecast = self.forecast_without_model(progress)
        if recording is None:
            return forecast
        prompt = recordings.prompt_of(progress.prompt_id)
        if not prompt and not progress.turn and context:
            prompt = recordings.decode(context)
        question = make_question(progress, recording, forecast, self._evidence, prompt)
        return (await learned.worker.ask(question) if question is not None else None) or forecast
