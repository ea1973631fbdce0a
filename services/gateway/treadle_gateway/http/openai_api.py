"""Serve OpenAI's /v1/chat/completions, /v1/completions and /v1/responses, with the token ids that
trainers need.

A chat or completion that needs more than the mesh carries (images, several alternatives for each
token, a grammar) is forwarded to an engine as it is. With `return_token_ids` a choice has the token
ids of its prompt and of its answer, as in SGLang and vLLM. A response is a chat in another form;
its messages are kept in memory for `previous_response_id`.
"""

import json
import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from treadle import Sampling
from treadle_runtime.http.sglang import SAMPLING
from treadle_runtime.http.web import weigh

from treadle_gateway.calls import Calls, Turns
from treadle_gateway.engines import Proxy
from treadle_gateway.http.chat import ECHOED, Chat, Message, Reading, as_chat, said_message
from treadle_gateway.http.forms import (
    Answer,
    Ask,
    ChatForm,
    CompletionForm,
    Form,
    ResponsesForm,
    error_event,
)
from treadle_gateway.mesh import MeshLink
from treadle_gateway.order import (
    EVENT_STREAM,
    HIGHEST_ID,
    PENALTIES,
    Count,
    Ended,
    Fields,
    Many,
    Name,
    Order,
    Output,
    Refused,
    SamplingFields,
    Tokens,
    hold_answers,
    read_body,
    read_new_tokens,
    read_stops,
    read_tokens,
    require_answers,
    require_room,
    run_unless_gone,
    session_of,
)
from treadle_gateway.text import TextModel, TextStream, answer_text, matched_end, require_model

SHARED = frozenset(
    (SAMPLING.keys() - {"max_new_tokens"})
    | {"model", "max_tokens"}
    | {
        "n",
        "stream",
        "stream_options",
        "logprobs",
        "return_token_ids",
        "return_prompt_token_ids",
        "user",
        "rid",
    }
    | {
        "skip_special_tokens",
        "no_stop_trim",
        "session_id",
        "nvext",
        "cache_salt",
        "extra_key",
        "priority",
        "store",
    }
    | {"metadata", "spaces_between_special_tokens", "return_tokens_as_token_ids"}
)
CHAT = SHARED | {
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "continue_final_message",
}
CHAT |= {
    "max_completion_tokens",
    "reasoning_effort",
    "parallel_tool_calls",
    "add_generation_prompt",
    "input_ids",
}
COMPLETION = SHARED | {"prompt"}
FREE_TOOL_CHOICES = (None, "auto", "none")  # others restrict the engine's sampling by a grammar
NEUTRAL: Mapping[str, float] = {**PENALTIES, "min_tokens": 0, "top_logprobs": 0, "best_of": 1}
NOTHING_IF_EMPTY = ("logit_bias", "stop_regex", "custom_params")
TRUE_BY_DEFAULT = frozenset({"separate_reasoning", "stream_reasoning"})
PARSE_EVERY_S = 0.05  # a stream that has reasoning is parsed as a whole each time
REMEMBERED_RESPONSES, REMEMBERED_BYTES = 2_000, 256 * 1024**2
COMPLETION_TOKENS = 16  # OpenAI's and SGLang's default


class SharedFields(SamplingFields):
    """Fields of chats and completions, OpenAI's and SGLang's."""

    rid: Name | None = None
    max_tokens: Annotated[int, Field(ge=1, le=HIGHEST_ID)] | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_hidden_states: bool | str | None = None
    return_routed_experts: bool | None = None
    return_cached_tokens_details: bool | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None


class ChatFields(SharedFields):
    """Fields of a chat."""

    messages: Many[Any] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=HIGHEST_ID)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None


class CompletionFields(SharedFields):
    """Fields of a completion."""

    logprobs: bool | Count | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Count | None = None


class ResponsesFields(Fields):
    """Fields of a response. Those of its chat are checked by ChatFields."""

    max_output_tokens: Annotated[int, Field(ge=1, le=HIGHEST_ID)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: Literal[False] | None = None
    store: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    instructions: str | None = None
    parallel_tool_calls: bool | None = None
    include: Many[str] | None = None
    max_tool_calls: Count | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Conversation up to a response, and with it. messages: of a chat. tokens: as they were
    sampled. bytes: of memory, by estimate."""

    messages: list[Any]
    tokens: "array[int]"
    bytes: int


NEW = Conversation([], array("i"), 0)


def carries(body: Mapping[str, Any], known: frozenset[str]) -> bool:
    """Return whether the mesh can do all that a request needs."""
    for name, value in body.items():
        neutral = name in NEUTRAL and value == NEUTRAL[name]
        nothing = value is None or value is False or neutral
        nothing = nothing or (value in ([], {}) and name in NOTHING_IF_EMPTY)
        if name not in known and not nothing and not (name in TRUE_BY_DEFAULT and value is True):
            return False
    free = body.get("tool_choice") in FREE_TOOL_CHOICES
    return free and not any(_has_media(message) for message in body.get("messages") or ())


def read_sampling(body: Mapping[str, Any], room: int) -> Sampling:
    """Return the sampling that a request names. room: tokens that fit behind the prompt. Raises
    Refused."""
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return Sampling(
        max_new_tokens=read_new_tokens(name, body.get(name), room),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=body.get("top_k"),
        min_p=body.get("min_p"),
        seed=body.get("seed"),
        ignore_eos=bool(body.get("ignore_eos")),
        **read_stops(body),
    )


class _Saying:
    """An answer of a stream, as far as it came. text: that is certain. answer: with what is certain
    of its message. parse_at_s: on the monotonic clock, from when on an engine parses it again."""

    def __init__(self, ask: Ask, model: TextModel, order: Order) -> None:
        self.order, self.output, self.text = order, Output(), ""
        self.stream = TextStream(model, ask.sampling, skip_special=ask.skip_special, trim=ask.trim)
        self.answer = Answer(order, self.output, Message(), None)
        self.parse_at_s = 0.0
        self.sent_tokens = 0
        self._sent_content, self._sent_reasoning = 0, 0  # characters

    @property
    def unsent_tokens(self) -> int:
        """Return how many tokens no event had."""
        return len(self.output.token_ids) - self.sent_tokens

    def new(self) -> Message:
        """Return the part of the message that no event had."""
        said = self.answer.message
        return Message(said.content[self._sent_content :], said.reasoning[self._sent_reasoning :])

    def count_as_sent(self, new: Message) -> None:
        """Note that an event has this part of the message, and all tokens so far."""
        self._sent_content += len(new.content)
        self._sent_reasoning += len(new.reasoning)
        self.sent_tokens = len(self.output.token_ids)


class OpenaiApi:
    """Endpoints of the chat, the completions and the responses form."""

    def __init__(
        self, calls: Calls, proxy: Proxy, mesh: MeshLink, chat: Chat, model: TextModel | None
    ) -> None:
        self._calls, self._proxy, self._mesh = calls, proxy, mesh
        self._chat, self._model = chat, model
        # conversations by the id of their last response
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._remembered_bytes = 0

    async def chat(self, request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        body = _without_null(await read_body(request))
        ChatFields.check(body)
        session = session_of(request, body)
        filled = await self._chat.fill(body)
        if not carries(filled, CHAT):
            return await self._proxy.forward(request, body, session)
        ask = await self._ask_chat(filled, session)
        return await self._answer(request, ask, ChatForm(require_model(self._model)))

    async def complete(self, request: Request) -> Response:
        """Answer POST /v1/completions."""
        body = _without_null(await read_body(request))
        CompletionFields.check(body)
        prompt: Any = body.get("prompt")
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        copies = max(body.get("n") or 1, body.get("best_of") or 1)
        require_answers(len(prompt) if several else 1, copies)
        session = session_of(request, body)
        if not carries(body, COMPLETION) or body.get("logprobs") not in (None, False, 0):
            return await self._proxy.forward(request, body, session)
        body["logprobs"] = body.get("logprobs") == 0
        body.setdefault("max_tokens", COMPLETION_TOKENS)
        ask = self._ask(body, session, await self._prompts(body), Reading())
        return await self._answer(request, ask, CompletionForm(require_model(self._model)))

    async def respond(self, request: Request) -> Response:
        """Answer POST /v1/responses."""
        given = await read_body(request)
        ResponsesFields.check(given)
        previous = given.get("previous_response_id")
        if not isinstance(previous, str | None):
            raise Refused(f"previous_response_id: must be a text, is {previous!r:.100}")
        before = NEW if previous is None else self._conversations.get(previous)
        if before is None:
            raise Refused(
                f"previous_response_id: {previous!r:.100} is not known here (any more); send the "
                "whole input",
                404,
            )
        body = await self._chat.fill(as_chat(given, before.messages) | {"stream_reasoning": False})
        ChatFields.check(body)
        if not carries(body, CHAT):
            raise Refused(
                "repetition_penalty: the model's generation_config.json has one, which "
                "/v1/responses does not carry; start SGLang with --sampling-defaults openai"
            )
        echoed = {name: given.get(name, value) for name, value in ECHOED.items()}
        form = ResponsesForm(f"resp_{uuid.uuid4().hex}", echoed)
        session = session_of(request, given)
        prompt = await self._chat.render(session, body, before.tokens)
        room = require_room(len(prompt), self._mesh.context_tokens)
        if (most := body.get("max_completion_tokens")) is not None:
            body["max_completion_tokens"] = min(most, room)  # as SGLang does for this form alone
        ask = self._ask(body, session, [("input", prompt)], await self._chat.reading(body))

        def remember(answer: Answer) -> None:
            tokens = array("i", [*answer.order.prompt, *answer.output.token_ids])
            messages = [*body["messages"], said_message(answer.message)]
            self._remember(form.response_id, messages, tokens)

        return await self._answer(request, ask, form, remember)

    def _remember(self, response_id: str, messages: list[Any], tokens: "array[int]") -> None:
        """Keep a conversation, and forget the oldest ones that are too many or too large."""
        size = weigh(json.dumps(messages).encode()) + len(tokens) * tokens.itemsize
        self._conversations[response_id] = Conversation(messages, tokens, size)
        self._remembered_bytes += size
        while (
            len(self._conversations) > REMEMBERED_RESPONSES
            or self._remembered_bytes > REMEMBERED_BYTES
        ):
            self._remembered_bytes -= self._conversations.popitem(last=False)[1].bytes

    async def _ask_chat(self, body: Mapping[str, Any], session: str) -> Ask:
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise Refused("messages: must be a list with at least one message")
        if "input_ids" in body:
            prompt = ("input_ids", read_tokens("input_ids", body["input_ids"]))
        else:
            prompt = ("messages", await self._chat.render(session, body))
        return self._ask(body, session, [prompt], await self._chat.reading(body))

    def _ask(
        self,
        body: Mapping[str, Any],
        session: str,
        named_prompts: Sequence[tuple[str, list[int]]],
        reading: Reading,
    ) -> Ask:
        """Return what a request asks for. named_prompts: where the caller wrote each, and its
        token ids."""
        options = body.get("stream_options") or {}
        prompts = [ids for _, ids in named_prompts]
        return Ask(
            model=str(body.get("model") or ""),
            session=session,
            prompts=prompts,
            prompt_fields=[where for where, _ in named_prompts],
            copies=body.get("n") or 1,
            sampling=read_sampling(
                body, require_room(max(map(len, prompts)), self._mesh.context_tokens)
            ),
            logprobs=body.get("logprobs") not in (None, False),
            named_by_ids=bool(body.get("return_tokens_as_token_ids")),
            ids=bool(body.get("return_token_ids") or body.get("return_prompt_token_ids")),
            skip_special=body.get("skip_special_tokens") is not False and not reading.keeps_special,
            trim=not body.get("no_stop_trim"),
            stream=bool(body.get("stream")),
            usage=bool(options.get("include_usage")),
            usage_so_far=bool(options.get("continuous_usage_stats")),
            reading=reading,
            rid=str(body.get("rid") or uuid.uuid4().hex),
        )

    async def _prompts(self, body: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
        given = body.get("prompt")
        if not isinstance(given, str | list) or not given:
            raise Refused(
                "prompt: must be a text, token ids, or a list of them, none of them empty"
            )
        single = isinstance(given, str) or isinstance(given[0], int)
        named = (
            [("prompt", given)]
            if single
            else [(f"prompt[{at}]", each) for at, each in enumerate(given)]
        )
        texts = [(where, each) for where, each in named if isinstance(each, str)]
        encoded: dict[str, list[int]] = {}
        if texts:
            model = require_model(self._model)
            encoded = dict(await model.encode_prompts(texts, self._mesh.context_tokens))
        return [
            (where, encoded[where] if where in encoded else read_tokens(where, each))
            for where, each in named
        ]

    def _orders(self, ask: Ask) -> list[Order]:
        return [
            Order(
                ask.session,
                prompt,
                ask.sampling.of_sample(copy),
                f"{ask.rid}_{at}_{copy}" if at or copy else ask.rid,
                where,
            )
            for at, (where, prompt) in enumerate(zip(ask.prompt_fields, ask.prompts, strict=True))
            for copy in range(ask.copies)
        ]

    async def _answer(
        self,
        request: Request,
        ask: Ask,
        form: Form,
        note: Callable[[Answer], None] = lambda _: None,
    ) -> Response:
        """Answer a request whose prompts are token ids. note: called with each answer once it is
        whole."""
        orders = self._orders(ask)
        hold_answers(request, orders)
        if ask.stream:
            events = self._stream(ask, orders, form, note)
            return StreamingResponse(events, media_type=EVENT_STREAM)
        outputs = await run_unless_gone(request, self._calls.run_all(orders, self._run))
        answers = [
            await self._read(ask, order, output)
            for order, output in zip(orders, outputs, strict=True)
        ]
        for answer in answers:
            note(answer)
        return JSONResponse(form.whole(ask, answers))

    async def _run(self, order: Order, turns: Turns | None) -> Output:
        output = Output()
        async with aclosing(self._calls.run(order, turns)) as events:
            async for event in events:
                output.add(event)
        return output

    async def _read(self, ask: Ask, order: Order, output: Output) -> Answer:
        model = require_model(self._model)
        stopped = output.ended is not None and output.ended.finish == "stop"
        matched = (
            matched_end(model, output, ask.sampling.stop, ask.sampling.stop_token_ids)
            if stopped
            else None
        )
        text = answer_text(model, output, matched, skip_special=ask.skip_special, trim=ask.trim)
        return Answer(order, output, await self._chat.parse(text, ask.reading), matched)

    async def _listen(self, ask: Ask, saying: "_Saying", event: Tokens | Ended) -> None:
        """Take the next event of an answer, and read what is certain of its message by then."""
        saying.output.add(event)
        if isinstance(event, Ended):
            saying.answer = await self._read(ask, saying.order, saying.output)
            return
        saying.text += (new := saying.stream.add(event.token_ids))
        if not ask.reading.parses:
            saying.answer = replace(saying.answer, message=Message(saying.text))
        elif new and ask.reading.reasoning_parser and time.monotonic() >= saying.parse_at_s:
            message = await self._chat.parse_beginning(saying.text, ask.reading)
            saying.answer = replace(saying.answer, message=message)
            saying.parse_at_s = time.monotonic() + PARSE_EVERY_S

    async def _stream(
        self, ask: Ask, orders: Sequence[Order], form: Form, note: Callable[[Answer], None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of all answers, as their tokens come."""
        model = require_model(self._model)
        sayings = [_Saying(ask, model, order) for order in orders]
        try:
            for first in form.begin(ask):
                yield first
            async with aclosing(self._calls.stream_all(orders)) as events:
                async for at, event in events:
                    saying = sayings[at]
                    await self._listen(ask, saying, event)
                    answer, new = saying.answer, saying.new()
                    ended = answer.output.ended is not None
                    due = saying.unsent_tokens and (ask.ids or (ask.logprobs and ended))
                    if new.content or new.reasoning or due:
                        for piece in form.delta(ask, at, answer, new, saying.sent_tokens):
                            yield piece
                        saying.count_as_sent(new)
                    if ended:
                        for piece in form.end(ask, at, answer):
                            yield piece
                        note(answer)
            for last in form.last(ask, [saying.answer for saying in sayings]):
                yield last
        except Refused as refusal:
            yield error_event(refusal)


def _without_null(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request without the fields that are null: they request nothing, and SGLang refuses
    some of them."""
    return {name: value for name, value in body.items() if value is not None}


def _has_media(message: Any) -> bool:
    """Return whether a message holds more than text."""
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(
        part.get("type") != "text" for part in content if isinstance(part, dict)
    )
