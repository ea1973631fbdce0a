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

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treadle_gateway.engines import Engines
from treadle_gateway.mesh import MeshLink
from treadle_gateway.order import Refused
from treadle_gateway.text import TextModel, require_model

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
# Fields of a chat on which it depends whether its answer begins within its reasoning.
THINKING = ("chat_template_kwargs", "reasoning_effort")
# Marks with which reasoning begins, in SGLang's parsers.
STARTS = ("<think>", "[THINK]", "<mm:think>", "\u25c1think\u25b7", "<|START_THINKING|>")
# SGLang's reasoning parsers that read special tokens.
KEEPS_SPECIAL = frozenset({"apertus2509", "gemma4", "gpt-oss", "inkling", "kimi_k3", "muse"})
HELD_CHARACTERS = 32  # at least as long as a mark that separates reasoning
REMEMBERED_ASKS = 100
TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
ROLES = {"developer": "system"}  # templates have no role of a developer


@dataclass(frozen=True)
class Message:
    """Message of an assistant, or a part of one. tool_calls: in OpenAI's form."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """The way in which texts of one chat become messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the answer may call."""
    tool_parser: str = ""
    reasoning_parser: str = ""
    start: str = ""
    """This text goes before an answer that begins within its reasoning, which the parser would not
    know otherwise."""
    only_after: str = ""
    """An answer without this text has no reasoning, though the parser would take all of it as
    one."""
    streams_reasoning: bool = True
    """A stream has reasoning as it comes; else once it is complete."""
    keeps_special: bool = False
    """The parsers read special tokens."""

    @property
    def parses(self) -> bool:
        """Return whether a text is more than content."""
        return bool(self.tool_parser or self.reasoning_parser)


@dataclass(frozen=True)
class _Parsers:
    """Parsers and habits of the engines that concern chats."""

    tool: str
    """SGLang's name of the parser of tool calls; empty where there is none."""
    reasoning: str
    """SGLang's name of the reasoning parser; empty where there is none."""
    start: str
    """Reasoning begins with this text, where it is known."""
    assumes: bool
    """The reasoning parser takes a text without a start as reasoning."""
    fills: bool
    """A chat gets sampling values from the model's files."""


class Chat:
    """Renders conversations and parses answers with the engines. `names`: SGLang's names of the
    tool-call and the reasoning parser; empty: what the engines were started with. retokenised:
    turns of a session whose text did not continue from the tokens that were sampled."""

    def __init__(
        self, engines: Engines, mesh: MeshLink, model: TextModel | None, names: tuple[str, str]
    ) -> None:
        self._engines, self._mesh, self._model, self._names = engines, mesh, model, names
        self.retokenised = 0
        self._parsers: _Parsers | None = None
        self._thinks: dict[bytes, bool] = {}  # whether an answer begins within its reasoning

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

    async def fill(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a chat with the sampling values that the model's files name, where it names none,
        as SGLang fills it unless it was started with --sampling-defaults openai. Raises Refused."""
        defaults = self._model.chat_defaults if self._model is not None else {}
        lacking = {name: defaults[name] for name in defaults if body.get(name) is None}
        if not lacking or not (self._parsers or await self._find_parsers()).fills:
            return body
        return body | lacking

    async def reading(self, body: Mapping[str, Any]) -> Reading:
        """Return how the answers of a chat become messages, as SGLang's own chat does it. Raises
        Refused."""
        parsers = self._parsers or await self._find_parsers()
        effort = body.get("reasoning_effort")
        keeps = parsers.reasoning in KEEPS_SPECIAL
        keeps = keeps or (parsers.reasoning == "mistral" and effort not in (None, "none"))
        tools = body.get("tools") if body.get("tool_choice") != "none" else ()
        reading = Reading(
            tools=tools or (),
            tool_parser=parsers.tool if tools else "",
            keeps_special=keeps or bool(tools),
        )
        if not parsers.reasoning or body.get("separate_reasoning") is False:
            return reading
        thinks = await self._begins_within(body)
        return replace(
            reading,
            reasoning_parser=parsers.reasoning,
            start=parsers.start if thinks and not parsers.assumes else "",
            only_after=parsers.start if parsers.assumes and not thinks else "",
            streams_reasoning=body.get("stream_reasoning") is not False,
        )

    async def parse(self, text: str, reading: Reading) -> Message:
        """Return the message that a whole text is. Raises Refused."""
        reasoning, found = "", list[tuple[str, str]]()
        if reading.reasoning_parser and reading.only_after in text:
            reasoning, text = await self._separate(reading.start + text, reading.reasoning_parser)
        if reading.tool_parser:
            text, found = await self._engines.ask_any(
                lambda engine: engine.parse_calls(text, reading.tools, reading.tool_parser)
            )
        calls = [
            {
                "index": at,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for at, (name, arguments) in enumerate(found)
        ]
        return Message(text, reasoning, calls)

    async def parse_beginning(self, text: str, reading: Reading) -> Message:
        """Return what is certain of a message whose text goes on. Calls of tools, and the content
        beside them, are certain at the end. Raises Refused."""
        if not reading.reasoning_parser:
            return Message()
        whole = await self.parse(text, replace(reading, tool_parser=""))
        # The last characters may be the beginning of a mark.
        reasoning = whole.reasoning if whole.content.strip() else whole.reasoning[:-HELD_CHARACTERS]
        if not (reading.streams_reasoning or whole.content.strip()):
            reasoning = ""
        return Message("" if reading.tool_parser else whole.content[:-HELD_CHARACTERS], reasoning)

    async def _separate(self, text: str, parser: str) -> tuple[str, str]:
        return await self._engines.ask_any(lambda engine: engine.separate_reasoning(text, parser))

    async def _begins_within(self, body: Mapping[str, Any]) -> bool:
        """Return whether SGLang takes an answer as reasoning before it has a start of it, which
        depends on the template and on fields of the request. No endpoint says it, so an engine
        answers with one given token."""
        asked = {name: body[name] for name in THINKING if body.get(name) is not None}
        messages = [{"role": "user", "content": "a"}]
        if body.get("continue_final_message"):
            messages.append(body["messages"][-1])
            asked["continue_final_message"] = True
        asked["messages"] = messages
        # a caller's fields may be long, and their digest is not
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).digest()
        if key not in self._thinks:
            token = str(require_model(self._model).encode("a", special=False)[0])
            asked |= {"max_tokens": 1, "temperature": 0, "logit_bias": {token: 100}}
            try:
                said = await self._engines.ask_any(lambda engine: engine.chat(asked))
            except Refused as refusal:
                if refusal.status >= 500:
                    raise
                said = {}  # a template that takes no such chat; the answer's own marks count then
            if len(self._thinks) >= REMEMBERED_ASKS:
                self._thinks.clear()
            self._thinks[key] = bool(said.get("reasoning_content"))
        return self._thinks[key]

    async def _find_parsers(self) -> _Parsers:
        server = await self._engines.ask_any(lambda engine: engine.server_info())
        tool, reasoning = self._names
        tool = tool or server.get("tool_call_parser") or ""
        reasoning = reasoning or server.get("reasoning_parser") or ""
        start, assumes = "", False
        if reasoning:
            assumes = (await self._separate("a", reasoning))[0] == "a"
            for each in STARTS:
                if (await self._separate(f"{each}a", reasoning))[0] == "a":
                    start = each
                    break
        fills = server.get("sampling_defaults", "model") == "model"
        self._parsers = _Parsers(tool, reasoning, start, assumes, fills)
        return self._parsers


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
        raise Refused(f"text.format: only text is served, is {form['type']!r:.100}")
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
        raise Refused(f"{path}{name}: must be an object, is {found!r:.100}")
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
            f"{kind!r:.100}"
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
