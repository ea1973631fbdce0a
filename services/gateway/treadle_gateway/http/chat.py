"""Turn a conversation into token ids, and an answer's text into a message, by the model's own
template and parsers.

The engines render and parse, so that SGLang alone knows templates and tool-call formats. In a
session that continues, what the model sampled keeps its token ids, and only the text after them is
tokenised.

A request of OpenAI's /v1/responses is read as a chat: its items are messages, its tools are a
chat's tools. `as_chat` reads what agents use: texts, calls of functions and their outputs,
instructions, tools that are functions, reasoning that the caller returns. Tools that OpenAI runs
itself, files and images are refused, with the name of the field.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle_gateway.engines import Engines
from treadle_gateway.mesh import MeshLink
from treadle_gateway.order import Refused
from treadle_gateway.text import TextModel

# Fields of a chat request that its template reads.
RENDERED = (
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "continue_final_message",
    "reasoning_effort",
)
# Fields that an answer repeats, and their values where the request has none.
ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "tool_choice",
    "return_token_ids",
    "chat_template_kwargs",
    "rid",
)
# Fields that change nothing here.
IDLE = {
    "background",
    "include",
    "metadata",
    "nvext",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
}
IDLE |= {"service_tier", "session_id", "store", "text", "truncation", "user", "max_tool_calls"}
READ = {
    "input",
    "instructions",
    "tools",
    "max_output_tokens",
    "previous_response_id",
    "reasoning",
    *SAME,
}
TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
ROLES = {"developer": "system"}  # templates have no role of a developer


@dataclass(frozen=True)
class Message:
    """Message of an assistant. tool_calls: in OpenAI's form."""

    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]


class Chat:
    """Renders conversations and parses answers with the engines. `parsers`: SGLang's names of the
    tool-call and the reasoning parser; empty: what the engines were started with. retokenised:
    turns of a session whose text did not continue from the tokens that were sampled."""

    def __init__(
        self, engines: Engines, mesh: MeshLink, model: TextModel | None, parsers: tuple[str, str]
    ) -> None:
        self._engines, self._mesh, self._model, self._parsers = engines, mesh, model, parsers
        self.retokenised = 0
        self._found: tuple[str, str] | None = None

    async def render(
        self, session: str, body: Mapping[str, Any], known: Sequence[int] = ()
    ) -> list[int]:
        """Return the token ids of a conversation. known: those of its beginning, where the caller
        knows them. Raises Refused."""
        request = {name: body[name] for name in RENDERED if body.get(name) is not None}
        try:
            rendered = await self._engines.ask_any(lambda engine: engine.tokenize(request))
        except Refused as refusal:
            if refusal.status == 500 and "chat_template_kwargs" in request:
                raise Refused(f"chat_template_kwargs: {refusal}") from refusal
            raise
        if self._model is None:
            return rendered
        visit = self._mesh.visit
        beginnings = [list(known)] if known else []
        if session and visit is not None:
            beginnings += visit.sessions.known(session)
        for tokens in beginnings:
            extended = self._model.extend(tokens, rendered)
            if extended is not None:
                return extended
        self.retokenised += bool(beginnings)
        return rendered

    async def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None) -> Message:
        """Find reasoning and tool calls in an answer. Raises Refused."""
        tool_parser, reasoning_parser = await self._names()
        reasoning, found = "", list[tuple[str, str]]()
        if reasoning_parser:
            reasoning, text = await self._engines.ask_any(
                lambda engine: engine.separate_reasoning(text, reasoning_parser)
            )
        if tools and tool_parser:
            text, found = await self._engines.ask_any(
                lambda engine: engine.parse_calls(text, tools, tool_parser)
            )
        calls = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for name, arguments in found
        ]
        return Message(text, reasoning, calls)

    async def _names(self) -> tuple[str, str]:
        if self._found is None:
            server: Mapping[str, Any] = {}
            if not all(self._parsers):
                server = await self._engines.ask_any(lambda engine: engine.server_info())
            tool, reasoning = self._parsers
            self._found = (
                tool or server.get("tool_call_parser") or "",
                reasoning or server.get("reasoning_parser") or "",
            )
        return self._found


def as_chat(body: Mapping[str, Any], before: Sequence[Any]) -> dict[str, Any]:
    """Return the body of a chat. before: messages of the response from which the request continues.
    Raises Refused."""
    wanted = sorted(
        name
        for name, value in body.items()
        if name not in READ | IDLE and value not in (None, False, [])
    )
    if wanted:
        raise Refused(f"{', '.join(wanted)}: not served by /v1/responses here; leave it out")
    if not isinstance(tools := body.get("tools") or [], list):
        raise Refused("tools: must be a list")
    form = _object(_object(body, "text"), "format", "text.")
    if form.get("type", "text") != "text":
        raise Refused(f"text.format: only text is served, is {form['type']!r}")
    messages = list(before)
    if instructions := body.get("instructions"):
        # Instructions of the response before do not hold any more.
        messages = [
            {"role": "system", "content": instructions},
            *(m for m in messages if m.get("role") != "system"),
        ]
    messages += _messages(body.get("input"))
    if not messages:
        raise Refused("input: must have an item besides reasoning")
    chat = {name: body[name] for name in SAME if body.get(name) is not None}
    chat |= {"messages": messages, "tools": [_tool(at, tool) for at, tool in enumerate(tools)]}
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if effort := _object(body, "reasoning").get("effort"):
        chat["reasoning_effort"] = effort
    if chat.get("tool_choice", "auto") not in ("auto", "none"):
        raise Refused(
            "tool_choice: auto or none; /v1/chat/completions serves the others, by an engine's "
            "grammar"
        )
    return chat


def said_message(said: Message) -> dict[str, Any]:
    """Return an answer as a message of the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.tool_calls:
        message["tool_calls"] = said.tool_calls
    return message


def _object(body: Mapping[str, Any], name: str, path: str = "") -> Mapping[str, Any]:
    """Return the object in a field; empty where there is none. Raises Refused."""
    found = body.get(name) or {}
    if not isinstance(found, dict):
        raise Refused(f"{path}{name}: must be an object, is {found!r}")
    return found


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise Refused("input: must be a text or a list of items, at least one")
    found: list[dict[str, Any]] = []
    for message in (each for at, item in enumerate(given) for each in _item(at, item)):
        # Calls of one turn, and the text before them, are one message.
        calls, last = message.get("tool_calls"), found[-1] if found else {}
        if calls and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(calls)
        else:
            found.append(message)
    return found


def _item(at: int, item: Any) -> Iterator[dict[str, Any]]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = str(item.get("role", "user"))
        yield {
            "role": ROLES.get(role, role),
            "content": _text(f"input[{at}].content", item.get("content")),
        }
    elif kind == "function_call":
        function = {"name": str(item.get("name")), "arguments": str(item.get("arguments") or "{}")}
        call = {"id": str(item.get("call_id")), "type": "function", "function": function}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
    elif kind == "function_call_output":
        output = _text(f"input[{at}].output", item.get("output"))
        yield {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output}
    elif kind != "reasoning":  # templates leave reasoning out of earlier turns
        raise Refused(
            f"input[{at}].type: message, function_call, function_call_output or reasoning, is "
            f"{kind!r}"
        )


def _text(field: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and part.get("type") in TEXTS for part in parts):
        raise Refused(f"{field}: must be a text, or parts that are texts")
    return "".join(str(part.get("text", part.get("refusal", ""))) for part in parts)


def _tool(at: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not tool.get("name"):
        raise Refused(
            f"tools[{at}]: must be a function with a name; tools that OpenAI runs itself are not "
            "here"
        )
    function = {
        name: tool[name]
        for name in ("name", "description", "parameters", "strict")
        if tool.get(name)
    }
    return {"type": "function", "function": function}
