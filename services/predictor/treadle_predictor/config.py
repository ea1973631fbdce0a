"""Settings of the predictor. Read once; environment variables are TREADLE_PREDICTOR_<NAME>."""

from pathlib import Path
from typing import ClassVar

from pydantic import field_validator, model_validator
from treadle_core.ranking.estimator import (
    PRIOR_MEDIAN_TOKENS,
    PRIOR_MEDIAN_TURNS,
    PRIOR_SIGMA_TOKENS,
    PRIOR_SIGMA_TURNS,
)
from treadle_runtime.config import Settings

LONGEST_WAIT_S = 60.0
FEWEST_TO_REFIT = 16
LARGEST_SIGMA = 10.0  # of a natural logarithm: a factor of 22,000; beyond is a mistake
LARGEST_MEDIAN = 1e7  # tokens or turns; beyond any context


class PredictorSettings(Settings):
    """What the predictor can be told. The prior is what it says before it has seen any trajectory end."""

    service: ClassVar[str] = "predictor"

    listen: str = "127.0.0.1:7402"
    prior_median_tokens: float = PRIOR_MEDIAN_TOKENS
    prior_sigma_tokens: float = PRIOR_SIGMA_TOKENS  # of the natural logarithm
    prior_median_turns: float = PRIOR_MEDIAN_TURNS
    prior_sigma_turns: float = PRIOR_SIGMA_TURNS
    models: str = ""  # folder of versions of the learned model, `treadle predictor export`; empty: none is asked
    tokenizer: str = ""  # of the policy, folder or hub name, to read what sidecars tell; empty: the backbone's
    deadline_s: float = 0.6  # how long a question waits for the learned model before siblings answer
    gather_s: float = 0.005  # how long the first question of a batch waits for others
    most_batch: int = 8  # questions in one run of the model
    kept_bytes: int = 2 * 1024**3  # of what was read of running trajectories, so that only a new step is read
    threads: int = 1  # of the processor, for the model; more of them than free cores make everybody slow
    backbone: str = ""  # of a first refit, folder or hub name, while no version is in use; empty: numbers alone
    refit_every: int = 0  # ended trajectories from one refit to the next; 0: none

    @field_validator("prior_median_tokens", "prior_median_turns")
    @classmethod
    def _is_a_median(cls, value: float) -> float:
        if not 0 < value <= LARGEST_MEDIAN:
            raise ValueError(f"a number > 0 and <= {LARGEST_MEDIAN:g}")
        return value

    @field_validator("deadline_s", "gather_s")
    @classmethod
    def _is_some_seconds(cls, value: float) -> float:
        if not 0 <= value <= LONGEST_WAIT_S:
            raise ValueError(f"a number of seconds >= 0 and <= {LONGEST_WAIT_S:g}")
        return value

    @field_validator("most_batch", "threads", "kept_bytes")
    @classmethod
    def _is_a_count(cls, value: int) -> int:
        if value < 1:
            raise ValueError("a number >= 1")
        return value

    @field_validator("refit_every")
    @classmethod
    def _is_none_or_enough(cls, value: int) -> int:
        if value and value < FEWEST_TO_REFIT:
            raise ValueError(f"0, or a number >= {FEWEST_TO_REFIT}: fewer teach nothing")
        return value

    @field_validator("models")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        if value and not Path(value).is_absolute():
            raise ValueError("an absolute path")
        return value

    @model_validator(mode="after")
    def _has_where_to_put_refits(self) -> "PredictorSettings":
        if self.refit_every and not self.models:
            raise ValueError("TREADLE_PREDICTOR_MODELS is needed (a folder) where REFIT_EVERY is set")
        return self

    @field_validator("prior_sigma_tokens", "prior_sigma_turns")
    @classmethod
    def _is_a_sigma(cls, value: float) -> float:
        if not 0 < value <= LARGEST_SIGMA:
            raise ValueError(f"a number > 0 and <= {LARGEST_SIGMA:g}")
        return value
