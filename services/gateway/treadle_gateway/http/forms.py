"""Write answers in each form of OpenAI's API: chat completions, completions, responses.

A form turns outputs into the JSON of an answer, or into server-sent events as tokens come. It keeps
nothing of the request, except the responses form, which numbers its events: make one for each
request.
"""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from treadle import Sampling

from treadle_gateway.http.chat import Chat, Message
from treadle_gateway.order import Order, Output, Refused


@dataclass(frozen=True)
class Ask:
    """Contents of a request. prompts: token ids of each. prompt_fields: where the caller wrote each
    of them. copies: answers to each prompt. logprobs:
    whether answers have them. ids: whether they have token ids. tools: of a chat, which its answer
    may call."""

    model: str
    session: str
    prompts: list[list[int]]
    prompt_fields: list[str]
    copies: int
    sampling: Sampling
    logprobs: bool
    ids: bool
    skip_special: bool
    trim: bool
    stream: bool
    usage: bool
    tools: list[dict[str, Any]] | None
    rid: str


@dataclass(frozen=True)
class Answer:
    """One whole answer. matched: what has ended it, a token id or a stop string."""

    order: Order
    output: Output
    text: str
    matched: int | str | None


class Form(Protocol):
    """A form of OpenAI's API."""

    def begin(self, ask: Ask) -> Iterator[bytes]:
        """Yield the events before the first token."""

    def delta(self, ask: Ask, output: Output, text: str, since: int) -> bytes:
        """Return the event with new text, and the tokens from `since` on."""

    def end(self, ask: Ask, answer: Answer, sent: int, since: int) -> AsyncGenerator[bytes, None]:
        """Yield the events after the last token. sent: how many characters, since: how many tokens,
        were sent before."""

    async def whole(self, ask: Ask, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the JSON of all answers."""


class _CompletionsForm:
    """Base of chat completions and completions. kind: OpenAI's name of the object; prefix: of its
    id."""

    kind, chunk_kind, prefix = "", "", ""

    def _head(self, ask: Ask, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{ask.rid}",
            "object": kind,
            "created": int(time.time()),
            "model": ask.model,
        }

    def _event(self, ask: Ask, choice: Mapping[str, Any]) -> bytes:
        return _data(self._head(ask, self.chunk_kind) | {"choices": [choice]})

    def _last(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        if ask.usage:
            usage = count_tokens(ask, [answer])
            yield _data(self._head(ask, self.chunk_kind) | {"choices": [], "usage": usage})
        yield DONE

    def _whole(
        self, ask: Ask, answers: Sequence[Answer], choices: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        versions = [span.weight_version for answer in answers for span in answer.output.spans]
        whole = self._head(ask, self.kind) | {
            "choices": choices,
            "usage": count_tokens(ask, answers),
        }
        whole["metadata"] = {"weight_version": versions[-1] if versions else ""}
        if ask.ids:
            whole["prompt_token_ids"] = answers[0].order.prompt
        return whole


class ChatForm(_CompletionsForm):
    """Form of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def begin(self, ask: Ask) -> Iterator[bytes]:
        yield self._event(ask, _choice({"delta": {"role": "assistant", "content": ""}}, None))

    def delta(self, ask: Ask, output: Output, text: str, since: int, reasoning: str = "") -> bytes:
        found: dict[str, Any] = {
            "delta": {"content": text} | ({"reasoning_content": reasoning} if reasoning else {})
        }
        if ask.logprobs:
            found["logprobs"] = _chat_logprobs(output, since)
        if ask.ids:
            found["token_ids"] = output.token_ids[since:]
        return self._event(ask, _choice(found, None))

    async def end(
        self, ask: Ask, answer: Answer, sent: int, since: int
    ) -> AsyncGenerator[bytes, None]:
        message = (
            await self._chat.parse(answer.text, ask.tools)
            if ask.tools
            else Message(answer.text, "", [])
        )
        content = message.content if ask.tools else answer.text[sent:]
        if content or message.reasoning or since < len(answer.output.token_ids):
            yield self.delta(ask, answer.output, content, since, message.reasoning)
        if message.tool_calls:
            calls = [{"index": at, **call} for at, call in enumerate(message.tool_calls)]
            yield self._event(ask, _choice({"delta": {"tool_calls": calls}}, None))
        finish = _finish_of(answer.output, message)
        yield self._event(ask, _choice({"delta": {}, "matched_stop": answer.matched}, finish))
        for event in self._last(ask, answer):
            yield event

    async def whole(self, ask: Ask, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._whole(
            ask, answers, [await self._one(at, ask, answer) for at, answer in enumerate(answers)]
        )

    async def _one(self, at: int, ask: Ask, answer: Answer) -> dict[str, Any]:
        parsed, output = await self._chat.parse(answer.text, ask.tools), answer.output
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message |= {"tool_calls": parsed.tool_calls, "content": parsed.content or None}
        found: dict[str, Any] = {"message": message, "matched_stop": answer.matched}
        found["logprobs"] = _chat_logprobs(output, 0) if ask.logprobs else None
        if ask.ids:
            ids = output.token_ids
            found |= {
                "token_ids": ids,
                "response_token_ids": ids,
                "prompt_token_ids": answer.order.prompt,
            }
        return _choice(found, _finish_of(output, parsed), at)


class CompletionForm(_CompletionsForm):
    """Form of /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def begin(self, ask: Ask) -> Iterator[bytes]:
        return iter(())

    def delta(self, ask: Ask, output: Output, text: str, since: int) -> bytes:
        return self._event(ask, self._delta(ask, output, text, since))

    async def end(
        self, ask: Ask, answer: Answer, sent: int, since: int
    ) -> AsyncGenerator[bytes, None]:
        choice = self._delta(ask, answer.output, answer.text[sent:], since)
        choice |= {"finish_reason": _finish_of(answer.output, None), "matched_stop": answer.matched}
        yield self._event(ask, choice)
        for event in self._last(ask, answer):
            yield event

    async def whole(self, ask: Ask, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for at, answer in enumerate(answers):
            found: dict[str, Any] = {"text": answer.text, "matched_stop": answer.matched}
            found["logprobs"] = _completion_logprobs(answer.output, 0) if ask.logprobs else None
            if ask.ids:
                found |= {
                    "token_ids": answer.output.token_ids,
                    "prompt_token_ids": answer.order.prompt,
                }
            choices.append(_choice(found, _finish_of(answer.output, None), at))
        return self._whole(ask, answers, choices)

    def _delta(self, ask: Ask, output: Output, text: str, since: int) -> dict[str, Any]:
        found: dict[str, Any] = {"text": text}
        if ask.logprobs:
            found["logprobs"] = _completion_logprobs(output, since)
        if ask.ids:
            found["token_ids"] = output.token_ids[since:]
        return _choice(found, None)


class ResponsesForm:
    """Form of /v1/responses. echoed: fields of the request that its answer repeats."""

    def __init__(self, chat: Chat, response_id: str, echoed: Mapping[str, Any]) -> None:
        self._chat, self.response_id, self._echoed = chat, response_id, echoed
        self._created = int(time.time())
        self._events = 0
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self.said = Message("", "", [])  # items of the answer, once it is whole

    def begin(self, ask: Ask) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response(ask, "in_progress", [], None))
        if not ask.tools:
            yield from self._open_message()

    def delta(self, ask: Ask, output: Output, text: str, since: int) -> bytes:
        return self._of_text("response.output_text.delta", delta=text)

    async def end(
        self, ask: Ask, answer: Answer, sent: int, since: int
    ) -> AsyncGenerator[bytes, None]:
        if ask.tools:
            items = await self._items(ask, answer)
        else:  # its text was sent as it came
            self.said = Message(answer.text, "", [])
            items = [self._message(answer.text)]
        for at, item in enumerate(items):
            if item["type"] == "message":
                text = item["content"][0]["text"]
                if ask.tools:
                    for event in self._open_message(at):
                        yield event
                if text[0 if ask.tools else sent :]:
                    yield self._of_text(
                        "response.output_text.delta", at, delta=text[0 if ask.tools else sent :]
                    )
                yield self._of_text("response.output_text.done", at, text=text)
                yield self._of_text("response.content_part.done", at, part=item["content"][0])
            else:
                yield self._event("response.output_item.added", output_index=at, item=item)
            if item["type"] == "function_call":
                place = {"output_index": at, "item_id": item["id"]}
                yield self._event(
                    "response.function_call_arguments.delta", **place, delta=item["arguments"]
                )
                yield self._event(
                    "response.function_call_arguments.done", **place, arguments=item["arguments"]
                )
            yield self._event("response.output_item.done", output_index=at, item=item)
        whole = self._response(ask, _status_of(answer.output), items, answer)
        yield self._event(f"response.{whole['status']}", response=whole)

    async def whole(self, ask: Ask, answers: Sequence[Answer]) -> dict[str, Any]:
        [answer] = answers
        return self._response(
            ask, _status_of(answer.output), await self._items(ask, answer), answer
        )

    async def _items(self, ask: Ask, answer: Answer) -> list[dict[str, Any]]:
        self.said = said = await self._chat.parse(answer.text, ask.tools)
        items: list[dict[str, Any]] = []
        if said.reasoning:
            content = [{"type": "reasoning_text", "text": said.reasoning}]
            items.append(
                {
                    "id": f"rs_{uuid.uuid4().hex}",
                    "type": "reasoning",
                    "summary": [],
                    "content": content,
                }
            )
        if said.content or not said.tool_calls:
            items.append(self._message(said.content))
        for call in said.tool_calls:
            named = {"type": "function_call", "call_id": call["id"], "status": "completed"}
            items.append({"id": f"fc_{uuid.uuid4().hex}", **named, **call["function"]})
        return items

    def _message(self, text: str) -> dict[str, Any]:
        said = {"type": "message", "role": "assistant", "status": "completed"}
        return {"id": self._message_id, **said, "content": [_part(text)]}

    def _open_message(self, at: int = 0) -> Iterator[bytes]:
        item = self._message("") | {"status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=at, item=item)
        yield self._of_text("response.content_part.added", at, part=_part(""))

    def _of_text(self, kind: str, at: int = 0, **more: Any) -> bytes:
        more = {"logprobs": [], **more} if "text" in kind.rpartition(".")[0] else more
        return self._event(kind, item_id=self._message_id, output_index=at, content_index=0, **more)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {kind}\n".encode() + _data(event)

    def _response(
        self, ask: Ask, status: str, items: Sequence[Any], answer: Answer | None
    ) -> dict[str, Any]:
        short = answer is not None and status == "incomplete"
        reason = (
            "max_output_tokens"
            if answer is not None and _finish_of(answer.output, None) == "length"
            else "abort"
        )
        found: dict[str, Any] = {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": ask.model,
            "output": items,
            "error": None,
            **self._echoed,
            "incomplete_details": {"reason": reason} if short else None,
            "usage": None if answer is None else _responses_usage(count_tokens(ask, [answer])),
        }
        if answer is not None and ask.ids:
            found |= {"prompt_token_ids": answer.order.prompt, "token_ids": answer.output.token_ids}
            found["token_logprobs"] = answer.output.logprobs
        return found


def _data(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def error_event(refusal: Refused) -> bytes:
    """Return the event with which a stream reports a refusal."""
    return _data({"error": {"message": str(refusal), "code": refusal.code}})


DONE = b"data: [DONE]\n\n"


def count_tokens(ask: Ask, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return OpenAI's `usage`."""
    prompt = sum(map(len, ask.prompts))
    written = sum(len(answer.output.token_ids) for answer in answers)
    cached = sum(
        answer.output.ended.cached_tokens for answer in answers if answer.output.ended is not None
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _responses_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _choice(found: Mapping[str, Any], finish: str | None, index: int = 0) -> dict[str, Any]:
    return {"index": index, **found, "finish_reason": finish}


def _finish_of(output: Output, message: Message | None) -> str:
    assert output.ended is not None
    return "tool_calls" if message is not None and message.tool_calls else output.ended.finish


def _status_of(output: Output) -> str:
    return "completed" if _finish_of(output, None) == "stop" else "incomplete"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _chat_logprobs(output: Output, since: int) -> dict[str, Any]:
    """Return logprobs that name each token by its id, which is more exact than its bytes."""
    return {
        "content": [
            {"token": f"token_id:{token}", "bytes": None, "logprob": logprob, "top_logprobs": []}
            for token, logprob in zip(
                output.token_ids[since:], output.logprobs[since:], strict=True
            )
        ]
    }


def _completion_logprobs(output: Output, since: int) -> dict[str, Any]:
    ids, logprobs = output.token_ids[since:], output.logprobs[since:]
    tokens = [f"token_id:{token}" for token in ids]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": []}
