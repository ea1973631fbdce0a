"""Settings of the gateway, read once from TREADLE_GATEWAY_<NAME>."""

from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator
from treadle_runtime.config import (
    Hosts,
    Key,
    OptionalFolder,
    Settings,
    address,
    addresses,
    is_loopback,
)

DEFAULT_IDLE_S = 1800.0  # longer than a tool runs
DEFAULT_UNNAMED_IDLE_S = 5.0  # no message ends such a conversation, and an open one holds KV
DEFAULT_NO_WEIGHTS_S = 60.0  # a trainer may load others meanwhile
DEFAULT_AWAY_AFTER_S = (
    2.0  # a scheduler that is restarted answers again within 5 s; a request need not wait for it
)
DEFAULT_IDLE_TOKENS = 25_000_000  # 1 GB here, and more than the KV of 50 GPUs
DEFAULT_HELD_BYTES = 2 * 1024**3  # 45 million tokens of prompts that are answered at a time
Address = Annotated[str, AfterValidator(lambda value: address(value, lowest_port=0))]


class GatewaySettings(Settings):
    """Settings of the gateway. http_listen: where frameworks send their requests; `listen` answers
    gRPC health. http_hosts: names under which callers may reach it, with commas between, beside its
    addresses and those of its certificate. scheduler: address of the mesh's scheduler; several with
    commas between. api_key: what a caller must present (`Authorization: Bearer KEY`); empty:
    nothing. engine_key: SGLang's --api-key, the same for all engines; empty: none. tokenizer: a
    folder with tokenizer.json; empty: texts are refused, and token ids alone are served.
    tool_parser, reasoning_parser: SGLang's names of them; empty: those that the engines were
    started with.
    idle_s: a session whose last request ended so long ago is closed. unnamed_idle_s: the same for
    requests without a session. idle_tokens: beyond them, the sessions that are idle for longest are
    closed. held_bytes: most that requests in flight take, by an estimate. away_after_s: the mesh is
    away once it has not answered for so long. no_weights_s: requests that wait are refused once all
    engines have refused the wanted weights for so long. job: whose share of the engines the
    requests use. served_model: how /v1/models names the model; empty: as the engines do."""

    service: ClassVar[str] = "gateway"
    uses_nats: ClassVar[bool] = False

    listen: str = "127.0.0.1:7408"
    http_listen: Address = "127.0.0.1:7409"
    http_hosts: Hosts = ""
    scheduler: Annotated[str, AfterValidator(addresses)] = "127.0.0.1:7401"
    api_key: Key = SecretStr("")
    engine_key: Key = SecretStr("")
    tokenizer: OptionalFolder = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    idle_s: Annotated[float, Field(gt=0)] = DEFAULT_IDLE_S
    unnamed_idle_s: Annotated[float, Field(gt=0)] = DEFAULT_UNNAMED_IDLE_S
    idle_tokens: Annotated[int, Field(gt=0)] = DEFAULT_IDLE_TOKENS
    held_bytes: Annotated[int, Field(ge=2**26)] = DEFAULT_HELD_BYTES
    away_after_s: Annotated[float, Field(gt=0)] = DEFAULT_AWAY_AFTER_S
    no_weights_s: Annotated[float, Field(gt=0)] = DEFAULT_NO_WEIGHTS_S
    job: str = ""
    served_model: str = ""

    @model_validator(mode="after")
    def _opens_to_other_machines_with_a_key(self) -> Self:
        """Raise ValueError where other machines could call without TLS or a key: callers may also
        load weights and pause engines."""
        if self.insecure_plaintext or is_loopback(self.http_listen):
            return self
        for name, value in (
            ("TREADLE_TLS_FOLDER", self.tls_folder),
            ("TREADLE_GATEWAY_API_KEY", self.api_key),
        ):
            if not value:
                raise ValueError(
                    f"TREADLE_GATEWAY_HTTP_LISTEN={self.http_listen} would let other machines in: "
                    f"set {name}, or TREADLE_INSECURE_PLAINTEXT=true"
                )
        return self
