"""Reads a file of HTTP functions and LLM judges, TOML or JSON by its name's end, into tools.

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

Invariant: what is read is whole: a misspelled field, a header whose variable is not set or a host that is not allowed
is refused at start, in one line that names it.

Which hosts functions may be called at: those named in the settings, and no other.

`example.org` allows that host at any port, `example.org:8080` at that one, `*.svc.cluster.local` every host below."""

import json
import re
import string
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from treadle_runtime.config import url

from treadle_tools.gpu.declared import DeclaredGpus, DeclaredService, gpus_of
from treadle_tools.gpu.servers import NO_GPUS, Gpus
from treadle_tools.remote.function import MIB, HttpFunction
from treadle_tools.rewards.judge import Judge
from treadle_tools.tool import Kind, Limits, Tool


class HostRefused(Exception):  # noqa: N818 - the finding, as callers speak of it
    """The URL's host is not among those allowed; the message says which setting would allow it."""


def check_host(url: str, allowed: tuple[str, ...]) -> None:
    """Raises HostRefused."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not any(_allows(rule, host, port) for rule in allowed):
        raise HostRefused(f"host {host!r} of {url!r} is not allowed: name it in TREADLE_TOOLS_FUNCTION_HOSTS")


def _allows(rule: str, host: str, port: int) -> bool:
    name, colon, wanted = rule.rpartition(":")
    if colon and wanted.isdigit():
        return _matches(name, host) and int(wanted) == port
    return _matches(rule, host)


def _matches(name: str, host: str) -> bool:
    if name.startswith("*."):
        return host.endswith(name[1:]) and len(host) > len(name) - 1
    return host == name.strip("[]").lower()


KINDS = {"tool": Kind.STATELESS, "reward": Kind.REWARD}


class DeclarationError(Exception):
    """The file is not usable; the message says where and why."""


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Limits(_Declared):
    wall_s: float = Field(default=120.0, gt=0)
    output_bytes: int = Field(default=64 * 1024, gt=0)


class _Function(_Declared):
    name: str
    kind: Literal["tool", "reward"] = "tool"
    description: str = ""
    arguments_schema: dict[str, Any] = Field(default_factory=lambda: {"type": "object"})
    limits: _Limits = _Limits()
    url: str
    method: Literal["GET", "POST", "PUT"] = "POST"
    headers: dict[str, str] = {}
    headers_from_env: dict[str, str] = {}
    connect_s: float = Field(default=2.0, gt=0)
    cold_s: float = Field(default=90.0, gt=0)
    idle_s: float = Field(default=60.0, gt=0)
    learns: bool = True
    tries: int = Field(default=6, ge=1)
    idempotent: bool = True
    response_bytes: int = Field(default=MIB, gt=0)
    at_once: int = Field(default=64, ge=1)
    provider: str = ""

    @field_validator("url")
    @classmethod
    def _url_is_a_url(cls, value: str) -> str:
        return url(value, ("http", "https"), "http://search.default.svc.cluster.local/")

    def tool(self) -> Tool:
        """As the registry has it."""
        own = {name: getattr(self, name) for name in HttpFunction.__dataclass_fields__}
        return Tool(
            name=self.name,
            kind=KINDS[self.kind],
            description=self.description,
            entry="",
            arguments_schema=self.arguments_schema,
            limits=Limits(wall_s=self.limits.wall_s, output_bytes=self.limits.output_bytes),
            provider=self.provider,
            remote=HttpFunction(**own),
        )


class _Judge(_Declared):
    name: str
    description: str = ""
    prompt: str = Field(min_length=1)
    system: str = ""
    model: str = "default"
    endpoints: list[str] = []
    service: str = ""
    authorization_from_env: str = ""
    score: str = Judge.score
    low: float = 0.0
    high: float = 10.0
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=1024, ge=1)
    tries: int = Field(default=3, ge=1)
    at_once: int = Field(default=64, ge=1)
    wall_s: float = Field(default=300.0, gt=0)
    provider: str = ""

    @field_validator("endpoints")
    @classmethod
    def _endpoints_are_urls(cls, value: list[str]) -> list[str]:
        return [url(one, ("http", "https"), "http://judge:30000") for one in value]

    @field_validator("prompt", "system")
    @classmethod
    def _templates_are_templates(cls, value: str) -> str:
        if not string.Template(value).is_valid():
            raise ValueError("a `$` that begins no name is written `$$`")
        return value

    @field_validator("score")
    @classmethod
    def _score_has_one_group(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"a regular expression with one group, the score; it has {groups}")
        return value

    @model_validator(mode="after")
    def _can_be_asked(self) -> "_Judge":
        if bool(self.endpoints) == bool(self.service):
            raise ValueError("name `endpoints`, or a GPU `service`: one of the two")
        if not self.low < self.high:
            raise ValueError("`low` must be below `high`")
        return self

    def tool(self) -> Tool:
        """As the registry has it: its arguments are what its templates name."""
        judge = Judge(
            **{name: getattr(self, name) for name in Judge.__dataclass_fields__ if name != "endpoints"},
            endpoints=tuple(self.endpoints),
        )
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


class _File(_Declared):
    function: list[_Function] = []
    judge: list[_Judge] = []
    gpus: DeclaredGpus | None = None
    gpu_service: list[DeclaredService] = []


@dataclass(frozen=True)
class Declarations:
    """What a file declares: tools and rewards, and the GPU services that judges may name."""

    tools: tuple[Tool, ...] = ()
    gpus: Gpus = NO_GPUS


def read_functions(path: Path, hosts: tuple[str, ...], environment: Mapping[str, str]) -> Declarations:
    """What `path` declares. Raises DeclarationError."""
    declared = _parsed(path)
    for function in declared.function:
        where = f"{path}: function {function.name!r}"
        _check(where, [function.url], function.headers_from_env, hosts, environment)
    for judge in declared.judge:
        headers = {"Authorization": judge.authorization_from_env} if judge.authorization_from_env else {}
        _check(f"{path}: judge {judge.name!r}", judge.endpoints, headers, hosts, environment)
    gpus = _gpus(path, declared)
    _check(f"{path}: gpu_service", [server.url for server in gpus.servers], {}, hosts, environment)
    for judge in declared.judge:
        if judge.service and judge.service not in {service.name for service in gpus.services}:
            raise DeclarationError(f"{path}: judge {judge.name!r}: there is no gpu_service {judge.service!r}")
    functions = tuple(function.tool() for function in declared.function)
    return Declarations(functions + tuple(judge.tool() for judge in declared.judge), gpus)


def _gpus(path: Path, declared: _File) -> Gpus:
    if declared.gpus is None:
        if declared.gpu_service:
            raise DeclarationError(f"{path}: `gpu_service` needs `[gpus]`: gpu_bytes and nodes")
        return NO_GPUS
    try:
        return gpus_of(declared.gpus, declared.gpu_service)
    except ValueError as error:
        raise DeclarationError(f"{path}: {error}") from None


def _check(
    where: str,
    urls: Iterable[str],
    headers: Mapping[str, str],
    hosts: tuple[str, ...],
    environment: Mapping[str, str],
) -> None:
    try:
        for one in urls:
            check_host(one, hosts)
    except HostRefused as error:
        raise DeclarationError(f"{where}: {error}") from None
    for header, variable in headers.items():
        if variable not in environment:
            raise DeclarationError(f"{where}: header {header!r} is to come from {variable}, which is not set")


def _parsed(path: Path) -> _File:
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
        field = ".".join(str(part) for part in problem["loc"])
        raise DeclarationError(f"{path}: {field}: {problem['msg'].removeprefix('Value error, ')}") from None
