r"""Read the file that declares HTTP functions, LLM judges and GPU services, TOML or JSON by its name's end.

    [[function]]
    name = "search"
    url = "http://search.default.svc.cluster.local/"
    headers_from_env = { Authorization = "SEARCH_AUTHORIZATION" }
    [function.arguments_schema]
    type = "object"

    [[judge]]
    name = "helpful"
    endpoints = ["http://judge.default.svc.cluster.local:30000"]
    prompt = "Question: $question\nAnswer: $answer\nHow helpful is it, from 0 to 10? End with `Score: N`."

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

A misspelled field, a header whose variable is not set or a host that is not allowed is refused at start, in one line
that names it.
"""

import json
import re
import string
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from treadle_core.tools.arrangement import NODE_GPUS
from treadle_runtime.config import url

from treadle_tools.gpu.servers import NO_GPUS, Gpus, GpuService, Server, places
from treadle_tools.tool import MIB, HttpFunction, Judge, Kind, Limits, Tool

KINDS = {"tool": Kind.STATELESS, "reward": Kind.REWARD}


class DeclarationError(Exception):
    """The file is not usable; the message says where and why."""


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
    str, AfterValidator(lambda value: url(value, ("http", "https"), "http://search.default.svc.cluster.local/"))
]
Template = Annotated[str, AfterValidator(_template)]
GpuNumber = Annotated[int, Field(ge=0, lt=NODE_GPUS)]


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Limits(_Declared):
    wall_s: Seconds = 120.0
    output_bytes: Count = 64 * 1024


class _Function(_Declared):
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

    def tool(self) -> Tool:
        return Tool(
            name=self.name,
            kind=KINDS[self.kind],
            description=self.description,
            entry="",
            arguments_schema=self.arguments_schema,
            limits=Limits(wall_s=self.limits.wall_s, output_bytes=self.limits.output_bytes),
            provider=self.provider,
            remote=HttpFunction(**{name: getattr(self, name) for name in HttpFunction.__dataclass_fields__}),
        )


class _Judge(_Declared):
    name: str
    description: str = ""
    prompt: Annotated[Template, Field(min_length=1)]
    system: Template = ""
    model: str = "default"
    endpoints: tuple[Url, ...] = ()
    service: str = ""
    authorization_from_env: str = ""
    score: Annotated[str, AfterValidator(_score_pattern)] = Judge.score
    low: float = 0.0
    high: float = 10.0
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_tokens: Count = 1024
    tries: Count = 3
    at_once: Count = 64
    wall_s: Seconds = 300.0
    provider: str = ""

    @model_validator(mode="after")
    def _can_be_asked(self) -> "_Judge":
        if bool(self.endpoints) == bool(self.service):
            raise ValueError("name `endpoints`, or a GPU `service`: one of the two")
        if not self.low < self.high:
            raise ValueError("`low` must be below `high`")
        return self

    def tool(self) -> Tool:
        """A reward whose arguments are what the judge's templates name."""
        judge = Judge(**{name: getattr(self, name) for name in Judge.__dataclass_fields__})
        return Tool(
            name=self.name,
            kind=Kind.REWARD,
            description=self.description,
            entry="",
            arguments_schema={
                "type": "object",
                "properties": {name: {} for name in judge.arguments},
                "required": list(judge.arguments),
                "additionalProperties": False,
            },
            limits=Limits(wall_s=self.wall_s),
            provider=self.provider,
            remote=judge,
        )


class _Gpus(_Declared):
    gpu_bytes: Annotated[int, Field(gt=0)]
    nodes: Annotated[dict[str, list[GpuNumber]], Field(min_length=1)]
    turn_s: Annotated[float, Field(ge=0)] = 30.0


class _Server(_Declared):
    node: str
    first: int
    degree: int
    url: Url


class _GpuService(_Declared):
    name: Annotated[str, Field(min_length=1)]
    bytes_per_gpu: Annotated[dict[int, int], Field(min_length=1)]
    servers: list[_Server]
    serial_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    at_once: Count = 64

    @model_validator(mode="after")
    def _degrees_agree(self) -> "_GpuService":
        served = {server.degree for server in self.servers}
        if served != set(self.bytes_per_gpu):
            raise ValueError(
                f"servers are of {sorted(served)} GPUs, `bytes_per_gpu` is of {sorted(self.bytes_per_gpu)}: "
                "name the same"
            )
        return self

    def service(self) -> GpuService:
        servers = tuple(Server(self.name, one.degree, one.node, one.first, one.url.rstrip("/")) for one in self.servers)
        return GpuService(self.name, self.bytes_per_gpu, servers, self.serial_share, self.at_once)


class _File(_Declared):
    function: list[_Function] = []
    judge: list[_Judge] = []
    gpus: _Gpus | None = None
    gpu_service: list[_GpuService] = []

    @model_validator(mode="after")
    def _services_are_there(self) -> "_File":
        if self.gpu_service and self.gpus is None:
            raise ValueError("`gpu_service` needs `[gpus]`: gpu_bytes and nodes")
        for judge in self.judge:
            if judge.service and judge.service not in {service.name for service in self.gpu_service}:
                raise ValueError(f"judge {judge.name!r}: there is no gpu_service {judge.service!r}")
        return self

    def all_gpus(self) -> Gpus:
        """Raises DeclarationError where a chunk of GPUs that a service may be given has no server."""
        if self.gpus is None:
            return NO_GPUS
        nodes = {node: tuple(sorted(set(numbers))) for node, numbers in self.gpus.nodes.items()}
        for service in self.gpu_service:
            for degree in service.bytes_per_gpu:
                there = sorted((one.node, one.first) for one in service.servers if one.degree == degree)
                wanted = sorted(places(nodes, degree))
                if not wanted:
                    raise DeclarationError(f"gpu_service {service.name!r}: no node has {degree} GPUs side by side")
                if there != wanted:
                    raise DeclarationError(
                        f"gpu_service {service.name!r}: any chunk of {degree} GPUs may be its own, so servers must be "
                        f"at {wanted} (node, first); they are at {there}"
                    )
        services = tuple(service.service() for service in self.gpu_service)
        return Gpus(nodes, self.gpus.gpu_bytes, services, self.gpus.turn_s)


@dataclass(frozen=True)
class Declarations:
    """What a file declares: tools and rewards, and the GPU services that judges may name."""

    tools: tuple[Tool, ...] = ()
    gpus: Gpus = NO_GPUS


def read_declarations(path: Path, hosts: tuple[str, ...], environment: Mapping[str, str]) -> Declarations:
    """What `path` declares. hosts: where functions, judges and servers may be. Raises DeclarationError."""
    file = _parse(path)
    try:
        for function in file.function:
            _require_usable(
                f"function {function.name!r}", [function.url], function.headers_from_env, hosts, environment
            )
        for judge in file.judge:
            headers = {"Authorization": judge.authorization_from_env} if judge.authorization_from_env else {}
            _require_usable(f"judge {judge.name!r}", judge.endpoints, headers, hosts, environment)
        gpus = file.all_gpus()
        _require_usable("gpu_service", [server.url for server in gpus.servers], {}, hosts, environment)
    except DeclarationError as error:
        raise DeclarationError(f"{path}: {error}") from None
    return Declarations(tuple(one.tool() for one in file.function) + tuple(one.tool() for one in file.judge), gpus)


def _parse(path: Path) -> _File:
    try:
        text = path.read_text()
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise DeclarationError(f"cannot be read: {error}") from None
    except ValueError as error:
        raise DeclarationError(f"{path} is no {path.suffix.removeprefix('.') or 'toml'}: {error}") from None
    try:
        return _File.model_validate(document)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        parts = [
            str(path),
            ".".join(str(part) for part in problem["loc"]),
            problem["msg"].removeprefix("Value error, "),
        ]
        raise DeclarationError(": ".join(filter(None, parts))) from None


def _require_usable(
    where: str,
    urls: Iterable[str],
    headers: Mapping[str, str],
    hosts: tuple[str, ...],
    environment: Mapping[str, str],
) -> None:
    """Raises DeclarationError for a host that is not allowed and for a header whose variable is not set."""
    for one in urls:
        if not is_allowed(one, hosts):
            host = urlsplit(one).hostname or ""
            raise DeclarationError(
                f"{where}: host {host!r} of {one!r} is not allowed: name it in TREADLE_TOOLS_FUNCTION_HOSTS"
            )
    for header, variable in headers.items():
        if variable not in environment:
            raise DeclarationError(f"{where}: header {header!r} is to come from {variable}, which is not set")


def is_allowed(url: str, hosts: tuple[str, ...]) -> bool:
    """Whether the URL's host is among `hosts`: `example.org` allows that host at any port, `example.org:8080` at that
    port, `*.svc.cluster.local` every host below.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return any(_allows(rule, host, port) for rule in hosts)


def _allows(rule: str, host: str, port: int) -> bool:
    name, colon, wanted = rule.rpartition(":")
    if colon and wanted.isdigit():
        return _matches(name, host) and int(wanted) == port
    return _matches(rule, host)


def _matches(name: str, host: str) -> bool:
    if name.startswith("*."):
        return host.endswith(name[1:]) and len(host) > len(name) - 1
    return host == name.strip("[]").lower()
