"""The noun of the pool: one reward, that is, one trajectory to be scored by one reward function.

Invariants: a reward is PENDING or RUNNING until it ends as DONE (with a score), FAILED or CANCELLED, and then changes
no more; `revision` moves at each change.
"""

import enum
from dataclasses import dataclass

DEFAULT_JOB = "default"


class State(enum.StrEnum):
    """How far a reward is."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({State.DONE, State.FAILED, State.CANCELLED})


@dataclass(frozen=True)
class Reward:
    """See the module. name: of the reward function. tries: begun until now, in this life of the service.

    accepted_at, ended_at: seconds since the epoch, 0.0 before. queue_s: from acceptance to the last try; overhead_s and
    execution_s: of that try.
    """

    reward_id: str
    trajectory_id: str
    job: str
    name: str
    accepted_at: float
    state: State = State.PENDING
    score: float | None = None
    output: str = ""
    data_json: str = ""
    error: str = ""
    tries: int = 0
    queue_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0
    ended_at: float = 0.0
    revision: int = 1

    @property
    def ended(self) -> bool:
        """Whether it changes no more."""
        return self.state in ENDED
