"""What a function's answer means: an HTTP reply as a Result.

A JSON object with `output` is an outcome as `tool.Outcome` has it (output, reward, done, data, error); any other JSON
is data, and its text the output; everything else is text. Of a reward, a number is the score, and so is `score` or
`reward` of an object.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treadle_tools.remote.caller import Reply
from treadle_tools.remote.function import CallFailed
from treadle_tools.tool import Kind, Result, Status

REWARD_FIELDS = ("reward", "score")


def result_of(reply: Reply, kind: Kind, output_bytes: int) -> Result:
    """The Result of an answer; one that cannot be read is a TOOL_ERROR."""
    body = reply.body.decode("utf-8", "replace")
    if "json" not in reply.content_type:
        return _cut(Result(Status.OK, output=body), output_bytes)
    try:
        value = json.loads(body)
    except ValueError as error:
        return Result(Status.TOOL_ERROR, error=f"the answer says it is JSON and is none: {error}")
    reward = _reward(value) if kind is Kind.REWARD else None
    if isinstance(value, Mapping) and isinstance(value.get("output"), str):
        return _cut(_outcome(value, reward), output_bytes)
    return _cut(Result(Status.OK, output=body, data_json=json.dumps(value), reward=reward), output_bytes)


def failed(error: CallFailed) -> Result:
    """The Result of a call without an answer."""
    tried = f" ({error.tries} tries)" if error.tries > 1 else ""
    return Result(Status.TIMED_OUT if error.timed_out else Status.TOOL_ERROR, error=f"{error}{tried}")


def _outcome(value: Mapping[str, Any], reward: float | None) -> Result:
    error = str(value.get("error") or "")
    return Result(
        Status.TOOL_ERROR if error else Status.OK,
        output=value["output"],
        error=error,
        reward=reward if reward is not None else _number(value.get("reward")),
        done=value.get("done") is True,
        data_json=json.dumps(value["data"]) if value.get("data") is not None else "",
    )


def _reward(value: Any) -> float | None:
    if isinstance(value, Mapping):
        value = next((value[name] for name in REWARD_FIELDS if name in value), None)
    return _number(value)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _cut(result: Result, output_bytes: int) -> Result:
    encoded = result.output.encode("utf-8", "backslashreplace")
    if len(encoded) <= output_bytes:
        return result
    text = encoded[:output_bytes].decode("utf-8", "ignore")
    return replace(result, output=f"{text}\n[output cut at {output_bytes} bytes]", truncated=True)
