"""Settings of the migrator. Read once; environment variables are TREADLE_MIGRATOR_<NAME>."""

from typing import ClassVar

from pydantic import field_validator
from treadle_runtime.config import Settings, address

DEFAULT_GIVE_UP_S = 30.0  # for a caller that sets no limit: longer than the transfer of any context
DEFAULT_RETENTION_S = 86400.0  # ended migrations stay readable for a day
SHORTEST_RETENTION_S = 3600.0  # as long as request records live: a repeated StartMigration must find its migration


class MigratorSettings(Settings):
    """What the migrator can be told."""

    service: ClassVar[str] = "migrator"

    listen: str = "127.0.0.1:7404"
    scheduler: str = "127.0.0.1:7401"  # host:port of the scheduler, which owns the trajectories
    give_up_s: float = DEFAULT_GIVE_UP_S  # where StartMigration sets no give_up_after
    retention_s: float = DEFAULT_RETENTION_S

    @field_validator("scheduler")
    @classmethod
    def _scheduler_is_an_address(cls, value: str) -> str:
        return address(value)

    @field_validator("give_up_s")
    @classmethod
    def _is_a_positive_time(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("a number of seconds > 0")
        return value

    @field_validator("retention_s")
    @classmethod
    def _outlives_request_records(cls, value: float) -> float:
        if value < SHORTEST_RETENTION_S:
            raise ValueError(f"a number of seconds >= {SHORTEST_RETENTION_S:g}")
        return value
