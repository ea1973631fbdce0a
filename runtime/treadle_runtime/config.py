"""Read the settings of a service once from the environment, and end the process with one clear line if one is bad.

A service subclasses `Settings`, sets `service` and adds its own fields. A setting that every service has is read from
`TREADLE_<SERVICE>_X` first, then from `TREADLE_X`; a service's own setting from `TREADLE_<SERVICE>_X` only. Building a
Settings object directly reads no environment.
"""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

# A context of 1M tokens is 4 MiB of int32 ids; a batch of them needs some room.
DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
SMALLEST_MAX_MESSAGE_BYTES = 1024  # below this not even a ticket fits
BAD_SETTING_EXIT_CODE = 2
COMMON_PREFIX = "TREADLE_"

S = TypeVar("S", bound="Settings")

# Kubernetes adds these for a Service called treadle-<name>; nobody set them by hand.
_KUBERNETES_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_(ADDR|PORT|PROTO))?)?)$")


def address(value: str, *, lowest_port: int = 1) -> str:
    """`value` if it is host:port. Raises ValueError saying what would be right."""
    host, colon, port = value.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and lowest_port <= int(port) <= 65535):
        raise ValueError(f"host:port with a port in {lowest_port}..65535, e.g. 127.0.0.1:7401")
    return value


def url(value: str, schemes: tuple[str, ...], example: str) -> str:
    """`value` if it is a URL with a host and one of `schemes`. Raises ValueError saying what would be right."""
    try:
        parts = urlsplit(value)
        valid = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"a URL {' or '.join(f'{scheme}://' for scheme in schemes)} with a host, e.g. {example}")
    return value


LowerCase = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
NatsUrl = Annotated[
    str, AfterValidator(lambda value: url(value, ("nats", "tls", "ws", "wss"), "nats://127.0.0.1:4222"))
]
CollectorUrl = Annotated[
    str, AfterValidator(lambda value: value and url(value, ("http", "https"), "http://127.0.0.1:4317"))
]


class Settings(BaseSettings):
    """The settings that every service has. Units are in the names."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    service: ClassVar[str] = ""

    listen: str = "127.0.0.1:0"
    nats_url: NatsUrl = "nats://127.0.0.1:4222"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], LowerCase] = "info"
    log_format: Annotated[Literal["json", "console"], LowerCase] = "json"
    otlp_endpoint: CollectorUrl = ""  # of an OTLP gRPC collector; empty: nothing is exported
    drain_grace_s: Annotated[float, Field(ge=0)] = 10.0  # how long calls in flight may still run after SIGTERM
    startup_timeout_s: Annotated[float, Field(gt=0)] = 60.0  # how long to wait for NATS at start
    max_message_bytes: Annotated[int, Field(ge=SMALLEST_MAX_MESSAGE_BYTES)] = DEFAULT_MAX_MESSAGE_BYTES
    ready_file: str = ""  # written once the server listens: {"address": "host:port", "pid": N}; empty: none

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: Any, **more: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller passes: `read_settings` is the one place that looks at the environment."""
        return (init_settings,)

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, value: str) -> str:  # a validator of the class, since each service declares `listen` again
        return address(value, lowest_port=0)


def prefix_of(cls: type[Settings]) -> str:
    """`TREADLE_<SERVICE>_`."""
    if not cls.service:
        raise TypeError(f"{cls.__name__} sets no `service`")
    return f"{COMMON_PREFIX}{cls.service.upper()}_"


def read_settings(cls: type[S], environ: Mapping[str, str] | None = None) -> S:
    """Read `cls` from `environ` (the process's own by default).

    A bad value, or a `TREADLE_<SERVICE>_` variable that names no setting: one line on stderr with the variable, its
    value and what would be right, then exit code 2.
    """
    variables = dict(os.environ if environ is None else environ)
    prefix = prefix_of(cls)
    try:
        _refuse_unknown(cls, prefix, variables)
        own = _Variables(cls, prefix, variables, cls.model_fields)()
        common = _Variables(cls, COMMON_PREFIX, variables, Settings.model_fields)()
        return cls(**{**common, **own})
    except ValidationError as error:
        _exit(cls, "; ".join(_refusals(cls, prefix, variables, error)))
    except _BadVariableError as error:
        _exit(cls, str(error))


class _BadVariableError(Exception):
    """A variable is no JSON where it must be, or names no setting. The message is the line to print."""


class _Variables(EnvSettingsSource):
    """pydantic-settings' own reader, of the given variables instead of the process's environment."""

    def __init__(self, cls: type[Settings], prefix: str, variables: Mapping[str, str], fields: Iterable[str]) -> None:
        self._variables = {name.lower(): value for name, value in variables.items()}
        self._fields = frozenset(fields)
        self._names = prefix
        super().__init__(cls, case_sensitive=False, env_prefix=prefix)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        wanted = {f"{self._names}{field}".lower() for field in self._fields}
        return {name: value for name, value in self._variables.items() if name in wanted}

    def prepare_field_value(self, field_name: str, field: Any, value: Any, value_is_complex: bool) -> Any:
        try:
            return super().prepare_field_value(field_name, field, value, value_is_complex)
        except json.JSONDecodeError as error:
            name = f"{self._names}{field_name.upper()}"
            raise _BadVariableError(f"{name}={value!r} is refused: JSON is expected here ({error})") from error


def _refuse_unknown(cls: type[Settings], prefix: str, variables: Mapping[str, str]) -> None:
    known = [f"{prefix}{field.upper()}" for field in cls.model_fields]
    in_kubernetes = "KUBERNETES_SERVICE_HOST" in variables
    for name in sorted(variables):
        if not name.startswith(prefix) or name in known:
            continue
        if in_kubernetes and _KUBERNETES_LINK.search(name):
            continue
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise _BadVariableError(f"{name} is no setting of {cls.service}: did you mean {nearest[0]}?")


def _refusals(cls: type[Settings], prefix: str, variables: Mapping[str, str], error: ValidationError) -> Iterable[str]:
    for problem in error.errors(include_url=False):
        field = str(problem["loc"][0]) if problem["loc"] else ""
        own, common = f"{prefix}{field.upper()}", f"{COMMON_PREFIX}{field.upper()}"
        name = common if own not in variables and common in variables and field in Settings.model_fields else own
        expected = problem["msg"].removeprefix("Value error, ")
        if name not in variables:
            yield f"{name} is not set: {expected}" if field else expected
            continue
        secret = field in cls.model_fields and cls.model_fields[field].annotation is SecretStr
        value = "***" if secret else repr(variables[name])
        yield f"{name}={value} is refused: {expected}"


def _exit(cls: type[Settings], line: str) -> NoReturn:
    sys.stderr.write(f"treadle_{cls.service}: {' '.join(line.split())}\n")
    raise SystemExit(BAD_SETTING_EXIT_CODE)
