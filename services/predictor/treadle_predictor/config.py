"""Settings of the predictor. Read once; environment variables are TREADLE_PREDICTOR_<NAME>."""

from typing import ClassVar

from pydantic import field_validator
from treadle_core.estimator import (
    PRIOR_MEDIAN_TOKENS,
    PRIOR_MEDIAN_TURNS,
    PRIOR_SIGMA_TOKENS,
    PRIOR_SIGMA_TURNS,
)
from treadle_runtime.config import Settings

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

    @field_validator("prior_median_tokens", "prior_median_turns")
    @classmethod
    def _is_a_median(cls, value: float) -> float:
        if not 0 < value <= LARGEST_MEDIAN:
            raise ValueError(f"a number > 0 and <= {LARGEST_MEDIAN:g}")
        return value

    @field_validator("prior_sigma_tokens", "prior_sigma_turns")
    @classmethod
    def _is_a_sigma(cls, value: float) -> float:
        if not 0 < value <= LARGEST_SIGMA:
            raise ValueError(f"a number > 0 and <= {LARGEST_SIGMA:g}")
        return value
