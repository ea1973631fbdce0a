"""Make token ids from messages with the model's own chat template, and never tokenize again what
the policy sampled.

A template renders a whole conversation. A trajectory needs what comes after the tokens that it has,
so Chat renders a short conversation whose assistant writes MARK, and takes the text after MARK: the
end of the assistant's turn, the new messages and the beginning of the next turn. This text alone is
tokenized. Before results of tools, the assistant writes MARK as an argument of the calls that they
answer, because many templates show a result only behind its call; the syntax that closes the call
is the policy's own, and is left out. A token that ends the turn and that the policy has sampled
itself is left out too. Templates that drop earlier reasoning do so for messages before MARK, which
are not taken: the trajectory keeps what was sampled.

Some templates leave a kind of message out, and some refuse it. So messages of each new sequence of
roles are rendered once with contents that are known, and must all be found in the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from treadle.environments.episode import Message, ToolSchema, user

MARK = "TREADLE-MARK-7f3a"  # letters that no template changes; no policy reads it
_CONTENT = "TREADLE-READ-7f3a-{}-"  # of the message with this index
_OTHERWISE = "use another template, or give a Chat with a render of your own"

_TOOLS: Sequence[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
]

# (messages, tools, whether the assistant's turn begins at the end) -> text
Render = Callable[[Sequence[Message], Sequence[ToolSchema], bool], str]
_MakeReply = Callable[[Sequence[Message]], Message]  # of the messages that follow it


@dataclass(frozen=True)
class _Seam:
    """Text that the template writes after a reply, where messages of certain roles follow.

    reply: makes the reply with MARK in it. closing: text after MARK that the policy writes itself.
    text: after it, with known contents. ending: after the last message.
    """

    reply: _MakeReply
    closing: str
    text: str
    ending: str


class Chat:
    """The chat template and the tokenizer of one model.

    render: a conversation as text, special tokens included. encode: ids of such text, without
    adding special tokens. decode: text of ids, without special tokens. stop_token_ids: the ids that
    end an assistant's turn; they are added to those of each Sampling. Raises ValueError for a
    template that cannot continue a conversation, and each method does for messages that the
    template leaves out or refuses.
    """

    def __init__(
        self,
        render: Render,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self._render, self._encode, self.decode = render, encode, decode
        self.stop_token_ids = tuple(stop_token_ids)
        self._seams: dict[object, _Seam] = {}
        self._endings: dict[object, str] = {}  # of prompts: the text after the last message

    @classmethod
    def of(cls, tokenizer: Any, **template: Any) -> Chat:
        """Make a Chat from a tokenizer of `transformers`. template: variables of its chat template,
        e.g. enable_thinking=False."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat_template: take that of an instruct model, or set one"
            )

        def render(messages: Sequence[Message], tools: Sequence[ToolSchema], begins: bool) -> str:
            text: str = tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=begins,
                tokenize=False,
                **template,
            )
            return text

        def encode(text: str) -> list[int]:
            whole = text.encode(
                errors="replace"
            ).decode()  # half a character, as JSON can name it, is `?`
            return list(tokenizer.encode(whole, add_special_tokens=False))

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))

        chat, eos_id = cls(render, encode, decode), tokenizer.eos_token_id
        chat.stop_token_ids = () if eos_id is None else (eos_id,)
        special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        following, results = _probes_of([user("")]), _probes_of(_results_of(_TOOLS, 2))
        chat._learn_end(_text(following), following, (), special)
        for reply in (_calls(results), _one_call(results)):
            with suppress(ValueError):  # of a template without calls
                chat._learn_end(reply, results, _TOOLS, special)
                break
        return chat

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Return a whole prompt: the messages, and the beginning of the assistant's turn."""
        self._prove(messages, tools)
        text = self._show(messages, tools)
        _require_tools(text, tools)
        return list(self._encode(text))

    def head(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Return the tokens that all conversations have in common which begin with these messages
        and continue with a user's."""
        self._prove([*messages, user("")], tools)
        return list(self._encode(self._head_text(messages, tools)))

    def complete(
        self,
        messages: Sequence[Message],
        first: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        lead: str = "",
    ) -> list[int]:
        """Return the tokens after head(messages) where the conversation continues with `first`, up
        to the first words of the assistant's turn. first: messages, of which the first one is the
        user's."""
        self._prove([*messages, *first], tools)
        head, text = self._head_text(messages, tools), self._show([*messages, *first], tools)
        _require_tools(text, tools)
        if not text.startswith(head):
            raise ValueError(
                "the chat template changes earlier messages where others follow: begin with a "
                "user's"
            )
        return list(self._encode(text[len(head) :] + lead))

    def go_on(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        lead: str = "",
    ) -> list[int]:
        """Return the tokens after those that the policy sampled: the end of its turn, unless it has
        sampled that too, the messages, and the beginning of its next turn. messages: results of
        tools come first, in the order of the calls that they answer."""
        seam = self._seam(messages, tools)
        text = self._after(seam.reply(messages), messages, tools)[1].removeprefix(seam.closing)
        ids = list(self._encode(text + lead))
        before = len(self._encode(_common(text, seam.text)))  # tokens before any content
        for place, token in enumerate(ids[:before]):
            if sampled and token == sampled[-1] and (not place or token in self.stop_token_ids):
                return ids[place + 1 :]
        return ids

    def reply_opening(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        after_reply: bool = False,
    ) -> str:
        """Return the <think> with which the template begins the reply to these messages, and what
        follows it; empty where the reply begins outside of reasoning. after_reply: the messages
        follow a reply, and are no whole prompt."""
        ending = self._seam(messages, tools).ending if after_reply else self._prove(messages, tools)
        place = ending.rfind("<think>")
        return ending[place:] if place > ending.rfind("</think>") else ""

    def words(self, text: str) -> list[int]:
        """Return the ids of plain text."""
        return list(self._encode(text))

    def _prove(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """Make sure that the template shows a prompt of such messages and, where there are tools,
        their results. Return the text after the last message."""
        key = _key_of(messages, tools)
        if key not in self._endings:
            if tools:
                for number in (1, 2):
                    self._seam(_results_of(tools, number), tools)
            probes = _probes_of(messages)
            self._endings[key] = _ending_of(self._show(probes, tools), probes)
        return self._endings[key]

    def _seam(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> _Seam:
        key = _key_of(messages, tools)
        if key not in self._seams:
            self._seams[key] = self._find_seam(_probes_of(messages), tools)
        return self._seams[key]

    def _find_seam(self, probes: Sequence[Message], tools: Sequence[ToolSchema]) -> _Seam:
        """Return the seam for a reply of calls whose end is a stop token, else for one of text,
        else for one of calls that ends as the template ends it where no message follows."""
        found, why = list[_Seam](), ""
        for reply in (_calls, _one_call, _text) if _results_in(probes) else (_text,):
            try:
                _, text = self._after(reply(probes), probes, tools)
                ending = _ending_of(text, probes)
                before = _start_of(text, probes)
                closing = "" if reply is _text else self._closing(text[:before])
                if closing is not None:
                    return _Seam(reply, closing, text.removeprefix(closing), ending)
                _, alone = self._after(reply(probes), (), tools, begins=False)
            except ValueError as error:
                why = str(error)
            else:
                closing = _common(alone, text[:before])
                found.append(_Seam(reply, closing, text.removeprefix(closing), ending))
        if not found:
            raise ValueError(why)
        return found[0]

    def _closing(self, text: str) -> str | None:
        """Return the text before the first token that ends a turn; None where there is none."""
        for place in range(len(text)):
            if not {*self._encode(text[place:])[:1]}.isdisjoint(self.stop_token_ids):
                return text[:place]
        return None

    def _learn_end(
        self,
        reply: Message,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        special: Collection[int],
    ) -> None:
        """Add the token that ends such a reply to the stop tokens: the first special one after it,
        where the reply is the last message, else where messages follow. Syntax that comes between
        two calls as well ends none, and a known stop token may follow the syntax around calls."""
        between, follows = self._after(reply, messages, tools)
        texts, within = [follows[: _start_of(follows, messages)]], self._encode(between)
        with suppress(ValueError):
            texts.insert(0, self._after(reply, (), tools, begins=False)[1])
        for text in texts:
            ends = [each for each in self._encode(text) if each in special and each not in within]
            if "tool_calls" in reply and {*ends} & {*self.stop_token_ids}:
                return
            if ends:
                self.stop_token_ids = tuple(dict.fromkeys([*self.stop_token_ids, ends[0]]))
                return

    def _after(
        self,
        reply: Message,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        begins: bool = True,
    ) -> tuple[str, str]:
        """Render messages after a reply. Return the text between its last two calls, where two are
        shown, and the text after MARK."""
        text = self._show([user("-"), reply, *messages], tools, begins)
        *earlier, between, after = _split(text, len(reply.get("tool_calls", "-")))
        return between if earlier else "", after

    def _head_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        text = self._show([*messages, user(MARK)], tools)
        return _split(text)[0]

    def _show(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], begins: bool = True
    ) -> str:
        """Render messages. Most templates take the arguments of a call as a mapping, and some as
        JSON."""
        try:
            return self._render(_with_arguments(messages, _as_mapping), tools, begins)
        except Exception as error:  # noqa: BLE001 - a template raises anything
            first = error
        try:
            return self._render(_with_arguments(messages, _as_json), tools, begins)
        except Exception:  # noqa: BLE001 - as above
            kinds = ", ".join(map(_kind_of, messages))
            raise ValueError(
                f"the chat template refuses these messages ({kinds}): {type(first).__name__}: "
                f"{first}; {_OTHERWISE}"
            ) from first


def _key_of(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> object:
    """Return what a template's treatment of messages depends on, besides their contents."""
    return tuple(map(_kind_of, messages)), tuple(tool["function"]["name"] for tool in tools)


def _kind_of(message: Message) -> str:
    return f"{message['role']} with calls" if message.get("tool_calls") else str(message["role"])


def _probes_of(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with known contents, where they are text."""
    return [
        {**each, "content": _CONTENT.format(index)}
        if isinstance(each.get("content"), str) and not each.get("tool_calls")
        else each
        for index, each in enumerate(messages)
    ]


def _places_of(text: str, probes: Sequence[Message]) -> list[tuple[int, int]]:
    """Return where each known content begins and ends. Raises ValueError for one that is left
    out."""
    places = []
    for index, each in enumerate(probes):
        if each.get("content") == (content := _CONTENT.format(index)):
            if content not in text:
                raise ValueError(
                    f"the chat template leaves out a {_kind_of(each)} message: {_OTHERWISE}"
                )
            places.append((text.index(content), text.rindex(content) + len(content)))
    return places


def _start_of(text: str, probes: Sequence[Message]) -> int:
    return min((start for start, _ in _places_of(text, probes)), default=len(text))


def _ending_of(text: str, probes: Sequence[Message]) -> str:
    return text[max((end for _, end in _places_of(text, probes)), default=0) :]


def _split(text: str, most: int = 1) -> list[str]:
    """Return the parts of a text around MARK, which must be there, and at most so many times."""
    if not 1 <= text.count(MARK) <= most:
        raise ValueError(f"the chat template does not show each message once: {_OTHERWISE}")
    return text.split(MARK)


def _common(one: str, other: str) -> str:
    """Return what two texts begin with."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in same)


def _require_tools(text: str, tools: Sequence[ToolSchema]) -> None:
    names = (tool["function"]["name"] for tool in tools)
    if missing := [name for name in names if name not in text]:
        raise ValueError(
            f"the chat template does not show the tools ({', '.join(missing)}): describe them in a "
            "message, or use another template"
        )


def _results_in(messages: Sequence[Message]) -> list[Message]:
    """Return the results of tools with which messages begin."""
    return list(takewhile(lambda each: each["role"] == "tool", messages))


def _results_of(tools: Sequence[ToolSchema], number: int) -> list[Message]:
    name = tools[0]["function"]["name"]
    ids = [f"call{place:05}" for place in range(number)]
    return [{"role": "tool", "tool_call_id": each, "name": name, "content": ""} for each in ids]


def _text(messages: Sequence[Message]) -> Message:
    return {"role": "assistant", "content": MARK}


def _calls(messages: Sequence[Message]) -> Message:
    """Make the reply whose calls the first of the messages answer."""
    calls = [
        {
            "id": each.get("tool_call_id", "call00000"),
            "type": "function",
            "function": {"name": each.get("name", "tool"), "arguments": {"text": MARK}},
        }
        for each in _results_in(messages)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _one_call(messages: Sequence[Message]) -> Message:
    """Make the reply for templates that show one call at most."""
    return _calls(messages[:1])


def _with_arguments(messages: Sequence[Message], convert: Callable[[Any], Any]) -> list[Message]:
    """Return the messages with the arguments of their calls converted."""

    def converted(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function", {})
        if "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": convert(function["arguments"])}}

    return [
        {**each, "tool_calls": list(map(converted, each["tool_calls"]))}
        if each.get("tool_calls")
        else each
        for each in messages
    ]


def _as_mapping(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
