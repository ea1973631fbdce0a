"""Settings of the console, read once from TREADLE_CONSOLE_<NAME>."""

from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator
from treadle_runtime.config import Hosts, Key, Settings, address, addresses, is_loopback

Address = Annotated[str, AfterValidator(lambda value: address(value, lowest_port=0))]
DEFAULT_MOST_TRAJECTORIES = (
    20_000  # three training steps of 6,400 trajectories; about 60 MB with their bars
)
DEFAULT_MOST_SPANS = 400_000  # bars of the picture: some 20 of each of those trajectories


class ConsoleSettings(Settings):
    """Settings of the console. http_listen: where browsers connect; `listen` answers gRPC health.
    http_hosts: names under which browsers may reach it, with commas between, beside its address and
    localhost. login_token: what a browser presents once, in the URL (`/?token=`); empty: whoever
    reaches the address sees the mesh. scheduler: address of the mesh's scheduler; several with
    commas between. control_key:
    whoever types it into the page may pause, resume and drain; empty: nobody may.
    most_trajectories, most_spans: how many are kept in memory; beyond, the oldest are removed."""

    service: ClassVar[str] = "console"

    listen: str = "127.0.0.1:7399"
    http_listen: Address = "127.0.0.1:7400"
    http_hosts: Hosts = ""
    scheduler: Annotated[str, AfterValidator(addresses)] = "127.0.0.1:7401"
    login_token: Key = SecretStr("")
    control_key: Key = SecretStr("")
    most_trajectories: Annotated[int, Field(ge=100)] = DEFAULT_MOST_TRAJECTORIES
    most_spans: Annotated[int, Field(ge=1_000)] = DEFAULT_MOST_SPANS

    @model_validator(mode="after")
    def _shows_nothing_to_other_machines(self) -> Self:
        if not (self.insecure_plaintext or is_loopback(self.http_listen)):
            raise ValueError(
                f"TREADLE_CONSOLE_HTTP_LISTEN={self.http_listen} would serve other machines in "
                "plaintext: put a proxy "
                "with TLS in front of a loopback address, or set TREADLE_INSECURE_PLAINTEXT=true"
            )
        return self
