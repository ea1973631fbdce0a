"""Settings of the migrator, read once from TREADLE_MIGRATOR_<NAME>."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from treadle_runtime.config import Settings, addresses

DEFAULT_GIVE_UP_S = 30.0  # for a caller that sets no limit: longer than the transfer of any context
DEFAULT_RETENTION_S = 86400.0  # ended migrations stay readable for a day
SHORTEST_RETENTION_S = (
    3600.0  # as long as request records live: a repeated StartMigration must find its migration
)


class MigratorSettings(Settings):
    """Settings of the migrator. scheduler: host:port of each process of the scheduler, which owns
    the trajectories, with commas between. give_up_s: time for a move that sets no limit."""

    service: ClassVar[str] = "migrator"

    listen: str = "127.0.0.1:7404"
    scheduler: Annotated[str, AfterValidator(addresses)] = "127.0.0.1:7401"
    give_up_s: Annotated[float, Field(gt=0)] = DEFAULT_GIVE_UP_S
    retention_s: Annotated[float, Field(ge=SHORTEST_RETENTION_S)] = DEFAULT_RETENTION_S
