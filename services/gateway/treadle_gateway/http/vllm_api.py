"""Serve vLLM's /inference/v1/generate, token ids in, token ids out, for SkyRL's and prime-rl's
rollouts.

The engines are SGLang's, which have no such path. What the mesh carries runs through the mesh. For
sampling that it does not carry, and for the experts that SkyRL's /skyrl/v1/generate wants, the
gateway calls one engine in SGLang's form, without a place in the mesh's order. Nothing is left out
of an answer: what neither can do is refused.
"""

import base64
import json
import uuid
from array import array
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from treadle import Sampling
from treadle_runtime.http.sglang import SAMPLING

from treadle_gateway.calls import Calls, Turns
from treadle_gateway.engines import NO_EXPERTS, Proxy, engine_sampling
from treadle_gateway.mesh import MeshLink
from treadle_gateway.order import (
    HIGHEST_ID,
    PENALTIES,
    Ended,
    Fields,
    Finish,
    Name,
    Order,
    Output,
    Refused,
    SamplingFields,
    Tokens,
    hold_answers,
    read_body,
    read_stops,
    read_tokens,
    require_room,
    run_unless_gone,
    session_of,
)

# the mesh names them as vLLM does
SAMPLED = frozenset(SAMPLING) - {"max_new_tokens", "top_k", "stop", "stop_token_ids"}
# Fields for how an answer is written, or how the engine works; none of them changes a token. The
# mesh samples one token at least, and its engines report no experts from a place on.
UNCHANGED = frozenset(
    {"max_tokens", "n", "top_k", "stop", "stop_token_ids", "logprobs", "skip_special_tokens"}
)
UNCHANGED |= {
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
    "output_kind",
}
UNCHANGED |= {"routed_experts_prompt_start"}
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **{name: (value,) for name, value in PENALTIES.items()},
    "min_tokens": (0, 1),
}
SGLANG_NAMES = {"min_tokens": "min_new_tokens", "logit_bias": "logit_bias"} | {
    name: name for name in PENALTIES
}
NOT_CARRIED = ("features", "content_parts", "kv_transfer_params", "stream")


class VllmFields(Fields):
    """Fields of vLLM's GenerateRequest."""

    request_id: Name | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None


class VllmSampling(SamplingFields):
    """Fields of vLLM's SamplingParams. top_k: below 1 is all."""

    max_tokens: Annotated[int, Field(ge=1, le=HIGHEST_ID)] | None = None
    top_k: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None
    output_kind: int | None = None


class VllmApi:
    """Endpoints for token ids. folder: the model's, whose config gives the number of experts of a
    token; None: unknown."""

    def __init__(
        self, calls: Calls, proxy: Proxy, link: MeshLink, served_model: str, folder: Path | None
    ) -> None:
        self._calls, self._proxy, self._link, self._served_model = calls, proxy, link, served_model
        self._experts_per_token = read_experts_per_token(folder) if folder is not None else 0

    async def generate(self, request: Request) -> Response:
        """Answer POST /inference/v1/generate."""
        return await self._answer(request, experts=False)

    async def generate_with_experts(self, request: Request) -> Response:
        """Answer POST /skyrl/v1/generate: each choice has `routed_experts`, of all tokens of the
        sequence but its last."""
        return await self._answer(request, experts=True)

    async def _answer(self, request: Request, *, experts: bool) -> Response:
        body = await read_body(request)
        VllmFields.check(body)
        for name in NOT_CARRIED:
            if body.get(name):
                raise Refused(f"{name}: is not carried", 501)
        self._check_model(body.get("model"))
        prompt, given = (
            read_tokens("token_ids", body.get("token_ids")),
            body.get("sampling_params") or {},
        )
        if not isinstance(given, dict):
            raise Refused("sampling_params: must be an object")
        VllmSampling.check(given, "sampling_params.")
        if experts and not self._experts_per_token:
            raise Refused(NO_EXPERTS, 501)
        copies = given.get("n") or 1
        sampling, more = read_sampling(given, require_room(len(prompt), self._link.context_tokens))
        session, rid = session_of(request, body), str(body.get("request_id") or uuid.uuid4().hex)
        orders = [
            Order(
                session, prompt, sampling.of_sample(at), f"{rid}-{at}" if at else rid, "token_ids"
            )
            for at in range(copies)
        ]
        hold_answers(request, orders)
        logprobs = given.get("logprobs") is not None
        answers = await run_unless_gone(request, self._run_all(orders, more, logprobs, experts))
        written = sum(len(choice["token_ids"]) for choice in answers)
        answer: dict[str, Any] = {
            "request_id": rid,
            "choices": [{"index": at, **choice} for at, choice in enumerate(answers)],
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": written,
                "total_tokens": len(prompt) + written,
                "prompt_tokens_details": {
                    "cached_tokens": sum(choice.pop("cached_tokens") for choice in answers)
                },
            },
        }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = prompt
        return JSONResponse(answer)

    def _check_model(self, model: object) -> None:
        """Raise Refused where a request names an adapter, which must not get answers of the base
        model."""
        names = (
            {self._served_model}
            if self._served_model
            else {each.model for each in self._link.engines.values()}
        )
        if model and model not in names:
            raise Refused(
                f"model: must be {' or '.join(sorted(names))}, is {model!r:.100}; "
                "TREADLE_GATEWAY_SERVED_MODEL names it",
                404,
            )

    async def _run_all(
        self, orders: list[Order], more: Mapping[str, object], logprobs: bool, experts: bool
    ) -> list[dict[str, Any]]:
        run = self._ask_engine if more or experts else self._run
        return await self._calls.run_all(
            orders, lambda order, turns: run(order, turns, more, logprobs, experts)
        )

    async def _run(
        self, order: Order, turns: Turns | None, more: object, logprobs: bool, experts: bool
    ) -> dict[str, Any]:
        """Return a choice, through the mesh."""
        output = Output()
        async with aclosing(self._calls.run(order, turns)) as events:
            async for event in events:
                output.add(event)
        return _choice(output, logprobs)

    async def _ask_engine(
        self,
        order: Order,
        turns: Turns | None,
        more: Mapping[str, object],
        logprobs: bool,
        experts: bool,
    ) -> dict[str, Any]:
        """Return a choice, from one engine."""
        sampling = {**engine_sampling(order.sampling), **more}
        body = {"input_ids": order.prompt, "sampling_params": sampling, "return_logprob": True}
        more_fields = {"return_routed_experts": True} if experts else {}
        async with AsyncExitStack() as stack:
            for turn in turns or ():
                await stack.enter_async_context(turn)
            answer = await self._proxy.ask(order, body | more_fields)
        meta, output = answer["meta_info"], Output()
        finish: Finish = meta["finish_reason"]["type"]
        output.add(
            Tokens(
                answer["output_ids"],
                [e[0] for e in meta["output_token_logprobs"]],
                meta["weight_version"],
            )
        )
        output.add(Ended(finish, cached_tokens=meta.get("cached_tokens") or 0))
        choice = _choice(output, logprobs)
        if experts:
            rows = len(order.prompt) + len(output.token_ids) - 1
            choice["routed_experts"] = self._experts(meta.get("routed_experts"), rows)
        return choice

    def _experts(self, encoded: str | None, rows: int) -> list[list[list[int]]]:
        """Return [token][layer][expert of the token], from SGLang's base64 of int32. Raises
        Refused."""
        top = self._experts_per_token
        ids = array("i", base64.b64decode(encoded or ""))
        if not ids or not top or len(ids) % (rows * top):
            raise Refused(NO_EXPERTS, 501)
        width = len(ids) // rows
        return [
            [ids[at : at + top].tolist() for at in range(row * width, (row + 1) * width, top)]
            for row in range(rows)
        ]


def read_sampling(given: Mapping[str, Any], room: int) -> tuple[Sampling, dict[str, object]]:
    """Return what the mesh carries of vLLM's SamplingParams, and the rest in SGLang's form. room:
    tokens that fit behind the prompt. Raises Refused."""
    more: dict[str, object] = {}
    for name, value in given.items():
        nothing = value is None or value is False or value in ([], {}, "")
        if name in SAMPLED or name in UNCHANGED or nothing or value in NEUTRAL.get(name, ()):
            continue
        if name not in SGLANG_NAMES:
            raise Refused(f"sampling_params.{name[:100]}: is not carried", 501)
        more[SGLANG_NAMES[name]] = value
    if type(given.get("logprobs")) is int and given["logprobs"] > 1:
        raise Refused(
            "sampling_params.logprobs: must be 0 or 1, as only sampled tokens have theirs", 501
        )
    most, top_k = given.get("max_tokens"), given.get("top_k")
    most = room if most is None else min(most, room)  # as vLLM does, where SGLang refuses
    fields = {name: given[name] for name in SAMPLED if given.get(name) is not None}
    return Sampling(
        max_new_tokens=most,
        top_k=top_k if top_k and top_k > 0 else None,
        **fields,
        **read_stops(given),
    ), more


def read_experts_per_token(folder: Path) -> int:
    """Return the experts of a token from a model's config.json; 0 where it has none."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    found = (
        config.get("num_experts_per_tok")
        or (config.get("text_config") or {}).get("num_experts_per_tok")
        or 0
    )
    return int(found)


def _choice(output: Output, logprobs: bool) -> dict[str, Any]:
    """Return vLLM's choice, with the weights that sampled its tokens and its trajectory."""
    assert output.ended is not None
    content: list[dict[str, object]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(output.token_ids, output.logprobs, strict=True)
    ]
    spans = [
        {"version": each.weight_version, "start": each.start_token, "end": each.end_token}
        for each in output.spans
    ]
    return {
        "token_ids": output.token_ids,
        "finish_reason": output.ended.finish,
        "logprobs": {"content": content} if logprobs else None,
        "weight_versions": spans,
        "trajectory_id": output.ended.trajectory_id,
        "cached_tokens": output.ended.cached_tokens,
    }
