"""Settings of the scheduler, read once from TREADLE_SCHEDULER_<NAME> (README.md has the table)."""

from typing import Annotated, ClassVar

from pydantic import Field
from treadle_runtime.config import OptionalAddress, Settings

Seconds = Annotated[float, Field(gt=0)]


class SchedulerSettings(Settings):
    """Settings of the scheduler. An empty address turns that part off: the scheduler works without
    it, and GetDirectory returns it empty."""

    service: ClassVar[str] = "scheduler"

    listen: str = "127.0.0.1:7401"

    predictor: OptionalAddress = ""
    placement: OptionalAddress = ""
    migrator: OptionalAddress = ""
    tools: OptionalAddress = ""
    rollout: OptionalAddress = ""
    resources: OptionalAddress = ""  # used by GetDirectory alone
    # The addresses that GetDirectory returns instead, where clients reach the services under other
    # names (a proxy, published ports).
    public_predictor: OptionalAddress = ""
    public_placement: OptionalAddress = ""
    public_migrator: OptionalAddress = ""
    public_tools: OptionalAddress = ""
    public_rollout: OptionalAddress = ""

    # Another scheduler process leads once this one has not renewed its lead for this long; below 1
    # s a busy machine makes a healthy leader late.
    leader_ttl_s: Annotated[float, Field(ge=1)] = 3.0

    # The settings below are fields of treadle_core.tuning.Tuning, where the other thresholds are.
    lease_ttl_s: Seconds = 10.0  # an engine whose lease was not renewed for this long is removed
    missing_tags_s: Seconds = (
        180.0  # a step whose hardware tags no engine carries is refused after this long
    )
    job_lease_s: Seconds = (
        45.0  # the work of a client that was silent for this long is closed, and its room is free
    )
    # how long a job that is to be resumed is kept after the death of its client
    job_resume_s: Seconds = 24 * 3600.0
    ticket_ttl_s: Seconds = 600.0  # a sidecar refuses an older ticket
    keep_closed_s: Annotated[float, Field(ge=0)] = (
        3600.0  # how long a closed trajectory stays readable
    )
    # A trajectory without a job that no client used for this long is closed as failed.
    abandon_after_s: Seconds = 6 * 3600.0
    aging_doubling_s: Seconds = 300.0  # waiting this long is worth a doubling of predicted work
    plan_every_events: Annotated[int, Field(ge=1)] = (
        24  # openings, closings and finished steps between two plans
    )
    # A plan that moves KV must beat the present placement by this fraction of the mean makespan.
    plan_margin: Annotated[float, Field(ge=0, lt=1)] = 0.02
