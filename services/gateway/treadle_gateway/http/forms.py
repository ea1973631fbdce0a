"""Write answers in each form of OpenAI's API: chat completions, completions, responses.

A form turns outputs into the JSON of an answer, or into server-sent events as tokens come. It keeps
nothing of the request, except the responses form, which numbers its events: make one for each
request.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from treadle import Sampling

from treadle_gateway.http.chat import Message, Reading
from treadle_gateway.order import Order, Output, Refused
from treadle_gateway.text import TextModel


@dataclass(frozen=True)
class Ask:
    """Contents of a request."""

    model: str
    session: str
    prompts: list[list[int]]
    """Token ids of each prompt."""
    prompt_fields: list[str]
    """The caller wrote each prompt in this field."""
    copies: int
    """Each prompt gets so many answers."""
    sampling: Sampling
    logprobs: bool
    """Answers have logprobs."""
    named_by_ids: bool
    """Logprobs name tokens by their ids and not by their texts."""
    ids: bool
    """Answers have token ids."""
    skip_special: bool
    trim: bool
    """Texts end before what ended them."""
    stream: bool
    usage: bool
    """A stream ends with OpenAI's `usage`."""
    usage_so_far: bool
    """Each event of a stream has the usage up to it."""
    reading: Reading
    """Texts become messages in this way."""
    rid: str


@dataclass(frozen=True)
class Answer:
    """One answer, whole or as far as it came. matched: what has ended it, a token id or a stop
    string."""

    order: Order
    output: Output
    message: Message
    matched: int | str | None


class Form(Protocol):
    """A form of OpenAI's API. `at` is the place of an answer among those of its request."""

    def begin(self, ask: Ask) -> Iterator[bytes]:
        """Yield the events before the first token."""

    def delta(self, ask: Ask, at: int, answer: Answer, new: Message, since: int) -> Iterator[bytes]:
        """Yield the events with new text, and the tokens from `since` on."""

    def end(self, ask: Ask, at: int, answer: Answer) -> Iterator[bytes]:
        """Yield the events after the last text of an answer."""

    def last(self, ask: Ask, answers: Sequence[Answer]) -> Iterator[bytes]:
        """Yield the events after the last answer."""

    def whole(self, ask: Ask, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the JSON of all answers."""


class _CompletionsForm:
    """Base of chat completions and completions. kind: OpenAI's name of the object; prefix: of its
    id. model: names tokens."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, model: TextModel) -> None:
        self._model = model

    def last(self, ask: Ask, answers: Sequence[Answer]) -> Iterator[bytes]:
        """Yield the usage and the end of a stream."""
        if ask.usage:
            usage = count_tokens(ask, answers)
            yield _data(self._head(ask, self.chunk_kind) | {"choices": [], "usage": usage})
        yield DONE

    def _head(self, ask: Ask, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{ask.rid}",
            "object": kind,
            "created": int(time.time()),
            "model": ask.model,
        }

    def _event(self, ask: Ask, choice: Mapping[str, Any], answer: Answer | None = None) -> bytes:
        event = self._head(ask, self.chunk_kind) | {"choices": [choice]}
        if ask.usage_so_far and answer is not None:
            prompt, written = len(answer.order.prompt), len(answer.output.token_ids)
            event["usage"] = _usage(prompt, written, _cached(answer))
        return _data(event)

    def _whole(
        self, ask: Ask, answers: Sequence[Answer], choices: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        whole = self._head(ask, self.kind) | {
            "choices": choices,
            "usage": count_tokens(ask, answers),
        }
        whole["metadata"] = answers[0].output.versions()
        if ask.ids:
            whole["prompt_token_ids"] = answers[0].order.prompt
        return whole


class ChatForm(_CompletionsForm):
    """Form of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def begin(self, ask: Ask) -> Iterator[bytes]:
        for at in range(len(ask.prompts) * ask.copies):
            found: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
            if ask.ids:
                found["prompt_token_ids"] = ask.prompts[0]
            yield self._event(ask, _choice(found, None, at))

    def delta(self, ask: Ask, at: int, answer: Answer, new: Message, since: int) -> Iterator[bytes]:
        said = {"reasoning_content": new.reasoning, "content": new.content}
        deltas = [{name: text} for name, text in said.items() if text] or [{"content": ""}]
        for part, delta in enumerate(deltas):
            found: dict[str, Any] = {"delta": delta}
            if ask.logprobs and not part:
                found["logprobs"] = self._logprobs(ask, answer.output, since)
            if ask.ids and not part:
                found["token_ids"] = answer.output.token_ids[since:]
            yield self._event(ask, _choice(found, None, at), answer)

    def end(self, ask: Ask, at: int, answer: Answer) -> Iterator[bytes]:
        if calls := answer.message.tool_calls:
            yield self._event(ask, _choice({"delta": {"tool_calls": calls}}, None, at), answer)
        finish, matched = _ending(answer)
        yield self._event(ask, _choice({"delta": {}, "matched_stop": matched}, finish, at), answer)

    def whole(self, ask: Ask, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [self._one(at, ask, answer) for at, answer in enumerate(answers)]
        return self._whole(ask, answers, choices)

    def _one(self, at: int, ask: Ask, answer: Answer) -> dict[str, Any]:
        said, ids = answer.message, answer.output.token_ids
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        message["reasoning_content"] = said.reasoning or None
        message["tool_calls"] = said.tool_calls or None
        finish, matched = _ending(answer)
        found: dict[str, Any] = {"message": message, "matched_stop": matched}
        found["logprobs"] = self._logprobs(ask, answer.output, 0) if ask.logprobs else None
        if ask.ids:
            prompt = answer.order.prompt
            found |= {"token_ids": ids, "response_token_ids": ids, "prompt_token_ids": prompt}
        return _choice(found, finish, at)

    def _logprobs(self, ask: Ask, output: Output, since: int) -> dict[str, Any]:
        return {
            "content": [
                {
                    "token": self._model.name(token, by_id=ask.named_by_ids),
                    "bytes": list(self._model.bytes_of(token)),
                    "logprob": logprob,
                    "top_logprobs": [],
                }
                for token, logprob in zip(
                    output.token_ids[since:], output.logprobs[since:], strict=True
                )
            ]
        }


class CompletionForm(_CompletionsForm):
    """Form of /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def begin(self, ask: Ask) -> Iterator[bytes]:
        return iter(())

    def delta(self, ask: Ask, at: int, answer: Answer, new: Message, since: int) -> Iterator[bytes]:
        found = self._found(ask, answer, new.content, since)
        yield self._event(ask, _choice(found, None, at), answer)

    def end(self, ask: Ask, at: int, answer: Answer) -> Iterator[bytes]:
        finish, matched = _ending(answer)
        found = self._found(ask, answer, "", len(answer.output.token_ids))
        yield self._event(ask, _choice(found | {"matched_stop": matched}, finish, at), answer)

    def whole(self, ask: Ask, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for at, answer in enumerate(answers):
            finish, matched = _ending(answer)
            found = self._found(ask, answer, answer.message.content, 0) | {"matched_stop": matched}
            choices.append(_choice(found, finish, at))
        return self._whole(ask, answers, choices)

    def _found(self, ask: Ask, answer: Answer, text: str, since: int) -> dict[str, Any]:
        ids, logprobs = answer.output.token_ids[since:], answer.output.logprobs[since:]
        found: dict[str, Any] = {"text": text, "logprobs": None}
        if ask.logprobs:
            found["logprobs"] = {
                "tokens": [self._model.name(token, by_id=ask.named_by_ids) for token in ids],
                "token_logprobs": logprobs,
                "top_logprobs": [],
                "text_offset": [-1] * len(ids),  # as in SGLang, which does not count
            }
        if ask.ids:
            found["token_ids"] = ids
        if ask.ids and not since:
            found["prompt_token_ids"] = answer.order.prompt
        return found


class ResponsesForm:
    """Form of /v1/responses, which has one answer. echoed: fields of the request that its answer
    repeats."""

    def __init__(self, response_id: str, echoed: Mapping[str, Any]) -> None:
        self.response_id, self._echoed = response_id, echoed
        self._created = int(time.time())
        self._events = 0
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._items: list[dict[str, Any]] = []  # those of a stream that are complete
        self._text = ""  # of the message that is open in a stream
        self._is_open = False

    def begin(self, ask: Ask) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response(ask, "in_progress", [], None))

    def delta(self, ask: Ask, at: int, answer: Answer, new: Message, since: int) -> Iterator[bytes]:
        if new.reasoning:
            yield from self._send(_reasoning(new.reasoning))
        if new.content:
            if not self._is_open:
                yield from self._open_message()
            self._text += new.content
            yield self._of_text("response.output_text.delta", delta=new.content)

    def end(self, ask: Ask, at: int, answer: Answer) -> Iterator[bytes]:
        calls = answer.message.tool_calls
        if not self._is_open and not calls:
            yield from self._open_message()
        if self._is_open:
            item = self._message(self._text)
            yield self._of_text("response.output_text.done", text=self._text)
            yield self._of_text("response.content_part.done", part=item["content"][0])
            yield self._event("response.output_item.done", output_index=len(self._items), item=item)
            self._items.append(item)
        for call in calls:
            yield from self._send(_function_call(call))

    def last(self, ask: Ask, answers: Sequence[Answer]) -> Iterator[bytes]:
        [answer] = answers
        whole = self._response(ask, _status_of(answer), self._items, answer)
        yield self._event(f"response.{whole['status']}", response=whole)

    def whole(self, ask: Ask, answers: Sequence[Answer]) -> dict[str, Any]:
        [answer] = answers
        said = answer.message
        items = [_reasoning(said.reasoning)] if said.reasoning else []
        if said.content or not said.tool_calls:
            items.append(self._message(said.content))
        items += map(_function_call, said.tool_calls)
        return self._response(ask, _status_of(answer), items, answer)

    def _send(self, item: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events of an item that is complete."""
        place = {"output_index": len(self._items)}
        yield self._event("response.output_item.added", **place, item=item)
        inside = place | {"item_id": item["id"]}
        if item["type"] == "reasoning":
            text, inside = item["content"][0]["text"], inside | {"content_index": 0}
            yield self._event("response.reasoning_text.delta", **inside, delta=text)
            yield self._event("response.reasoning_text.done", **inside, text=text)
        else:
            arguments, kind = item["arguments"], "response.function_call_arguments"
            yield self._event(f"{kind}.delta", **inside, delta=arguments)
            yield self._event(f"{kind}.done", **inside, arguments=arguments)
        yield self._event("response.output_item.done", **place, item=item)
        self._items.append(item)

    def _message(self, text: str) -> dict[str, Any]:
        said = {"type": "message", "role": "assistant", "status": "completed"}
        return {"id": self._message_id, **said, "content": [_part(text)]}

    def _open_message(self) -> Iterator[bytes]:
        self._is_open = True
        item = self._message("") | {"status": "in_progress", "content": []}
        at = len(self._items)
        yield self._event("response.output_item.added", output_index=at, item=item)
        yield self._of_text("response.content_part.added", part=_part(""))

    def _of_text(self, kind: str, **more: Any) -> bytes:
        more = {"logprobs": [], **more} if "text" in kind.rpartition(".")[0] else more
        place = {"output_index": len(self._items), "content_index": 0}
        return self._event(kind, item_id=self._message_id, **place, **more)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {kind}\n".encode() + _data(event)

    def _response(
        self, ask: Ask, status: str, items: Sequence[Any], answer: Answer | None
    ) -> dict[str, Any]:
        details = None
        if answer is not None and status == "incomplete":
            length = _ending(answer)[0] == "length"
            details = {"reason": "max_output_tokens" if length else "abort"}
        found: dict[str, Any] = {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": ask.model,
            "output": items,
            "error": None,
            **self._echoed,
            "incomplete_details": details,
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
    """Return OpenAI's `usage`. A prompt counts once, whatever number of answers it has."""
    written = sum(len(answer.output.token_ids) for answer in answers)
    cached = sum(map(_cached, answers[:: ask.copies]))
    return _usage(sum(map(len, ask.prompts)), written, cached)


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _cached(answer: Answer) -> int:
    return answer.output.ended.cached_tokens if answer.output.ended is not None else 0


def _responses_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _choice(found: Mapping[str, Any], finish: str | None, index: int) -> dict[str, Any]:
    return {"index": index, **found, "finish_reason": finish}


def _ending(answer: Answer) -> tuple[str, int | str | None]:
    """Return why an answer ended, and what ended it. One that calls tools and was cut short is cut
    short."""
    assert answer.output.ended is not None
    finish = answer.output.ended.finish
    called = finish == "stop" and bool(answer.message.tool_calls)
    return ("tool_calls", None) if called else (finish, answer.matched)


def _status_of(answer: Answer) -> str:
    return "completed" if _ending(answer)[0] in ("stop", "tool_calls") else "incomplete"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    said = {"type": "reasoning", "summary": [], "content": content}
    return {"id": f"rs_{uuid.uuid4().hex}", **said}


def _function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    named = {"type": "function_call", "call_id": call["id"], "status": "completed"}
    return {"id": f"fc_{uuid.uuid4().hex}", **named, **call["function"]}
