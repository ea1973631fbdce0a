"""Settings of the placement. Read once; environment variables are TREADLE_PLACEMENT_<NAME>."""

from typing import ClassVar, Literal

from pydantic import field_validator
from treadle_core.model import DEFAULT_BASE_S, DEFAULT_PER_SEQUENCE_S, DEFAULT_PREFILL_TOKENS_PER_S
from treadle_runtime.config import Settings

LARGEST_STEP_S = 3600.0  # a decode step of an hour is a mistake
LARGEST_PREFILL_TOKENS_PER_S = 1e12


class PlacementSettings(Settings):
    """What the placement can be told. The default curve stands in where no engine of a request has one."""

    service: ClassVar[str] = "placement"

    listen: str = "127.0.0.1:7403"
    cost_model: Literal["linear_integral", "group_size"] = "linear_integral"  # where the request names none
    default_base_s: float = DEFAULT_BASE_S
    default_per_sequence_s: float = DEFAULT_PER_SEQUENCE_S
    default_per_kv_token_s: float = 0.0
    default_prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S

    @field_validator("cost_model", mode="before")
    @classmethod
    def _lower_case_model(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("default_base_s")
    @classmethod
    def _is_a_step(cls, value: float) -> float:
        if not 0 < value <= LARGEST_STEP_S:
            raise ValueError(f"a number of seconds > 0 and <= {LARGEST_STEP_S:g}")
        return value

    @field_validator("default_per_sequence_s", "default_per_kv_token_s")
    @classmethod
    def _is_a_part_of_a_step(cls, value: float) -> float:
        if not 0 <= value <= LARGEST_STEP_S:
            raise ValueError(f"a number of seconds >= 0 and <= {LARGEST_STEP_S:g}")
        return value

    @field_validator("default_prefill_tokens_per_s")
    @classmethod
    def _is_a_rate(cls, value: float) -> float:
        if not (value == 0 or 1 <= value <= LARGEST_PREFILL_TOKENS_PER_S):
            raise ValueError("a number of tokens a second >= 1, or 0 to leave prefill out")
        return value
