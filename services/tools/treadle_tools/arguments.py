"""Arguments of a call: JSON text to a checked object, or InvalidArgument naming the argument."""

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from treadle_runtime.errors import InvalidArgument

from treadle_tools.tool import Result

FIELD = "arguments_json"
LARGEST_BYTES = 1024 * 1024  # code and answers are kilobytes; a worker's frame and its JSON parser hold a few copies

Checked = dict[str, Any]


def refuse_invalid(result: Result) -> None:
    """Raises InvalidArgument where the tool refused an argument."""
    if result.invalid is not None:
        name, description = result.invalid
        raise InvalidArgument(f"{FIELD}.{name}", description)


def checked(text: str, validator: Validator) -> Checked:
    """The object in `text` ({} where it is empty), which fits the schema. Raises InvalidArgument."""
    if len(text) > LARGEST_BYTES:
        raise InvalidArgument(FIELD, f"must be at most {LARGEST_BYTES} characters, is {len(text)}")
    try:
        arguments = json.loads(text or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(FIELD, f"is no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidArgument(FIELD, f"must be a JSON object, is {type(arguments).__name__}")
    problem = best_match(validator.iter_errors(arguments))
    if problem is not None:
        raise InvalidArgument(".".join((FIELD, *_path(problem))), problem.message)
    return arguments


def _path(problem: jsonschema.ValidationError) -> list[str]:
    """Where the problem is; a property that is missing, or one too many, is named itself."""
    path = [str(part) for part in problem.absolute_path]
    found, rule, schema = problem.instance, problem.validator_value, problem.schema
    if isinstance(found, dict) and isinstance(schema, Mapping):
        if problem.validator == "required" and isinstance(rule, list):
            path += [name for name in rule if name not in found][:1]
        elif problem.validator == "additionalProperties":
            path += [name for name in found if name not in schema.get("properties", {})][:1]
    return path


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
