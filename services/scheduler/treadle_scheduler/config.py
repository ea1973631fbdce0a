"""Settings of the scheduler, read from TREADLE_SCHEDULER_… (README.md has the table)."""

from typing import ClassVar

from pydantic import field_validator
from treadle_runtime.config import Settings, address


class SchedulerSettings(Settings):
    """An empty address turns that part off: the scheduler does without, and GetDirectory answers with an empty one."""

    service: ClassVar[str] = "scheduler"

    listen: str = "127.0.0.1:7401"

    predictor: str = ""
    placement: str = ""
    migrator: str = ""
    tools: str = ""
    rollout: str = ""
    # What GetDirectory tells clients instead, where they reach the services under other names (a proxy, published
    # ports).
    public_predictor: str = ""
    public_placement: str = ""
    public_migrator: str = ""
    public_tools: str = ""
    public_rollout: str = ""

    lease_ttl_s: float = 10.0  # an engine that does not renew for this long is out; sidecars renew at a third of it
    ticket_ttl_s: float = 600.0  # a sidecar refuses an older ticket
    keep_closed_s: float = 3600.0  # how long a closed trajectory stays readable
    abandon_after_s: float = 6 * 3600.0  # an open trajectory that nobody touched for this long is closed as failed
    aging_doubling_s: float = 300.0  # waiting this long is worth a doubling of predicted work
    plan_every_events: int = 24  # a new plan after this many openings, closings and finished steps
    plan_margin: float = (
        0.02  # a plan that moves KV must beat the placement we have by this fraction of the mean makespan
    )

    @field_validator(
        "predictor",
        "placement",
        "migrator",
        "tools",
        "rollout",
        "public_predictor",
        "public_placement",
        "public_migrator",
        "public_tools",
        "public_rollout",
    )
    @classmethod
    def _address_or_empty(cls, value: str) -> str:
        return address(value) if value else value

    @field_validator("lease_ttl_s", "ticket_ttl_s", "abandon_after_s", "aging_doubling_s")
    @classmethod
    def _positive(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("a number of seconds > 0")
        return value

    @field_validator("keep_closed_s")
    @classmethod
    def _not_negative(cls, value: float) -> float:
        if value < 0:
            raise ValueError("a number of seconds >= 0")
        return value

    @field_validator("plan_every_events")
    @classmethod
    def _at_least_one(cls, value: int) -> int:
        if value < 1:
            raise ValueError("a whole number >= 1")
        return value

    @field_validator("plan_margin")
    @classmethod
    def _a_fraction(cls, value: float) -> float:
        if not 0 <= value < 1:
            raise ValueError("a fraction in 0..1, e.g. 0.1")
        return value
