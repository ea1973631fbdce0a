"""Who answers a question: the learned model where it leads and is in time, else siblings, history, the prior."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle_core.ranking.estimator import FirstThatAnswers, Forecast, Progress
from treadle_core.ranking.evidence import Evidence

from treadle_predictor.recordings import Recordings
from treadle_predictor.worker import Worker, question

if TYPE_CHECKING:  # a service without a learned model needs no torch
    from treadle_predictor.versions import ModelKeeper

# The fact of a step and the question after it are under way at the same time; later than this the fact is lost.
FACT_WITHIN_S = 0.1


@dataclass(frozen=True)
class LearnedPart:
    """What a predictor with a folder of models has beside the others."""

    keeper: "ModelKeeper"
    worker: Worker
    recordings: Recordings

    def begun(self, trajectory_id: str, prompt: str) -> None:
        """Its first step runs; a model that is asked reads the prompt meanwhile."""
        if self.keeper.leads:
            self.worker.begin(trajectory_id, prompt)


class Asking:
    """`learned`: None where no folder of models is given."""

    def __init__(self, evidence: Evidence, estimator: FirstThatAnswers, learned: LearnedPart | None) -> None:
        self._evidence = evidence
        self._estimator = estimator
        self.learned = learned

    @property
    def leads(self) -> bool:
        """Whether the learned model is asked at all."""
        return self.learned is not None and self.learned.keeper.leads

    def without_model(self, progress: Progress) -> Forecast:
        """At once."""
        return self._estimator.estimate(progress)

    async def forecast(self, progress: Progress, context: list[int]) -> Forecast:
        """Within the model's deadline. context: what the asker says the trajectory's context is, or nothing; read as
        the prompt before the first step."""
        learned = self.learned
        if learned is None or not learned.keeper.leads:
            return self.without_model(progress)
        recordings = learned.recordings
        recording = await recordings.until(progress.trajectory_id, progress.turn, FACT_WITHIN_S)
        forecast = self.without_model(progress)
        if recording is None:
            return forecast
        prompt = recordings.prompt_of(progress.prompt_id)
        if not prompt and not progress.turn and context:
            prompt = recordings.decode(context)
        asked = question(progress, recording, forecast, self._evidence, prompt)
        return (await learned.worker.ask(asked) if asked is not None else None) or forecast
