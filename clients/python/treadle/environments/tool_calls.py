"""Read the tool calls that a policy wrote, and write replies and results as messages of a
conversation.

Two forms are known: JSON between <tool_call> and </tool_call>, a call each (Hermes, Qwen), and a
reply that is nothing but one call as JSON (Llama 3, whose first word may be <|python_tag|>). For
another model, give EnvManager a `read_calls`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from treadle.environments.episode import Message, Reply, ToolCall
from treadle.types import ToolResult

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
# of json.loads: also numbers of 4,300 digits, and a thousand brackets
_UNREADABLE = (ValueError, RecursionError)


def read_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls of a reply, in order; none where it has none. A call that cannot be read has
    an `error`."""
    tagged = _TAGGED.findall(text)
    if tagged:
        return [_read(body, f"call_{place}") for place, body in enumerate(tagged)]
    bare = text.removeprefix(_PYTHON_TAG).strip()
    return [_read(bare, "call_0")] if bare.startswith("{") and '"name"' in bare else []


def message_of(reply: Reply) -> Message:
    """Make the assistant's message from a reply, as OpenAI's chat writes it."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in reply.tool_calls
        ]
    return message


def result_message(call: ToolCall, output: str) -> Message:
    """Make the message in which the policy reads the output of a call."""
    return {"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": output}


def text_of(result: ToolResult) -> str:
    """Return what the policy reads of a tool of the mesh: its output, and where it failed, why."""
    return (
        result.output
        if result.ok
        else f"error: {result.error or result.status}\n{result.output}".rstrip()
    )


def _read(body: str, call_id: str) -> ToolCall:
    try:
        call = json.loads(body)
    except _UNREADABLE as error:
        return ToolCall("", {}, call_id, f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, call_id, 'the call must be {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(
        arguments, str
    ):  # some models write the arguments as JSON in a text, as OpenAI's API does
        try:
            arguments = json.loads(arguments)
        except _UNREADABLE as error:
            return ToolCall(call["name"], {}, call_id, f"the arguments are no JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, call_id, "the arguments must be a JSON object")
    return ToolCall(call["name"], arguments, call_id)
