"""Serve SGLang's /generate, which slime, verl and a person's own loop call.

A request that needs more than the mesh carries (images, input logprobs, routed experts, a
grammar, ...) is forwarded to an engine as it is and answered as the engine answers it:
`unscheduled` counts it in the metrics. All others run through the mesh and are answered as SGLang
answers them.
"""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from treadle import Sampling
from treadle_runtime.http.sglang import SAMPLING

from treadle_gateway.calls import Calls, Turns
from treadle_gateway.engines import Proxy
from treadle_gateway.mesh import MeshLink
from treadle_gateway.order import (
    EVENT_STREAM,
    PENALTIES,
    Count,
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

DEFAULT_NEW_TOKENS = 128  # SGLang's own
# Fields that the mesh carries, or that do not concern tokens.
CARRIED = frozenset(
    {
        "input_ids",
        "text",
        "sampling_params",
        "return_logprob",
        "stream",
        "rid",
        "session_id",
        "conversation_id",
    }
    | {"extra_key", "cache_salt", "priority", "routing_key", "log_metrics", "no_logs"}
    | {"return_prompt_token_ids", "nvext"}
)
MEDIA = ("image_data", "video_data", "audio_data")
# Values that request nothing.
NOTHING: Mapping[str, tuple[object, ...]] = {
    "logprob_start_len": (-1, 0),
    "routed_experts_start_len": (0,),
    "top_logprobs_num": (0,),
    "token_ids_logprob": ([],),
}
SAMPLED = {field.sglang_name: name for name, field in SAMPLING.items()}
# fields for how text is made
WRITTEN = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "n"})
NEUTRAL: Mapping[str, float] = {**PENALTIES, "min_new_tokens": 0}


# Fields that have a value for all prompts, or a list with one for each. SGLang takes no lists of
# the second kind together with several answers to a prompt.
LISTED = ("sampling_params", "rid", "extra_key", "cache_salt", "return_hidden_states", "watermark")
LISTED_ALONE = (
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_sampling_mask", "sampling_logprobs_mode", "custom_logit_processor"),
)


CHECKED = {field.sglang_name: field for field in SAMPLING.values()}
del CHECKED["max_new_tokens"], CHECKED["stop"]


class GenerateFields(Fields):
    """Fields of SGLang's GenerateReqInput."""

    text: str | Many[str] | None = None
    rid: Name | Many[Name] | None = None
    extra_key: str | Many[str] | None = None
    cache_salt: str | Many[str] | None = None
    return_logprob: bool | Many[bool] | None = None
    logprob_start_len: int | Many[int] | None = None
    top_logprobs_num: Count | Many[Count] | None = None
    token_ids_logprob: Many[Count] | Many[Many[Count]] | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Count | None = None
    return_prompt_token_ids: bool | None = None
    return_entropy: bool | None = None
    require_reasoning: bool | None = None
    max_thinking_tokens: Count | None = None
    log_metrics: bool | None = None
    no_logs: bool | None = None
    watermark: dict[str, Any] | Many[dict[str, Any] | None] | None = None


class GenerateSampling(SamplingFields):
    """Fields of SGLang's sampling_params."""

    max_new_tokens: Count | None = None
    json_schema: str | None = None
    structural_tag: str | None = None


@dataclass(frozen=True)
class Wish:
    """One answer that a request wants. logprobs, prompt_ids: whether it has them. skip_special,
    trim: how its text is written."""

    order: Order
    logprobs: bool
    prompt_ids: bool
    skip_special: bool
    trim: bool


@dataclass
class _Draft:
    """Answer that may lack tokens and its end."""

    wish: Wish
    output: Output = field(default_factory=Output)
    text: str = ""
    began_s: float = field(default_factory=time.monotonic)
    sent: tuple[int, int] = (0, 0)  # tokens, characters

    def cut(self, message: dict[str, Any]) -> None:
        """Leave in a message what earlier ones of the stream did not have."""
        tokens, characters = self.sent
        self.sent = len(message["output_ids"]), len(message["text"])
        message["output_ids"] = message["output_ids"][tokens:]
        message["text"] = message["text"][characters:]
        meta = message["meta_info"]
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"] = meta["output_token_logprobs"][tokens:]


def carries(body: Mapping[str, Any]) -> bool:
    """Return whether the mesh can do all that a request needs."""
    for name, value in body.items():
        nothing = value is None or value is False or value in NOTHING.get(name, ())
        empty = not value and name in MEDIA
        if name not in CARRIED and not nothing and not empty:
            return False
    # Logprobs from token 0 on are those of the whole prompt.
    if body.get("return_logprob") and body.get("logprob_start_len") not in (None, -1):
        return False
    for sampling in _each_sampling(body):
        if sampling.get("max_new_tokens") == 0:  # the mesh samples one token at least
            return False
        for name, value in sampling.items():
            known = (
                name in SAMPLED or name in WRITTEN or value is None or value == NEUTRAL.get(name)
            )
            if not known:
                return False
    return True


def check(body: Mapping[str, Any]) -> None:
    """Raise Refused unless each field of a request holds what it may."""
    GenerateFields.check(body)
    for sampling in _each_sampling(body):
        where = "sampling_params."
        GenerateSampling.check(sampling, where)
        for name, value in sampling.items():
            if name not in SAMPLED and name not in GenerateSampling.model_fields:
                raise Refused(f"{where}{name[:100]}: is not known")
            if name in CHECKED and value is not None and (wrong := CHECKED[name].problem(value)):
                raise Refused(f"{where}{name}: {wrong}")
    _check_lists(body)


def _check_lists(body: Mapping[str, Any]) -> None:
    """Raise Refused unless the request has one source of prompts, and lists for several prompts
    have one entry for each; an engine may die of others."""
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise Refused("input_ids, text: give one of them")
    prompts: Any = ids if text is None else text
    several = isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))
    if several and not prompts:
        raise Refused(f"{'text' if ids is None else 'input_ids'}: must have at least one prompt")
    copies = {sampling.get("n") or 1 for sampling in _each_sampling(body)} or {1}
    if len(copies) > 1:
        raise Refused("sampling_params.n: must be the same for all prompts")
    require_answers(len(prompts) if several else 1, *copies)
    for name in (*LISTED, *LISTED_ALONE, *(MEDIA if several else ())):
        given = body.get(name)
        of_all = name == "token_ids_logprob" and not (given and isinstance(given[0], list))
        if not isinstance(given, list) or of_all:
            continue
        if not several:
            raise Refused(f"{name}: must not be a list, as there is one prompt")
        if len(given) != len(prompts):
            raise Refused(f"{name}: must have one entry for each of {len(prompts)} prompts")
        if name in LISTED_ALONE and copies != {1}:
            raise Refused(f"{name}: must not be a list where n is above 1")
    rids = body.get("rid")
    if isinstance(rids, list) and len(set(rids)) < len(rids):
        raise Refused("rid: must be another one for each prompt")


def _each_sampling(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = body.get("sampling_params")
    each = given if isinstance(given, list) else [{} if given is None else given]
    if not all(isinstance(sampling, dict) for sampling in each):
        raise Refused("sampling_params: must be an object, or a list of them")
    return each


def read_sampling(given: Mapping[str, Any], room: int) -> Sampling:
    """Return the sampling that a request names. room: tokens that fit behind the prompt. Raises
    Refused."""
    fields = {ours: given[name] for name, ours in SAMPLED.items() if given.get(name) is not None}
    fields |= read_stops(given)
    # SGLang reads null as no limit.
    most = given.get("max_new_tokens", min(DEFAULT_NEW_TOKENS, room))
    fields["max_new_tokens"] = read_new_tokens("sampling_params.max_new_tokens", most, room)
    return Sampling(**fields)


async def read_wishes(
    body: Mapping[str, Any], session: str, model: TextModel | None, context_tokens: int
) -> list[Wish]:
    """Return the answers that a checked request wants, in its order. context_tokens: as of
    require_room. Raises Refused."""
    prompts = await _prompts(body, model, context_tokens)
    count = len(prompts)
    rids, logprobs, given = body.get("rid"), body.get("return_logprob"), _each_sampling(body)
    each_sampling = given if isinstance(body.get("sampling_params"), list) else given * count
    each_logprob = logprobs if isinstance(logprobs, list) else [logprobs] * count
    wishes: list[Wish] = []
    for at, ((where, prompt), sampling, logprob) in enumerate(
        zip(prompts, each_sampling, each_logprob, strict=True)
    ):
        base = rids[at] if isinstance(rids, list) else rids or uuid.uuid4().hex
        copies = sampling.get("n") or 1
        room = require_room(len(prompt), context_tokens)
        for copy in range(copies):
            alone = count == copies == 1
            rid = (
                base if alone or (isinstance(rids, list) and copies == 1) else f"{base}_{at}_{copy}"
            )
            sampled = read_sampling(sampling, room).of_sample(copy)
            skip = sampling.get("skip_special_tokens", True)
            trim = not sampling.get("no_stop_trim")
            wishes.append(
                Wish(
                    Order(session, prompt, sampled, rid, where),
                    bool(logprob),
                    bool(body.get("return_prompt_token_ids")),
                    bool(skip),
                    trim,
                )
            )
    return wishes


async def _prompts(
    body: Mapping[str, Any], model: TextModel | None, context_tokens: int
) -> list[tuple[str, list[int]]]:
    """Return the token ids of each prompt, and its place in the request."""
    ids, text = body.get("input_ids"), body.get("text")
    if text is not None:
        texts = (
            [("text", text)]
            if isinstance(text, str)
            else [(f"text[{at}]", each) for at, each in enumerate(text)]
        )
        return await require_model(model).encode_prompts(texts, context_tokens)
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        named = [(f"input_ids[{at}]", each) for at, each in enumerate(ids)]
        return [(where, read_tokens(where, each)) for where, each in named]
    return [("input_ids", read_tokens("input_ids", ids))]


class SglangApi:
    """Endpoint /generate."""

    def __init__(self, calls: Calls, proxy: Proxy, mesh: MeshLink, model: TextModel | None) -> None:
        self._calls, self._proxy, self._mesh, self._model = calls, proxy, mesh, model

    async def generate(self, request: Request) -> Response:
        """Answer POST /generate."""
        body = await read_body(request)
        session = session_of(request, body)
        check(body)
        if not carries(body):
            return await self._proxy.forward(request, body, session)
        wishes = await read_wishes(body, session, self._model, self._mesh.context_tokens)
        hold_answers(request, [wish.order for wish in wishes])
        if body.get("stream"):
            incremental = await self._proxy.are_incremental()
            return StreamingResponse(self._stream(wishes, incremental), media_type=EVENT_STREAM)
        # a list in a batch
        given = body["text"] if body.get("text") is not None else body["input_ids"][0]
        single = len(wishes) == 1 and not isinstance(given, list)
        answers = await run_unless_gone(request, self._calls.run_all(wishes, self._answer))
        return JSONResponse(answers[0] if single else answers)

    async def _answer(self, wish: Wish, turns: Turns | None) -> dict[str, Any]:
        draft = _Draft(wish)
        async with aclosing(self._calls.run(wish.order, turns)) as events:
            async for event in events:
                draft.output.add(event)
        return self._message(draft)

    async def _stream(
        self, wishes: Sequence[Wish], incremental: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events. incremental: each has the new tokens alone, not all so far."""
        drafts = [_Draft(wish) for wish in wishes]
        texts = [self._text_stream(wish) for wish in wishes]
        try:
            orders = [wish.order for wish in wishes]
            async with aclosing(self._calls.stream_all(orders)) as events:
                async for at, event in events:
                    draft, text = drafts[at], texts[at]
                    draft.output.add(event)
                    if text is not None and isinstance(event, Tokens):
                        draft.text += text.add(event.token_ids)
                    message = self._message(draft) | ({"index": at} if len(wishes) > 1 else {})
                    if incremental:
                        draft.cut(message)
                    yield b"data: " + json.dumps(message).encode() + b"\n\n"
        except Refused as refusal:
            error = {"error": {"message": str(refusal), "code": refusal.code}}
            yield b"data: " + json.dumps(error).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _text_stream(self, wish: Wish) -> TextStream | None:
        if self._model is None:
            return None
        return TextStream(
            self._model, wish.order.sampling, skip_special=wish.skip_special, trim=wish.trim
        )

    def _message(self, draft: "_Draft") -> dict[str, Any]:
        """Return SGLang's answer for a generation with the tokens that it has so far."""
        wish, output, text, model = draft.wish, draft.output, draft.text, self._model
        ended, sampling = output.ended, wish.order.sampling
        finish: dict[str, object] | None = None
        if ended is not None:
            finish = {"type": ended.finish}
            matched: int | str | None = None
            if ended.finish == "length":
                finish["length"] = len(output.token_ids)
            elif ended.finish == "stop" and model is not None:
                matched = finish["matched"] = matched_end(
                    model, output, sampling.stop, sampling.stop_token_ids
                )
            if model is not None:
                text = answer_text(
                    model, output, matched, skip_special=wish.skip_special, trim=wish.trim
                )
        meta: dict[str, object] = {
            "id": wish.order.rid,
            "finish_reason": finish,
            "prompt_tokens": len(wish.order.prompt),
            "completion_tokens": len(output.token_ids),
            "cached_tokens": ended.cached_tokens if ended is not None else 0,
            **output.versions(),
            "e2e_latency": time.monotonic() - draft.began_s,
        }
        if wish.logprobs:
            meta["output_token_logprobs"] = [
                [logprob, token, None]
                for logprob, token in zip(output.logprobs, output.token_ids, strict=True)
            ]
        if ended is not None and ended.trajectory_id:
            meta["trajectory_id"] = ended.trajectory_id
        prompt = {"prompt_token_ids": wish.order.prompt} if wish.prompt_ids else {}
        return {"text": text, "output_ids": output.token_ids, "meta_info": meta, **prompt}
