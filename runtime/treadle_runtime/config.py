"""Read the settings of a service once from the environment, and end the process with one clear line
if a setting is bad.

A service subclasses `Settings`, sets `service` and adds its own fields. A setting that every
service has is read from `TREADLE_<SERVICE>_X` first, then from `TREADLE_X`; a service's own setting
from `TREADLE_<SERVICE>_X` only. Building a Settings object directly reads no environment.
"""

import difflib
import json
import os
import re
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

# A context of 1M tokens is 4 MiB of int32 ids; a batch of them needs some room.
DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
SMALLEST_MAX_MESSAGE_BYTES = 1024  # below this not even a ticket fits
# 2.4 million facts: an hour at 650 facts a second, half an hour of the busiest mesh
DEFAULT_FACTS_BYTES = 1024**3
SMALLEST_FACTS_BYTES = 1024 * 1024  # 2,000 facts: what a consumer receives within seconds
LEAST_KEY_CHARS = 16
BAD_SETTING_EXIT_CODE = 2
COMMON_PREFIX = "TREADLE_"

S = TypeVar("S", bound="Settings")

# a name or address without a port; *. for all names below one
_HOST = re.compile(r"(\*\.)?[\w.-]+|\[[0-9a-fA-F:]+\]")

# Kubernetes adds these for a Service called treadle-<name>; nobody set them by hand.
_KUBERNETES_LINK = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_(ADDR|PORT|PROTO))?)?)$"
)


def address(value: str, *, lowest_port: int = 1) -> str:
    """Return `value` if it is host:port. Raises ValueError with the form that would be right."""
    host, colon, port = value.rpartition(":")
    if not (
        colon and host and port.isascii() and port.isdigit() and lowest_port <= int(port) <= 65535
    ):
        raise ValueError(f"host:port with a port in {lowest_port}..65535, e.g. 127.0.0.1:7401")
    return value


def is_loopback(value: str) -> bool:
    """Return whether only this machine can reach host:port."""
    host = value.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # the host is a name
        return False


def addresses(value: str) -> str:
    """Return `value` if it is one or more host:port with commas between. Raises ValueError with the
    form that would be right."""
    for each in value.split(","):
        address(each.strip())
    return value


def names_of(hosts: str) -> list[str]:
    """Return the names in a setting of hosts, which commas separate."""
    return [name.strip() for name in hosts.split(",") if name.strip()]


def host_names(value: str) -> str:
    """Return `value` if it is names of hosts with commas between. Raises ValueError."""
    wrong = [name for name in names_of(value) if not _HOST.fullmatch(name)]
    if wrong:
        raise ValueError(
            f"must be names of hosts without scheme and port, with commas between, not {wrong[0]}"
        )
    return value


def url(value: str, schemes: tuple[str, ...], example: str) -> str:
    """Return `value` if it is a URL with a host and one of `schemes`. Raises ValueError with the
    form that would be right."""
    try:
        parts = urlsplit(value)
        valid = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(
            f"a URL {' or '.join(f'{scheme}://' for scheme in schemes)} with a host, e.g. {example}"
        )
    return value


def _parse_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"JSON is expected here ({error})") from error


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise ValueError("an absolute path")
    return path


def _hard_to_guess(key: SecretStr) -> SecretStr:
    value = key.get_secret_value()
    plain = value.isascii() and value.isprintable() and value == value.strip()
    if value and not (len(value) >= LEAST_KEY_CHARS and plain):
        raise ValueError(
            f"must have {LEAST_KEY_CHARS} printable ASCII characters or more, none a space at an "
            "end: openssl rand -hex 16"
        )
    return key


def hide_passwords(text: str) -> str:
    """Return a text with stars in place of user and password of each URL in it."""
    return re.sub(r"://[^/@\s]*@", "://***@", text)


Key = Annotated[SecretStr, AfterValidator(_hard_to_guess)]  # empty: none
Json = BeforeValidator(_parse_json)  # for a setting that is a list
LowerCase = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
OptionalAddress = Annotated[str, AfterValidator(lambda value: value and address(value))]
OptionalAddresses = Annotated[str, AfterValidator(lambda value: value and addresses(value))]
OptionalFolder = Annotated[str, AfterValidator(lambda value: value and _absolute(value))]
Hosts = Annotated[str, AfterValidator(host_names)]
NatsUrl = Annotated[
    str,
    AfterValidator(
        lambda value: ",".join(
            url(each.strip(), ("nats", "tls", "ws", "wss"), "nats://127.0.0.1:4222")
            for each in value.split(",")
        )
    ),
]
CollectorUrl = Annotated[
    str,
    AfterValidator(lambda value: value and url(value, ("http", "https"), "http://127.0.0.1:4317")),
]


class Settings(BaseModel):
    """Settings that every service has. Units are in the names."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    service: ClassVar[str] = ""
    uses_nats: ClassVar[bool] = True  # whether the service keeps state or facts there

    listen: str = "127.0.0.1:0"
    nats_url: NatsUrl = "nats://127.0.0.1:4222"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LowerCase] = "info"
    log_format: Annotated[Literal["json", "console"], LowerCase] = "json"
    otlp_endpoint: CollectorUrl = ""  # URL of an OTLP gRPC collector; empty: nothing is exported
    drain_grace_s: Annotated[float, Field(ge=0)] = (
        10.0  # how long calls in flight may still run after SIGTERM
    )
    startup_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # how long to wait for NATS at start
    max_message_bytes: Annotated[int, Field(ge=SMALLEST_MAX_MESSAGE_BYTES)] = (
        DEFAULT_MAX_MESSAGE_BYTES
    )
    # Size of the stream of facts, from which JetStream discards the oldest; the same for all
    # services of a mesh.
    facts_bytes: Annotated[int, Field(ge=SMALLEST_FACTS_BYTES)] = DEFAULT_FACTS_BYTES
    nats_replicas: Annotated[int, Field(ge=1, le=5)] = (
        1  # servers of a NATS cluster that store each stream and bucket
    )
    # A unix socket at which this process reports its health to `treadle_runtime.probe`; empty:
    # none.
    health_socket: str = ""
    # The folder of this process's certificate (treadle.certificates): with it every connection is
    # encrypted, and both ends are known. Empty: plaintext, and neither end is known.
    tls_folder: OptionalFolder = ""
    insecure_plaintext: bool = False  # serve in plaintext to other machines
    tenant_calls_per_s: Annotated[float, Field(ge=0)] = (
        0.0  # calls per second that one tenant may make here; 0: no limit
    )
    tenant_calls: Annotated[int, Field(ge=0)] = (
        0  # calls at once of one tenant, streams included; 0: no limit
    )
    ready_file: str = (
        ""  # written once the server listens: {"address": "host:port", "pid": N}; empty: none
    )

    @field_validator("listen")
    @classmethod
    def _is_an_address(
        cls, value: str
    ) -> str:  # a validator of the class, since each service declares `listen` again
        return address(value, lowest_port=0)

    @model_validator(mode="after")
    def _keeps_plaintext_here(self) -> Self:
        if not (self.tls_folder or self.insecure_plaintext or is_loopback(self.listen)):
            name = f"{COMMON_PREFIX}{self.service.upper()}_LISTEN"
            cure = (
                "set TREADLE_TLS_FOLDER to a folder of `treadle certs`, or "
                "TREADLE_INSECURE_PLAINTEXT=true"
            )
            raise ValueError(
                f"{name}={self.listen} would serve other machines in plaintext: {cure}"
            )
        return self


def prefix_of(cls: type[Settings]) -> str:
    """Return the prefix of a service's variables, `TREADLE_<SERVICE>_`."""
    if not cls.service:
        raise TypeError(f"{cls.__name__} sets no `service`")
    return f"{COMMON_PREFIX}{cls.service.upper()}_"


def read_settings(cls: type[S], environ: Mapping[str, str] | None = None) -> S:
    """Read `cls` from `environ` (the process's own by default).

    For a bad value, or a `TREADLE_<SERVICE>_` variable that names no setting, write one line on
    stderr with the variable, its value and what would be right, then exit with code 2.
    """
    variables = os.environ if environ is None else environ
    prefix = prefix_of(cls)
    _refuse_unknown(cls, prefix, variables)
    names = {field: f"{COMMON_PREFIX}{field.upper()}" for field in Settings.model_fields}
    names |= {
        field: own for field in cls.model_fields if (own := f"{prefix}{field.upper()}") in variables
    }
    try:
        return cls.model_validate(
            {field: variables[name] for field, name in names.items() if name in variables}
        )
    except ValidationError as error:
        _exit(
            cls,
            "; ".join(
                _refusal(cls, variables, names, problem)
                for problem in error.errors(include_url=False)
            ),
        )


def _refuse_unknown(cls: type[Settings], prefix: str, variables: Mapping[str, str]) -> None:
    known = [f"{prefix}{field.upper()}" for field in cls.model_fields]
    in_kubernetes = "KUBERNETES_SERVICE_HOST" in variables
    for name in sorted(variables):
        if not name.startswith(prefix) or name in known:
            continue
        if in_kubernetes and _KUBERNETES_LINK.search(name):
            continue
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        _exit(cls, f"{name} is no setting of {cls.service}: did you mean {nearest[0]}?")


def _refusal(
    cls: type[Settings], variables: Mapping[str, str], names: Mapping[str, str], problem: Any
) -> str:
    expected: str = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:  # the problem concerns several settings together
        return expected
    field = problem["loc"][0]
    name = names.get(field, "")
    if name not in variables:
        return f"{prefix_of(cls)}{field.upper()} is not set: {expected}"
    secret = cls.model_fields[field].annotation is SecretStr
    value = "***" if secret else hide_passwords(repr(variables[name]))
    return f"{name}={value} is refused: {expected}"


def _exit(cls: type[Settings], line: str) -> NoReturn:
    sys.stderr.write(f"treadle_{cls.service}: {' '.join(line.split())}\n")
    raise SystemExit(BAD_SETTING_EXIT_CODE)
