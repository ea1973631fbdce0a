"""Turn a conversation into token ids, and an answer's text into a message, by the model's own
template and parsers.

The engines render and parse, so that SGLang alone knows templates and tool-call formats. In a
session that continues, what the model sampled keeps its token ids, and only the text after them is
tokenised.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle_gateway.engines import EngineAway, Engines
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
        rendered: list[int] = (await self._ask("/tokenize", request))["tokens"]
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
        reasoning, calls = "", []
        if reasoning_parser:
            answer = await self._ask(
                "/separate_reasoning", {"text": text, "reasoning_parser": reasoning_parser}
            )
            reasoning, text = answer["reasoning_text"] or "", answer["text"] or ""
        if tools and tool_parser:
            question = {"text": text, "tools": tools, "tool_call_parser": tool_parser}
            answer = await self._ask("/parse_function_call", question)
            text = answer["normal_text"] or ""
            calls = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["parameters"]},
                }
                for call in answer["calls"]
            ]
        return Message(text, reasoning, calls)

    async def _names(self) -> tuple[str, str]:
        if self._found is None:
            server = {} if all(self._parsers) else await self._ask("/server_info", None)
            tool, reasoning = self._parsers
            self._found = (
                tool or server.get("tool_call_parser") or "",
                reasoning or server.get("reasoning_parser") or "",
            )
        return self._found

    async def _ask(self, path: str, body: object) -> Any:
        try:
            return await self._engines.ask_any("GET" if body is None else "POST", path, body)
        except EngineAway as error:
            raise Refused(str(error), 503) from error
