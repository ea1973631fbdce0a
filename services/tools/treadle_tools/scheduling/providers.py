"""PROVIDERS_FILE: the providers that tools call, TOML or JSON, and what each allows.

[[provider]]
name = "search"
concurrency = 8
quota = [{ count = 10, period_s = 1 }, { count = 1000, period_s = 86400, sliding = false }]
breaker = { failures = 5, cooldown_s = 1 }
"""

import json
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from treadle_core.tools.pools import InvalidPoolError
from treadle_core.tools.providers import UNLIMITED, BasicManager, BreakerRule, Provider, Quota
from treadle_runtime.errors import InvalidArgument, identifier

DEFAULT = BreakerRule()


class ProvidersError(Exception):
    """The file cannot be read or says what cannot be; the message says where."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Quota(_Strict):
    count: int
    period_s: float
    sliding: bool = True
    slack_s: float = 0.0


class _Breaker(_Strict):
    failures: int = DEFAULT.failures
    share: float = DEFAULT.share
    recent: int = DEFAULT.recent
    cooldown_s: float = DEFAULT.cooldown_s
    longest_cooldown_s: float = DEFAULT.longest_cooldown_s


class _Provider(_Strict):
    name: str
    concurrency: int = UNLIMITED
    quota: list[_Quota] = Field(default_factory=list)
    breaker: _Breaker = _Breaker()


class _File(_Strict):
    provider: list[_Provider]


def read_providers(path: str) -> dict[str, BasicManager]:
    """By name; none for an empty path. Raises ProvidersError."""
    if not path:
        return {}
    try:
        data = Path(path).read_bytes()
        parsed = json.loads(data) if path.endswith(".json") else tomllib.loads(data.decode())
        file = _File.model_validate(parsed)
    except (OSError, ValueError) as error:  # ValidationError and the parsers' errors are ValueErrors
        raise ProvidersError(_one_line(error)) from error
    found: dict[str, BasicManager] = {}
    for index, each in enumerate(file.provider):
        try:
            identifier("name", each.name)
            quotas = tuple(Quota(**quota.model_dump()) for quota in each.quota)
            rule = BreakerRule(**each.breaker.model_dump())
            manager = BasicManager(Provider(each.name, each.concurrency, quotas, rule))
        except (InvalidPoolError, InvalidArgument) as error:
            raise ProvidersError(f"provider[{index}]: {error}") from error
        if each.name in found:
            raise ProvidersError(f"provider[{index}].name: {each.name!r} is there twice")
        found[each.name] = manager
    return found


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
