"""Which tools there are: the built-in ones and those of the modules named in the settings.

Invariants: names are unique and identifiers, schemas are valid JSON Schema, limits are positive. A module that breaks
one, or cannot be imported, is refused at start.
"""

import importlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from treadle_core.tools.action import InvalidActionError
from treadle_runtime.errors import InvalidArgument, NotFound, identifier

from treadle_tools.arguments import Checked, checked
from treadle_tools.rewards.judge import Judge
from treadle_tools.scheduling.demand import check_scaling
from treadle_tools.tool import Kind, Tool

BACKENDS = ("", "bubblewrap", "docker", "kubernetes")


class RegistrationError(Exception):
    """A tool or a module of tools is not usable; the message says which and why."""


class Registry:
    """Tools by name. providers: whom they may call. networks: that they may name. Raises RegistrationError."""

    def __init__(self, tools: Iterable[Tool], providers: Collection[str] = (), networks: Collection[str] = ()) -> None:
        self._providers = providers
        self._networks = networks
        self._tools: dict[str, Tool] = {}
        self._arguments: dict[str, Validator] = {}
        self._opening: dict[str, Validator] = {}
        for tool in tools:
            self._add(tool)

    def _add(self, tool: Tool) -> None:
        if tool.name in self._tools:
            raise RegistrationError(f"two tools are called {tool.name!r}")
        try:
            identifier("name", tool.name)
        except InvalidArgument as error:
            raise RegistrationError(f"a tool's {error.message}") from error
        if ":" not in tool.entry and tool.remote is None:
            raise RegistrationError(f"tool {tool.name!r}: entry must be module:callable, is {tool.entry!r}")
        limits = tool.limits
        amounts = (limits.cpu_cores, limits.memory_bytes, limits.wall_s, limits.output_bytes, tool.work_bytes)
        if isinstance(tool.remote, Judge) and tool.kind is not Kind.REWARD:
            raise RegistrationError(f"tool {tool.name!r}: a judge can only be a reward")
        if tool.remote is not None and tool.kind is Kind.ENVIRONMENT:
            raise RegistrationError(f"tool {tool.name!r}: an environment cannot run in a function, which has no state")
        if min(amounts) <= 0 or tool.processes <= 0 or tool.reserve_bytes <= 0:
            raise RegistrationError(f"tool {tool.name!r}: every limit must be > 0")
        if tool.provider and tool.provider not in self._providers:
            raise RegistrationError(
                f"tool {tool.name!r}: no provider {tool.provider!r} is described in TREADLE_TOOLS_PROVIDERS_FILE"
            )
        try:
            check_scaling(tool)
        except InvalidActionError as error:
            raise RegistrationError(f"tool {tool.name!r}: scaling: {error}") from error
        if tool.backend not in BACKENDS:
            raise RegistrationError(f"tool {tool.name!r}: backend must be one of {', '.join(BACKENDS[1:])}")
        if tool.network and tool.network not in self._networks:
            raise RegistrationError(f"tool {tool.name!r}: network {tool.network!r} is not in TREADLE_TOOLS_NETWORKS")
        self._arguments[tool.name] = _validator(tool, tool.arguments_schema)
        self._opening[tool.name] = _validator(tool, tool.open_schema)
        self._tools[tool.name] = tool

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def stateless(self, name: str) -> Tool:
        """A tool to invoke without a session."""
        tool = self._named(name)
        if tool.kind is not Kind.STATELESS:
            raise InvalidArgument("session_id", f"tool {name!r} is an environment: open a session and name it here")
        return tool

    def environment(self, name: str) -> Tool:
        """A tool to open a session of."""
        tool = self._named(name)
        if tool.kind is not Kind.ENVIRONMENT:
            raise InvalidArgument("tool", f"{name!r} is stateless: it has no sessions; use Invoke")
        return tool

    def reward(self, name: str) -> Tool:
        """A function that scores trajectories."""
        if not name:
            raise InvalidArgument("reward", "must not be empty")
        tool = self._tools.get(name)
        if tool is None or tool.kind is not Kind.REWARD:
            known = ", ".join(sorted(tool.name for tool in self.rewards)) or "none"
            raise NotFound(
                "REWARD_FUNCTION_NOT_FOUND", f"reward: there is no reward {name[:64]!r}; there are {known}", reward=name
            )
        return tool

    @property
    def rewards(self) -> tuple[Tool, ...]:
        """The functions that score trajectories."""
        return tuple(tool for tool in self._tools.values() if tool.kind is Kind.REWARD)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What agents may use."""
        return tuple(tool for tool in self._tools.values() if tool.kind is not Kind.REWARD)

    def _named(self, name: str) -> Tool:
        if not name:
            raise InvalidArgument("tool", "must not be empty")
        if name not in self._tools or self._tools[name].kind is Kind.REWARD:
            known = ", ".join(sorted(tool.name for tool in self.tools))
            raise NotFound("TOOL_NOT_FOUND", f"tool: there is no tool {name[:64]!r}; there are {known}", tool=name)
        return self._tools[name]

    def step_arguments(self, tool: Tool, text: str) -> Checked:
        """Arguments of one call or step. Raises InvalidArgument naming what is wrong."""
        return checked(text, self._arguments[tool.name])

    def open_arguments(self, tool: Tool, text: str) -> Checked:
        """Arguments that open a session. Raises InvalidArgument naming what is wrong."""
        return checked(text, self._opening[tool.name])


def load(
    builtin: Iterable[Tool], modules: Iterable[str], providers: Collection[str] = (), networks: Collection[str] = ()
) -> Registry:
    """The tools of `builtin` and the `TOOLS` of each module. Raises RegistrationError."""
    tools = list(builtin)
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise RegistrationError(f"module {name!r} cannot be imported: {error}") from error
        found = getattr(module, "TOOLS", None)
        if not isinstance(found, list | tuple) or not all(isinstance(tool, Tool) for tool in found):
            raise RegistrationError(f"module {name!r} has no TOOLS: a list of treadle_tools.tool.Tool")
        tools += found
    return Registry(tools, providers, networks)


def _validator(tool: Tool, schema: Mapping[str, Any]) -> Validator:
    try:
        jsonschema.Draft202012Validator.check_schema(dict(schema))
    except jsonschema.SchemaError as error:
        raise RegistrationError(f"tool {tool.name!r}: its schema is no JSON Schema: {error.message}") from error
    return jsonschema.Draft202012Validator(dict(schema))
