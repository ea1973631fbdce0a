"""Settings of the rollout service, read once from TREADLE_ROLLOUT_<NAME>."""

from typing import Annotated, ClassVar

from pydantic import Field
from treadle_runtime.config import Settings

DEFAULT_BATCH_REPLAY_S = (
    3600.0  # as long as request records live: a trainer that retries later has restarted
)
# Three batches of 6,400 trajectories of 40k tokens (9 bytes each): one is read, one waits, one
# fills.
DEFAULT_PAYLOAD_BYTES = 8 * 1024**3
SMALLEST_PAYLOAD_BYTES = 1024 * 1024  # one trajectory of 100k tokens
DEFAULT_TOKEN_STREAM_BYTES = 256 * 1024**2  # a thousand trajectories of 29k tokens
# a rollout that nobody used for a week belongs to a job that is gone
DEFAULT_RETENTION_S = 7 * 86400.0


class RolloutSettings(Settings):
    """Settings of the rollout service. batch_replay_s: how long a batch that nobody confirms can be
    repeated. payload_bytes: what the tokens of all rollouts may take in JetStream; beyond it
    submissions are refused until batches are taken. token_stream_bytes: memory for tokens of
    trajectories that still run, where clients push them; beyond it such a push is refused.
    retention_s: how long an unused rollout is kept."""

    service: ClassVar[str] = "rollout"

    listen: str = "127.0.0.1:7406"
    batch_replay_s: Annotated[float, Field(gt=0)] = DEFAULT_BATCH_REPLAY_S
    payload_bytes: Annotated[int, Field(ge=SMALLEST_PAYLOAD_BYTES)] = DEFAULT_PAYLOAD_BYTES
    token_stream_bytes: Annotated[int, Field(ge=0)] = DEFAULT_TOKEN_STREAM_BYTES
    retention_s: Annotated[float, Field(gt=0)] = DEFAULT_RETENTION_S
