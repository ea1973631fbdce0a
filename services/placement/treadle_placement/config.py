"""Settings of the placement service, read once from TREADLE_PLACEMENT_<NAME>."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator
from treadle_core.model import DEFAULT_BASE_S, DEFAULT_PER_SEQUENCE_S, DEFAULT_PREFILL_TOKENS_PER_S
from treadle_runtime.config import Settings

LARGEST_STEP_S = 3600.0  # a decode step of an hour is a mistake
LARGEST_PREFILL_TOKENS_PER_S = 1e12

CostModelName = Annotated[
    Literal["critical_path", "linear_integral", "group_size"], BeforeValidator(str.lower)
]
PartOfStep = Annotated[float, Field(ge=0, le=LARGEST_STEP_S)]


class PlacementSettings(Settings):
    """Settings of the placement service. The default curve is used where no engine of a request has
    a decode curve."""

    service: ClassVar[str] = "placement"
    uses_nats: ClassVar[bool] = False

    listen: str = "127.0.0.1:7403"
    cost_model: CostModelName = "critical_path"  # used where the request names none
    default_base_s: Annotated[float, Field(gt=0, le=LARGEST_STEP_S)] = DEFAULT_BASE_S
    default_per_sequence_s: PartOfStep = DEFAULT_PER_SEQUENCE_S
    default_per_kv_token_s: PartOfStep = 0.0
    default_prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S

    @field_validator("default_prefill_tokens_per_s")
    @classmethod
    def _is_a_rate(cls, value: float) -> float:
        if not (value == 0 or 1 <= value <= LARGEST_PREFILL_TOKENS_PER_S):
            raise ValueError("a number of tokens a second >= 1, or 0 to leave prefill out")
        return value
