"""Read the answers of code that nobody trusts: in a sandbox, or behind a URL.

Invariants: whatever was sent, the outcome is a Result whose fields have their types, sizes and
ranges. An answer that breaks them is that one call's CRASHED (of a sandbox) or TOOL_ERROR (of a
function). Fields that a kind of tool does not decide are left out: code that a caller sends to the
`python` tool can answer in that tool's place, and gets output, error and status, which it could
print anyway.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from treadle_tools.tool import Kind, Result, Status, Tool

MOST_ERROR_BYTES = 4 * 1024
MOST_DATA_BYTES = 1024 * 1024
MOST_NAME_BYTES = 256  # of an argument that a tool refuses
CUT_MARK_BYTES = 64  # of the line that marks an output as cut
# Of a pause that a tool's provider requests; quotas of a day are the longest in use
LONGEST_REST_S = 86_400.0
# Reported of every action, also by its host
HOSTED = ("alive", "truncated", "execution_s", "cpu_s", "output", "error")
SAYS: Mapping[Kind, tuple[str, ...]] = {
    Kind.STATELESS: ("reward", "data_json", "invalid", "retry_after_s"),
    Kind.ENVIRONMENT: ("reward", "done", "data_json", "invalid", "retry_after_s"),
    Kind.REWARD: ("reward", "data_json", "invalid", "retry_after_s"),
}


class BadReply(Exception):  # noqa: N818 - what the answer is, as callers speak of it
    """The answer breaks its contract; the message names the field and what it must be."""


@dataclass(frozen=True)
class Reply:
    """Answer of a function, of status 2xx. waited_s: until the try that got it began."""

    body: bytes
    content_type: str
    waited_s: float = 0.0


def result_of(reply: Mapping[str, Any], tool: Tool, output_bytes: int) -> Result:
    """Return the Result of a sandbox's answer."""
    try:
        return _read(reply, tool, output_bytes)
    except BadReply as bad:
        alive = reply.get("alive") is True
        return Result(Status.CRASHED, error=f"the tool's answer is not valid: {bad}", alive=alive)


def _read(reply: Mapping[str, Any], tool: Tool, output_bytes: int) -> Result:
    says = HOSTED if tool.runs_code else (*HOSTED, *SAYS[tool.kind])
    said = {name: READ[name](name, reply[name]) for name in says if reply.get(name) is not None}
    try:
        status = Status(reply.get("status", ""))
    except ValueError:
        raise BadReply(f"status must be one of {', '.join(Status)}") from None
    said["output"], _ = cut(said.get("output", ""), output_bytes + CUT_MARK_BYTES)
    refused_s = said.pop("retry_after_s", None)
    if "reward" in said:
        said["reward"] = in_range(said["reward"], tool.reward_range)
    result = Result(status, **said)
    if refused_s is None:
        return result
    refused_s = min(refused_s, LONGEST_REST_S)
    if status is Status.OK:
        error = result.error or f"the provider refuses for {refused_s:g} s"
        result = replace(result, status=Status.TOOL_ERROR, error=error)
    # Else there is nobody to leave alone
    return replace(result, refused_s=refused_s) if tool.provider else result


def result_of_function(reply: Reply, tool: Tool, output_bytes: int) -> Result:
    """Return the Result of an HTTP answer.

    A JSON object with `output` has the fields of `tool.Outcome` (output, reward, done, data,
    error); any other JSON is data, and its text the output; all else is text. A reward's score is a
    number, or an object's `score` or `reward`.
    """
    body = reply.body.decode("utf-8", "replace")
    if "json" not in reply.content_type:
        return _cut_output(Result(Status.OK, output=body), output_bytes)
    try:
        return _cut_output(_read_outcome(body, tool), output_bytes)
    except BadReply as bad:
        return Result(Status.TOOL_ERROR, error=f"the answer is not valid: {bad}")


def _read_outcome(body: str, tool: Tool) -> Result:
    value = read_json("the answer, which says that it is JSON,", body)
    fields = value if isinstance(value, dict) else {}
    is_outcome = isinstance(fields.get("output"), str)
    if tool.kind is Kind.REWARD:
        score = fields.get("reward", fields.get("score")) if isinstance(value, dict) else value
    else:
        score = fields.get("reward") if is_outcome else None
    reward = None
    if isinstance(score, int | float) and not isinstance(score, bool):
        reward = in_range(_number("reward", score), tool.reward_range)
    if not is_outcome:
        return Result(
            Status.OK, output=body, data_json=_data_json("data", json.dumps(value)), reward=reward
        )
    problem = str(fields.get("error") or "")
    return Result(
        Status.TOOL_ERROR if problem else Status.OK,
        output=fields["output"],
        error=cut(problem, MOST_ERROR_BYTES)[0],
        reward=reward,
        done=fields.get("done") is True,
        data_json=_data_json("data", json.dumps(fields["data"]))
        if fields.get("data") is not None
        else "",
    )


def read_json(what: str, text: str) -> Any:
    """Parse JSON, which has no NaN and no infinity.

    Raises BadReply, also for what is nested too deeply to be read.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"{what} must be JSON: {cut(str(error), MOST_NAME_BYTES)[0]}") from None


def in_range(reward: float, reward_range: tuple[float, float]) -> float:
    """Return the reward. Raises BadReply where it is not within the range, ends included."""
    low, high = reward_range
    if not low <= reward <= high:
        raise BadReply(f"reward must be from {low:g} to {high:g}, is {reward:g}")
    return reward


def cut(text: str, most_bytes: int) -> tuple[str, bool]:
    """Cut the text to so many bytes of UTF-8; return it, and whether it was longer."""
    if 4 * len(text) <= most_bytes:
        return text, False
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) <= most_bytes:
        return text, False
    return encoded[:most_bytes].decode("utf-8", "ignore"), True


def _cut_output(result: Result, output_bytes: int) -> Result:
    output, was_cut = cut(result.output, output_bytes)
    if not was_cut:
        return result
    return replace(result, output=f"{output}\n[output cut at {output_bytes} bytes]", truncated=True)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadReply(f"{name} must be true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadReply(f"{name} must be text")
    return value


def _error(name: str, value: Any) -> str:
    return cut(_text(name, value), MOST_ERROR_BYTES)[0]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadReply(f"{name} must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadReply(f"{name} must be finite")
    return number


def _seconds(name: str, value: Any) -> float:
    return max(0.0, _number(name, value))


def _data_json(name: str, value: Any) -> str:
    text = _text(name, value)
    if cut(text, MOST_DATA_BYTES)[1]:
        raise BadReply(f"{name} must have at most {MOST_DATA_BYTES} bytes")
    if text:
        read_json(name, text)
    return text


def _refusal(name: str, value: Any) -> tuple[str, str]:
    if not isinstance(value, list | tuple) or [type(each) for each in value] != [str, str]:
        raise BadReply(f"{name} must be an argument's name and what is wrong with it")
    return cut(value[0], MOST_NAME_BYTES)[0], cut(value[1], MOST_ERROR_BYTES)[0]


READ: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("truncated", "done", "alive"), _flag),
    **dict.fromkeys(("execution_s", "cpu_s", "retry_after_s"), _seconds),
    "output": _text,
    "error": _error,
    "reward": _number,
    "data_json": _data_json,
    "invalid": _refusal,
}
