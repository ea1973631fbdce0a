"""Settings of the rollout service. Read once; environment variables are TREADLE_ROLLOUT_<NAME>."""

from typing import ClassVar

from pydantic import field_validator
from treadle_runtime.config import Settings

DEFAULT_BATCH_REPLAY_S = 3600.0  # as long as request records live: a trainer that retries later than that has restarted
DEFAULT_RETENTION_S = 7 * 86400.0  # a rollout nobody touched for a week belongs to a job that is gone


class RolloutSettings(Settings):
    """What the rollout service can be told."""

    service: ClassVar[str] = "rollout"

    listen: str = "127.0.0.1:7406"
    batch_replay_s: float = DEFAULT_BATCH_REPLAY_S
    retention_s: float = DEFAULT_RETENTION_S

    @field_validator("batch_replay_s", "retention_s")
    @classmethod
    def _is_a_positive_time(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("a number of seconds > 0")
        return value
