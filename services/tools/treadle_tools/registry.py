"""Keep the tools by name, and check the arguments of their calls.

Tools are the built-in ones, those of a file of declarations and those of the modules named in the
settings. Invariants: names are unique and identifiers, schemas are valid JSON Schema, limits are
positive. A tool that breaks one, or a module that cannot be imported, is refused at start.
"""

import importlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from treadle_core.tools.action import InvalidActionError
from treadle_runtime.errors import InvalidArgument, NotFound
from treadle_runtime.fields import identifier

from treadle_tools.remote import HttpFunction, Judge
from treadle_tools.resources import check_scaling
from treadle_tools.tool import Kind, Result, Tool

BACKENDS = ("", "bubblewrap", "docker", "kubernetes")
NOT_FOUND = {"tool": "TOOL_NOT_FOUND", "reward": "REWARD_FUNCTION_NOT_FOUND"}
FIELD = "arguments_json"
# Code and answers are kilobytes; a worker's frame and its JSON parser hold a few copies
LARGEST_BYTES = 1024 * 1024

Arguments = dict[str, Any]


class RegistrationError(Exception):
    """A tool or a module of tools is not usable; the message gives which and why."""


class Registry:
    """Tools by name, with the schemas of their arguments.

    providers: those that tools may call. networks: those that tools may name. Raises
    RegistrationError.
    """

    def __init__(
        self, tools: Iterable[Tool], providers: Collection[str] = (), networks: Collection[str] = ()
    ) -> None:
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
        if problem := self._problem_of(tool):
            raise RegistrationError(f"tool {tool.name!r}: {problem}")
        self._arguments[tool.name] = _validator(tool, tool.arguments_schema)
        self._opening[tool.name] = _validator(tool, tool.open_schema)
        self._tools[tool.name] = tool

    def _problem_of(self, tool: Tool) -> str:
        """Return what keeps the tool from being used; "" where nothing does."""
        amounts = tool.limits.message().values()
        checks = {
            f"entry must be module:callable, is {tool.entry!r}": ":" in tool.entry
            or tool.remote is not None,
            "every limit must be > 0": min(
                *amounts, tool.work_bytes, tool.processes, tool.reserve_bytes
            )
            > 0,
            f"no provider {tool.provider!r} is described in TREADLE_TOOLS_PROVIDERS_FILE": (
                tool.provider in ("", *self._providers)
            ),
            f"backend must be one of {', '.join(BACKENDS[1:])}": tool.backend in BACKENDS,
            "remote: an environment runs in a sandbox": tool.remote is None
            or tool.kind is not Kind.ENVIRONMENT,
            "remote: a judge is a reward": not isinstance(tool.remote, Judge)
            or tool.kind is Kind.REWARD,
            "remote: its name and provider must be the tool's": (
                not isinstance(tool.remote, HttpFunction | Judge)
                or (tool.remote.name, tool.remote.provider) == (tool.name, tool.provider)
            ),
            f"network {tool.network!r} is not in TREADLE_TOOLS_NETWORKS": tool.network
            in ("", *self._networks),
            "reward_range must be (lowest, highest)": tool.reward_range[0] < tool.reward_range[1],
        }
        try:
            check_scaling(tool)
        except InvalidActionError as error:
            return f"scaling: {error}"
        return next((problem for problem, is_right in checks.items() if not is_right), "")

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def stateless(self, name: str) -> Tool:
        """Return the tool to invoke without a session."""
        tool = self._find("tool", name)
        if tool.kind is not Kind.STATELESS:
            raise InvalidArgument(
                "session_id", f"tool {name!r} is an environment: open a session and name it here"
            )
        return tool

    def environment(self, name: str) -> Tool:
        """Return the tool of which a session is to be opened."""
        tool = self._find("tool", name)
        if tool.kind is not Kind.ENVIRONMENT:
            raise InvalidArgument("tool", f"{name!r} is stateless: it has no sessions; use Invoke")
        return tool

    def reward(self, name: str) -> Tool:
        """Return the function that scores trajectories."""
        return self._find("reward", name)

    @property
    def rewards(self) -> tuple[Tool, ...]:
        """Return the functions that score trajectories."""
        return tuple(tool for tool in self._tools.values() if tool.kind is Kind.REWARD)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Return the tools that agents may use."""
        return tuple(tool for tool in self._tools.values() if tool.kind is not Kind.REWARD)

    def _find(self, field: str, name: str) -> Tool:
        """Return a tool by its name. field: "tool" or "reward", each of which is found among its
        own kind only."""
        if not name:
            raise InvalidArgument(field, "must not be empty")
        tool = self._tools.get(name)
        if tool is not None and (tool.kind is Kind.REWARD) == (field == "reward"):
            return tool
        among = self.rewards if field == "reward" else self.tools
        known = ", ".join(sorted(each.name for each in among)) or "none"
        message = f"{field}: there is no {field} {name[:64]!r}; there are {known}"
        raise NotFound(NOT_FOUND[field], message, **{field: name})

    def step_arguments(self, tool: Tool, text: str) -> Arguments:
        """Return the arguments of one call or step. Raises InvalidArgument naming what is wrong."""
        return check_arguments(text, self._arguments[tool.name])

    def open_arguments(self, tool: Tool, text: str) -> Arguments:
        """Return the arguments that open a session. Raises InvalidArgument naming what is wrong."""
        return check_arguments(text, self._opening[tool.name])


def _validator(tool: Tool, schema: Mapping[str, Any]) -> Validator:
    try:
        jsonschema.Draft202012Validator.check_schema(dict(schema))
    except jsonschema.SchemaError as error:
        raise RegistrationError(
            f"tool {tool.name!r}: its schema is no JSON Schema: {error.message}"
        ) from error
    return jsonschema.Draft202012Validator(dict(schema))


def load_registry(
    tools: Iterable[Tool],
    modules: Iterable[str],
    providers: Collection[str] = (),
    networks: Collection[str] = (),
) -> Registry:
    """Return a registry of `tools` and of the `TOOLS` of each module. Raises RegistrationError."""
    every = list(tools)
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise RegistrationError(f"module {name!r} cannot be imported: {error}") from error
        found = getattr(module, "TOOLS", None)
        if not isinstance(found, list | tuple) or not all(isinstance(tool, Tool) for tool in found):
            raise RegistrationError(
                f"module {name!r} has no TOOLS: a list of treadle_tools.tool.Tool"
            )
        every += found
    return Registry(every, providers, networks)


def refuse_invalid(result: Result) -> None:
    """Raise InvalidArgument where the tool refused an argument."""
    if result.invalid is not None:
        name, description = result.invalid
        raise InvalidArgument(f"{FIELD}.{name}", description)


def check_arguments(text: str, validator: Validator) -> Arguments:
    """Return the JSON object in `text` ({} where it is empty).

    Raises InvalidArgument naming what does not fit the schema.
    """
    if len(text) > LARGEST_BYTES:
        raise InvalidArgument(FIELD, f"must be at most {LARGEST_BYTES} characters, is {len(text)}")
    try:
        arguments = json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(FIELD, f"is no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidArgument(FIELD, f"must be a JSON object, is {type(arguments).__name__}")
    if (problem := best_match(validator.iter_errors(arguments))) is not None:
        raise InvalidArgument(".".join((FIELD, *_path(problem))), problem.message)
    return arguments


def _path(problem: jsonschema.ValidationError) -> list[str]:
    """Return where the problem is; a property that is missing, or one too many, is named itself."""
    path = [str(part) for part in problem.absolute_path]
    found, rule, schema = problem.instance, problem.validator_value, problem.schema
    if isinstance(found, dict) and isinstance(schema, Mapping):
        if problem.validator == "required" and isinstance(rule, list):
            path += [name for name in rule if name not in found][:1]
        elif problem.validator == "additionalProperties":
            path += [name for name in found if name not in schema.get("properties", {})][:1]
    return path


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
