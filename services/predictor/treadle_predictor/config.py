"""Settings of the predictor, from environment variables TREADLE_PREDICTOR_<NAME>."""

from typing import Annotated, ClassVar

from pydantic import Field, field_validator, model_validator
from treadle_core.ranking.estimator import (
    PRIOR_MEDIAN_TOKENS,
    PRIOR_MEDIAN_TURNS,
    PRIOR_SIGMA_TOKENS,
    PRIOR_SIGMA_TURNS,
)
from treadle_runtime.config import OptionalFolder, Settings

FEWEST_TO_REFIT = 16

Median = Annotated[float, Field(gt=0, le=1e7)]  # tokens or turns; beyond any context
Sigma = Annotated[float, Field(gt=0, le=10)]  # in natural logarithms: 10 is a factor of 22,000
Wait = Annotated[float, Field(ge=0, le=60)]  # seconds
Count = Annotated[int, Field(ge=1)]


class PredictorSettings(Settings):
    """Settings of the predictor. The prior is its estimate before any trajectory has ended."""

    service: ClassVar[str] = "predictor"

    listen: str = "127.0.0.1:7402"
    prior_median_tokens: Median = PRIOR_MEDIAN_TOKENS
    prior_sigma_tokens: Sigma = PRIOR_SIGMA_TOKENS
    prior_median_turns: Median = PRIOR_MEDIAN_TURNS
    prior_sigma_turns: Sigma = PRIOR_SIGMA_TURNS
    # folder of versions of the learned model, `treadle predictor export`; empty: no learned model
    models: OptionalFolder = ""
    # the policy's tokenizer, folder or hub name, to decode the ids in facts; empty: the backbone's
    tokenizer: str = ""
    deadline_s: Wait = 0.6  # how long a question waits for the learned model before siblings answer
    gather_s: Wait = 0.005  # how long the first question of a batch waits for others
    most_batch: Count = 8  # questions in one run of the model
    # bytes of kept state of running trajectories, so that only a new step is read
    kept_bytes: Count = 2 * 1024**3
    threads: Count = 1  # processor threads for the model; more than free cores slow everything down
    # of a first refit, folder or hub name, while no version is in use; empty: numbers alone
    backbone: str = ""
    refit_every: int = 0  # ended trajectories from one refit to the next; 0: none

    @field_validator("refit_every")
    @classmethod
    def _is_none_or_enough(cls, value: int) -> int:
        if value and value < FEWEST_TO_REFIT:
            raise ValueError(f"0, or a number >= {FEWEST_TO_REFIT}: fewer teach nothing")
        return value

    @model_validator(mode="after")
    def _has_a_folder_for_refits(self) -> "PredictorSettings":
        if self.refit_every and not self.models:
            raise ValueError(
                "TREADLE_PREDICTOR_MODELS is needed (a folder) where REFIT_EVERY is set"
            )
        return self
