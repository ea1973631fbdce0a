r"""Declare and call tools, rewards, judges and GPU services over HTTP.

This file reads the files, TOML or JSON by their names' end, that declare them:

    [[function]]
    name = "search"
    url = "http://search.default.svc.cluster.local/"
    headers_from_env = { Authorization = "SEARCH_AUTHORIZATION" }
    [function.arguments_schema]
    type = "object"

    [[judge]]
    name = "helpful"
    endpoints = ["http://judge.default.svc.cluster.local:30000"]
    prompt = "Question: $question\nAnswer: $answer\nRate it from 0 to 10. End with `Score: N`."

    [gpus]
    gpu_bytes = 80_000_000_000
    nodes = { a = [0, 1] }

    [[gpu_service]]
    name = "judge-7b"
    bytes_per_gpu = { 1 = 30_000_000_000 }
    servers = [
      { node = "a", first = 0, degree = 1, url = "http://127.0.0.1:30000" },
      { node = "a", first = 1, degree = 1, url = "http://127.0.0.1:30001" },
    ]

and the file that declares what the providers of tools allow (PROVIDERS_FILE):

    [[provider]]
    name = "search"
    concurrency = 8
    quota = [{ count = 10, period_s = 1 }, { count = 1000, period_s = 86400, sliding = false }]
    breaker = { failures = 5, cooldown_s = 1 }

A misspelled field, a header whose variable is not set or a host that is not allowed is refused at
start by its name.
"""

import json
import re
import string
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from treadle_core.tools.arrangement import NODE_GPUS, level_of
from treadle_core.tools.pools import InvalidPoolError
from treadle_core.tools.providers import UNLIMITED, BasicManager, BreakerRule, Provider, Quota
from treadle_runtime.config import url
from treadle_runtime.errors import InvalidArgument
from treadle_runtime.fields import identifier

from treadle_tools.tool import MIB, Kind, Limits, Tool

KINDS = {"tool": Kind.STATELESS, "reward": Kind.REWARD}


class DeclarationError(Exception):
    """The file is not usable; the message gives the place and the reason."""


def _template(value: str) -> str:
    if not string.Template(value).is_valid():
        raise ValueError("a `$` that begins no name is written `$$`")
    return value


def _score_pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(f"a regular expression with one group, the score; it has {groups}")
    return value


Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Url = Annotated[
    str,
    AfterValidator(
        lambda value: url(value, ("http", "https"), "http://search.default.svc.cluster.local/")
    ),
]
ServerUrl = Annotated[Url, AfterValidator(lambda value: value.rstrip("/"))]
Template = Annotated[str, AfterValidator(_template)]
GpuNumbers = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=NODE_GPUS)], ...],
    AfterValidator(lambda numbers: tuple(sorted(set(numbers)))),
]


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class _Limits(_Declared):
    wall_s: Seconds = 120.0
    output_bytes: Count = 64 * 1024


class HttpFunction(_Declared):
    """A stateless function behind a URL.

    Arguments go as the JSON body (of a GET: as the query), never into the URL.

    headers_from_env: header to the environment variable that holds its value, for secrets.
    connect_s: longest wait for a connection, which a function scaled to zero has at once, since its
    platform takes it. cold_s: longest wait for the first byte of a function that may have to start,
    as it may `idle_s` after its last answer. Warm ones are waited for as long as they were seen to
    take, unless `learns` is off: then all for cold_s. tries: in all. idempotent: whether a call
    whose answer was lost may be sent again; one that was refused always may. response_bytes: a
    longer answer is an error. at_once: calls under way. provider: whose limits each try counts
    against; empty: nobody's. low, high: of a reward; an answer outside is an error.
    """

    name: str
    kind: Literal["tool", "reward"] = "tool"
    description: str = ""
    arguments_schema: dict[str, Any] = {"type": "object"}
    limits: _Limits = _Limits()
    url: Url
    method: Literal["GET", "POST", "PUT"] = "POST"
    headers: dict[str, str] = {}
    headers_from_env: dict[str, str] = {}
    connect_s: Seconds = 2.0
    cold_s: Seconds = 90.0
    idle_s: Seconds = 60.0
    learns: bool = True
    tries: Count = 6
    idempotent: bool = True
    response_bytes: Count = MIB
    at_once: Count = 64
    provider: str = ""
    low: float = -sys.float_info.max
    high: float = sys.float_info.max

    @model_validator(mode="after")
    def _check(self) -> "HttpFunction":
        if not self.low < self.high:
            raise ValueError("`low` must be below `high`")
        return self

    def tool(self) -> Tool:
        """Return the tool or reward that calls the function."""
        return Tool(
            name=self.name,
            kind=KINDS[self.kind],
            description=self.description,
            entry="",
            arguments_schema=self.arguments_schema,
            limits=Limits(wall_s=self.limits.wall_s, output_bytes=self.limits.output_bytes),
            provider=self.provider,
            remote=self,
            reward_range=(self.low, self.high),
        )


class Judge(_Declared):
    """A model that reads a trajectory and gives a score.

    prompt, system: templates in which `$name` stands for an argument; `$$` is a dollar. model: its
    name at its server. endpoints: base URLs of servers with OpenAI's chat API, such as SGLang's; or
    service: a GPU service that is brought into memory for it. authorization_from_env: the
    environment variable with the Authorization header, such as `Bearer ...`; empty: none is sent.
    score: a regular expression whose one group is the score; its last match counts, since models
    reason first. low, high: the scores that the prompt allows; they become 0 and 1. tries: answers
    in all, until one has a score. at_once: requests under way.
    """

    name: str
    description: str = ""
    prompt: Annotated[Template, Field(min_length=1)]
    system: Template = ""
    model: str = "default"
    endpoints: tuple[ServerUrl, ...] = ()
    service: str = ""
    authorization_from_env: str = ""
    score: Annotated[str, AfterValidator(_score_pattern)] = r"(?i)score\W{0,10}?(-?\d+(?:\.\d+)?)"
    low: float = 0.0
    high: float = 10.0
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_tokens: Count = 1024
    tries: Count = 3
    at_once: Count = 64
    wall_s: Seconds = 300.0
    provider: str = ""

    @model_validator(mode="after")
    def _check(self) -> "Judge":
        if bool(self.endpoints) == bool(self.service):
            raise ValueError("name `endpoints`, or a GPU `service`: one of the two")
        if not self.low < self.high:
            raise ValueError("`low` must be below `high`")
        return self

    @property
    def headers_from_env(self) -> dict[str, str]:
        """Return the headers that come from environment variables, as of an HttpFunction."""
        return {"Authorization": self.authorization_from_env} if self.authorization_from_env else {}

    @property
    def arguments(self) -> list[str]:
        """Return the names of the templates' arguments, each once."""
        names = [
            *string.Template(self.system).get_identifiers(),
            *string.Template(self.prompt).get_identifiers(),
        ]
        return list(dict.fromkeys(names))

    def tool(self) -> Tool:
        """Return a reward whose arguments are what the judge's templates name."""
        return Tool(
            name=self.name,
            kind=Kind.REWARD,
            description=self.description,
            entry="",
            arguments_schema={
                "type": "object",
                "properties": {name: {} for name in self.arguments},
                "required": self.arguments,
                "additionalProperties": False,
            },
            limits=Limits(wall_s=self.wall_s),
            provider=self.provider,
            remote=self,
        )


class Gpus(_Declared):
    """GPUs that services share in turns.

    nodes: the GPUs of each node.

    gpu_bytes: of each GPU. turn_s: how long a service may keep them while others wait. watch_s: how
    often servers that nobody uses are looked at, since one that was started anew holds memory.
    """

    gpu_bytes: Annotated[int, Field(gt=0)]
    nodes: Annotated[dict[str, GpuNumbers], Field(min_length=1)]
    turn_s: Annotated[float, Field(ge=0)] = 30.0
    watch_s: Seconds = 5.0


class Server(_Declared):
    """An SGLang server on `degree` GPUs, the first of which is `first` of `node`."""

    node: str
    first: int
    degree: int
    url: ServerUrl

    @property
    def gpus(self) -> frozenset[tuple[str, int]]:
        """Return (node, number) of each GPU that the server is on."""
        return frozenset((self.node, self.first + index) for index in range(self.degree))


class GpuService(_Declared):
    """A model that can be served on each number of GPUs in `bytes_per_gpu`, each its own service
    (ARL-Tangram §5.3).

    servers: one for each chunk of GPUs that it may be on. serial_share: of the work, in [0, 1],
    what more GPUs do not make faster. at_once: requests under way at one server, which runs them as
    a batch.
    """

    name: Annotated[str, Field(min_length=1)]
    bytes_per_gpu: Annotated[dict[int, int], Field(min_length=1)]
    servers: tuple[Server, ...]
    serial_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    at_once: Count = 64

    def check(self, nodes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError where a chunk of GPUs that the service may get has no server, or a
        server no such chunk."""
        served = {server.degree for server in self.servers}
        if served != set(self.bytes_per_gpu):
            raise ValueError(
                f"gpu_service {self.name!r}: servers are of {sorted(served)} GPUs, `bytes_per_gpu` "
                f"is of {sorted(self.bytes_per_gpu)}: name the same"
            )
        for degree in self.bytes_per_gpu:
            there = sorted((one.node, one.first) for one in self.servers if one.degree == degree)
            if not (wanted := sorted(places(nodes, degree))):
                raise ValueError(
                    f"gpu_service {self.name!r}: no node has {degree} GPUs side by side"
                )
            if there != wanted:
                raise ValueError(
                    f"gpu_service {self.name!r}: any chunk of {degree} GPUs may be its own, so "
                    f"servers must be at {wanted} (node, first); they are at {there}"
                )


def places(nodes: Mapping[str, tuple[int, ...]], degree: int) -> list[tuple[str, int]]:
    """Return (node, first GPU) of each chunk that `degree` GPUs may get: aligned runs of the next
    power of two."""
    size = 1 << level_of(degree)
    return [
        (node, first)
        for node, numbers in nodes.items()
        for first in range(0, max(numbers, default=-1) + 1, size)
        if set(range(first, first + size)) <= set(numbers)
    ]


class Declarations(_Declared):
    """Functions and judges that a file declares, and the GPU services that judges may name."""

    function: tuple[HttpFunction, ...] = ()
    judge: tuple[Judge, ...] = ()
    gpus: Gpus | None = None
    gpu_service: tuple[GpuService, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "Declarations":
        if self.gpu_service and self.gpus is None:
            raise ValueError("`gpu_service` needs `[gpus]`: gpu_bytes and nodes")
        for judge in self.judge:
            if judge.service and judge.service not in {
                service.name for service in self.gpu_service
            }:
                raise ValueError(f"judge {judge.name!r}: there is no gpu_service {judge.service!r}")
        if self.gpus is not None:
            for service in self.gpu_service:
                service.check(self.gpus.nodes)
        return self

    @property
    def tools(self) -> list[Tool]:
        """Return the tools and rewards that call the functions and judges."""
        return [*(one.tool() for one in self.function), *(one.tool() for one in self.judge)]

    @property
    def servers(self) -> list[Server]:
        """Return the servers of all GPU services."""
        return [server for service in self.gpu_service for server in service.servers]


def read_declarations(
    path: str, hosts: tuple[str, ...], environment: Mapping[str, str]
) -> Declarations:
    """Return what `path` declares; for an empty path, nothing.

    hosts: where functions, judges and servers may be.

    Raises DeclarationError.
    """
    declared = _read(path, Declarations) if path else Declarations()
    try:
        for function in declared.function:
            where = f"function {function.name!r}"
            _require_usable(where, [function.url], function.headers_from_env, hosts, environment)
        for judge in declared.judge:
            _require_usable(
                f"judge {judge.name!r}", judge.endpoints, judge.headers_from_env, hosts, environment
            )
        _require_usable(
            "gpu_service", [server.url for server in declared.servers], {}, hosts, environment
        )
    except DeclarationError as error:
        raise DeclarationError(f"{path}: {error}") from None
    return declared


class _Provider(_Declared):
    name: str
    concurrency: int = UNLIMITED
    quota: tuple[Quota, ...] = ()
    breaker: BreakerRule = BreakerRule()


class _Providers(_Declared):
    provider: tuple[_Provider, ...]


def read_providers(path: str) -> dict[str, BasicManager]:
    """Return the managers of the providers in a PROVIDERS_FILE, by name; none for an empty path.

    Raises DeclarationError.
    """
    found: dict[str, BasicManager] = {}
    for index, each in enumerate(_read(path, _Providers).provider if path else ()):
        try:
            identifier("name", each.name)
            manager = BasicManager(Provider(each.name, each.concurrency, each.quota, each.breaker))
        except (InvalidPoolError, InvalidArgument) as error:
            raise DeclarationError(f"provider[{index}]: {error}") from error
        if each.name in found:
            raise DeclarationError(f"provider[{index}].name: {each.name!r} is there twice")
        found[each.name] = manager
    return found


D = TypeVar("D", bound=_Declared)


def _read(path: str, form: type[D]) -> D:
    is_json = path.endswith(".json")
    try:
        data = Path(path).read_bytes()
        return form.model_validate(json.loads(data) if is_json else tomllib.loads(data.decode()))
    except OSError as error:
        problem = f"cannot be read: {error}"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        problem = ": ".join(filter(None, (field, first["msg"].removeprefix("Value error, "))))
    except ValueError as error:
        problem = f"is no {'JSON' if is_json else 'TOML'}: {error}"
    raise DeclarationError(f"{path}: {problem}")


def _require_usable(
    where: str,
    urls: Iterable[str],
    headers: Mapping[str, str],
    hosts: tuple[str, ...],
    environment: Mapping[str, str],
) -> None:
    """Raise DeclarationError for a host that is not allowed and for a header whose variable is not
    set.
    """
    for one in urls:
        if not is_allowed(one, hosts):
            problem = f"host {urlsplit(one).hostname or ''!r} of {one!r} is not allowed"
            raise DeclarationError(f"{where}: {problem}: name it in TREADLE_TOOLS_FUNCTION_HOSTS")
    for header, variable in headers.items():
        if variable not in environment:
            raise DeclarationError(
                f"{where}: header {header!r} is to come from {variable}, which is not set"
            )


def is_allowed(url: str, hosts: tuple[str, ...]) -> bool:
    """Return whether `hosts` has the URL's host: `a.org` allows any port, `a.org:80` that one,
    `*.b.org` every host below.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return any(_allows(rule, host, port) for rule in hosts)


def _allows(rule: str, host: str, port: int) -> bool:
    name, _, wanted = rule.rpartition(":")
    if not name or not wanted.isdigit():
        name, wanted = rule, str(port)
    if name.startswith("*."):
        matches = host.endswith(name[1:]) and host != name[1:]
    else:
        matches = host == name.strip("[]").lower()
    return matches and int(wanted) == port
