"""Settings of the rollout service, read once from TREADLE_ROLLOUT_<NAME>."""

from typing import Annotated, ClassVar

from pydantic import Field
from treadle_runtime.config import Settings

DEFAULT_BATCH_REPLAY_S = 3600.0  # as long as request records live: a trainer that retries later than that has restarted
DEFAULT_RETENTION_S = 7 * 86400.0  # a rollout nobody touched for a week belongs to a job that is gone


class RolloutSettings(Settings):
    """batch_replay_s: how long a batch can be repeated. retention_s: how long an untouched rollout is kept."""

    service: ClassVar[str] = "rollout"

    listen: str = "127.0.0.1:7406"
    batch_replay_s: Annotated[float, Field(gt=0)] = DEFAULT_BATCH_REPLAY_S
    retention_s: Annotated[float, Field(gt=0)] = DEFAULT_RETENTION_S
