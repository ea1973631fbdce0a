"""Read what all HTTP forms share of a request, and hold a generation's order and its output.

A request of any form becomes orders; tokens and an end come back. A call whose caller has gone is
ended.
"""

import asyncio
import re
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from treadle import Sampling, VersionSpan
from treadle.types import SEEDS
from treadle_runtime.http.sglang import SAMPLING
from treadle_runtime.http.web import hold, read_json

Finish = Literal["stop", "length", "abort"]
HIGHEST_ID = 2**31 - 1  # of a token, as an int32
EVENT_STREAM = "text/event-stream"
# Headers that name a session, the first present one counts: SkyRL and prime-rl; SGLang's gateway.
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
MOST_COPIES = 1024  # most answers to one prompt
MOST_ANSWERS = 4096  # most answers to all prompts of a request
MOST_REPEATED = 2**24  # most tokens of prompts that a request's answers have together
MOST_BIAS = 3.4e38  # a float32
MOST_STOP_IDS = 4096  # a request goes to an engine with them, for each answer
MOST_NAME_CHARS = 1024  # of a session, a request or a model; each is kept, or repeated
# What an answer takes that waits for its turn, and a token of its prompt: once in its trajectory,
# and once in the answer, where that repeats it.
ANSWER_BYTES, TOKEN_BYTES = 4096, 16
# What the mesh does not carry, under the same names in all forms, and the value that changes
# nothing.
PENALTIES: Mapping[str, float] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}

# Fields that SGLang's own parts send each other, or that name a part of one engine. SGLang trusts
# them, and some wrong values end it.
NOT_FORWARDED = frozenset(
    {"positional_embed_overrides", "input_embeds", "http_worker_ipc", "kv_hints", "encoder_urls"}
    | {"need_wait_for_mm_inputs", "num_items_assigned", "received_time", "external_trace_header"}
    | {"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"}
    | {"decode_tp_size", "disagg_prefill_dp_rank", "routed_dp_rank", "data_parallel_rank"}
    | {"session_params", "multi_item_delimiter_indices", "token_indices_to_pool", "lora_id"}
    | {"return_bytes", "lora_path", "custom_labels"}
)
# Fields with a number of alternatives for each token.
ALTERNATIVES = ("top_logprobs_num", "top_logprobs", "logprobs")

T = TypeVar("T")
# A list; only its first wrong value is looked for, as there may be a million.
Many = Annotated[list[T], Field(fail_fast=True)]
Name = Annotated[str, Field(max_length=MOST_NAME_CHARS)]


def _require_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"a regular expression ({error})") from error
    return pattern


def _require_biases(given: dict[str, Any]) -> dict[str, Any]:
    for token, bias in given.items():
        named = token.isascii() and token.isdigit() and len(token) <= 10
        if not named or type(bias) not in (int, float) or abs(bias) > MOST_BIAS:
            raise ValueError(f"numbers to {MOST_BIAS:g} at most by token ids, has {token[:20]!r}")
    return given


# An engine gets them with each answer, and it takes long to compile a long expression.
Stop = Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARS)]
Regex = Annotated[str, Field(max_length=MOST_NAME_CHARS), AfterValidator(_require_regex)]
Count = Annotated[int, Field(ge=0, le=HIGHEST_ID)]


class Fields(BaseModel):
    """Base of the tables that say what the fields of a form may hold. A form adds its own fields;
    SGLang checks those that no table has."""

    model_config = ConfigDict(strict=True)

    model: Name | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-HIGHEST_ID, le=HIGHEST_ID)] | None = None
    session_id: Name | None = None
    conversation_id: Name | None = None
    routing_key: Name | None = None
    nvext: dict[str, Any] | None = None

    @classmethod
    def check(cls, given: Mapping[str, Any], where: str = "") -> None:
        """Raise Refused unless each field holds what it may."""
        try:
            cls.model_validate(given)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
            name, value = found[0]["loc"][0], repr(given.get(str(found[0]["loc"][0])))[:100]
            right = " or ".join(
                dict.fromkeys(
                    each["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
                    for each in found
                    if each["loc"][0] == name
                )
            )
            raise Refused(f"{where}{name}: must be {right}, is {value}") from None


class SamplingFields(Fields):
    """Fields with which tokens are sampled, besides those that the mesh carries (SAMPLING)."""

    n: Annotated[int, Field(ge=1, le=MOST_COPIES)] | None = None
    min_new_tokens: Count | None = None
    min_tokens: Count | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Any], AfterValidator(_require_biases)] | None = None
    stop: Stop | Many[Stop] | None = None
    stop_regex: Regex | Many[Regex] | None = None
    stop_token_ids: Annotated[Many[Count], Field(max_length=MOST_STOP_IDS)] | None = None
    regex: str | None = None
    ebnf: str | None = None
    stream_interval: Annotated[int, Field(ge=1, le=HIGHEST_ID)] | None = None
    custom_params: dict[str, Any] | None = None
    watermark: dict[str, Any] | None = None
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] | None = None
    sampling_seed: Annotated[int, Field(ge=0, lt=SEEDS)] | None = None

    @classmethod
    def check(cls, given: Mapping[str, Any], where: str = "") -> None:
        super().check(given, where)
        for least in ("min_new_tokens", "min_tokens"):
            for most in ("max_new_tokens", "max_completion_tokens", "max_tokens"):
                if (given.get(least) or 0) > (given.get(most) or HIGHEST_ID):
                    raise Refused(
                        f"{where}{least}: must be {most} at most, is {given[least]!r:.100}"
                    )


@dataclass(frozen=True)
class Order:
    """One generation. session: whose trajectory it belongs to; empty: found by its tokens. prompt:
    the whole context, as token ids, which nobody changes. rid: name by which it may be aborted.
    prompt_field: where the caller wrote the prompt. Raises Refused for a value of the wrong kind or
    outside its range."""

    session: str
    prompt: list[int]
    sampling: Sampling
    rid: str
    prompt_field: str = "the prompt"

    def __post_init__(self) -> None:
        if not self.prompt:
            raise Refused(f"{self.prompt_field}: must have at least one token")
        if not isinstance(self.rid, str) or len(self.rid) > 2 * MOST_NAME_CHARS:
            raise Refused(f"rid: must be a text of {MOST_NAME_CHARS} characters at most")
        for name, value in vars(self.sampling).items():
            if value is not None and (problem := SAMPLING[name].problem(value)):
                raise Refused(f"{name}: {problem}")


@dataclass(frozen=True)
class Tokens:
    """New tokens of a generation. logprobs: one for each token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weight_version: str


@dataclass(frozen=True)
class Ended:
    """The end of a generation. trajectory_id: empty where the mesh was away."""

    finish: Finish
    trajectory_id: str = ""
    cached_tokens: int = 0


@dataclass
class Output:
    """Tokens of a generation so far, and its end. spans: of weight versions, over its tokens."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    ended: Ended | None = None

    def add(self, event: Tokens | Ended) -> None:
        """Take the next event."""
        if isinstance(event, Ended):
            self.ended = event
            return
        start, end = len(self.token_ids), len(self.token_ids) + len(event.token_ids)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if self.spans and self.spans[-1].weight_version == event.weight_version:
            self.spans[-1] = VersionSpan(event.weight_version, self.spans[-1].start_token, end)
        elif start < end:
            self.spans.append(VersionSpan(event.weight_version, start, end))

    def versions(self) -> dict[str, Any]:
        """Return the weight versions that sampled the tokens, in SGLang's form."""
        each = [
            {"version": span.weight_version, "start": span.start_token, "end": span.end_token}
            for span in self.spans
        ]
        return {"weight_version": each[-1]["version"] if each else "", "weight_versions": each}


def read_tokens(name: str, given: object) -> list[int]:
    """Return the value of a field that holds token ids. Raises Refused."""
    if (
        isinstance(given, list)
        and set(map(type, given)) == {int}
        and min(given) >= 0
        and max(given) <= HIGHEST_ID
    ):
        return given
    raise Refused(f"{name}: must be a list of token ids from 0 to {HIGHEST_ID}, at least one")


def read_stops(given: Mapping[str, object]) -> dict[str, Any]:
    """Return Sampling's stop and stop_token_ids, which have these names in all forms. Raises
    Refused."""
    stop, ids = given.get("stop") or [], given.get("stop_token_ids") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not isinstance(ids, list):
        raise Refused("stop, stop_token_ids: must be lists")
    return {"stop": tuple(stop), "stop_token_ids": tuple(ids)}


class Refused(Exception):  # noqa: N818 - what happened to the request
    """Raised where the request cannot be served as it is; the message names the field and what
    would be right. code: OpenAI's word for the reason, where it has one; else the status."""

    def __init__(self, message: str, status: int = 400, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code: str | int = code or status


@dataclass(frozen=True)
class Bounds:
    """Abilities of an engine, and the limits within which it survives a request. vocab_size:
    its token ids are below; 0: it does not say. deterministic: it honours seeds, and dies of min_p
    together with them. incremental: an event of its streams has the new tokens alone, not all so
    far. experts: it returns routed experts."""

    vocab_size: int
    deterministic: bool
    incremental: bool
    experts: bool

    def require_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raise Refused for an id outside the vocabulary."""
        if self.vocab_size and ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise Refused(f"{name}: must hold ids below {self.vocab_size}, holds {wrong}")

    def require_order(self, order: Order) -> None:
        """Raise Refused for what would end the engine."""
        self.require_ids(order.prompt_field, order.prompt)
        if self.deterministic and order.sampling.min_p:
            raise Refused("min_p: must be 0 on an engine with deterministic inference")

    def require_forwardable(self, body: Mapping[str, Any]) -> None:
        """Raise Refused for a request in one of SGLang's forms that its own checks let through and
        that would end the engine, or bring an answer that nobody means."""
        if denied := sorted(NOT_FORWARDED & body.keys()):
            raise Refused(f"{', '.join(denied)}: not for callers of the mesh; leave it out")
        for name in ("text", "prompt"):
            given = body.get(name)
            if given == "" or (isinstance(given, list) and "" in given):
                raise Refused(f"{name}: must have at least one token")
        for name in ("input_ids", "prompt"):
            for at, ids in _each_prompt(name, body.get(name)):
                self.require_ids(at, ids)
        for name in ALTERNATIVES:
            counts, most = body.get(name), self.vocab_size or HIGHEST_ID
            if max(counts if isinstance(counts, list) else [counts or 0], default=0) > most:
                raise Refused(f"{name}: must be {most} at most, is {counts!r:.100}")
        given = body.get("sampling_params") or {}
        self._require_sampling(body, "")
        for sampling in given if isinstance(given, list) else [given]:
            self._require_sampling(sampling, "sampling_params.")

    def _require_sampling(self, given: Mapping[str, Any], where: str) -> None:
        self.require_ids(f"{where}stop_token_ids", given.get("stop_token_ids") or ())
        self.require_ids(f"{where}logit_bias", [int(at) for at in given.get("logit_bias") or ()])
        if self.deterministic and given.get("min_p"):
            raise Refused(f"{where}min_p: must be 0 on an engine with deterministic inference")
        seed = given.get("seed", given.get("sampling_seed"))
        if seed is not None and (given.get("n") or 1) > 1:
            raise Refused(
                f"{where}n: must be 1 with a seed in a request that an engine gets as it is, since "
                "it gives all copies the same one; send a request for each seed"
            )


def _each_prompt(name: str, given: object) -> Iterator[tuple[str, list[int]]]:
    """Yield the token ids of each prompt in a field, and its place. Raises Refused."""
    prompts = given if isinstance(given, list) else []
    if prompts and isinstance(prompts[0], int):
        yield name, read_tokens(name, prompts)
    else:
        for at, prompt in enumerate(prompts):
            if isinstance(prompt, list):
                yield f"{name}[{at}]", read_tokens(f"{name}[{at}]", prompt)


def require_room(prompt_tokens: int, context_tokens: int) -> int:
    """Return how many tokens fit behind a prompt. context_tokens: of the longest sequence that an
    engine takes; 0: not known. Raises Refused, in words by which agents know to shorten theirs."""
    if 0 < context_tokens <= prompt_tokens:
        raise Refused(
            f"the prompt has {prompt_tokens} tokens, which leave no room to generate: this model's "
            f"maximum context length is {context_tokens} tokens; shorten the prompt",
            code="context_length_exceeded",
        )
    return context_tokens - prompt_tokens if context_tokens else HIGHEST_ID


def read_new_tokens(name: str, wanted: int | None, room: int) -> int:
    """Return how many tokens to generate at most. wanted: None: as many as fit. room: tokens that
    fit behind the prompt. Raises Refused for more, as SGLang does."""
    if wanted is not None and wanted > room:
        raise Refused(
            f"{name}: {wanted} tokens do not fit, the prompt leaves {room} of this model's maximum "
            "context length; request fewer, or shorten the prompt",
            code="context_length_exceeded",
        )
    return room if wanted is None else wanted


class CallerGone(Exception):  # noqa: N818 - what happened
    """Raised where the caller closed the connection before the answer."""


async def read_body(request: Request) -> dict[str, Any]:
    """Return a request's JSON object. Raises Refused."""
    try:
        body = await read_json(request)
    except ValueError as error:
        raise Refused(f"the body must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    return body


def require_answers(prompts: int, copies: int) -> None:
    """Raise Refused where a request wants too many answers."""
    if prompts * copies > MOST_ANSWERS:
        raise Refused(
            f"n: {copies} answers to each of {prompts} prompts are {prompts * copies}; a request "
            f"has {MOST_ANSWERS} at most, send several"
        )


def hold_answers(request: Request, orders: Sequence["Order"]) -> None:
    """Count what the answers of a request take in memory, which is more than its body where a
    prompt has many. Raises Refused, HTTPException."""
    tokens = sum(len(order.prompt) for order in orders)
    if len(orders) > 1 and tokens > MOST_REPEATED:
        raise Refused(
            f"n: the prompts of all {len(orders)} answers have {tokens} tokens together; a request "
            f"has {MOST_REPEATED} at most, send several"
        )
    hold(request, ANSWER_BYTES * len(orders) + TOKEN_BYTES * tokens)


def session_of(request: Request, body: Mapping[str, Any]) -> str:
    """Return the session that a request names; empty where it names none."""
    for header in SESSION_HEADERS:
        if value := request.headers.get(header):
            return _require_name(header, value)
    nvext = body.get("nvext")
    context = nvext.get("agent_context") if isinstance(nvext, dict) else None
    found = (
        body.get("session_id")
        or (context.get("trajectory_id") if isinstance(context, dict) else "")
        or ""
    )
    return _require_name("session_id", found)


def _require_name(field: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MOST_NAME_CHARS:
        raise Refused(
            f"{field}: must be a text of {MOST_NAME_CHARS} characters at most, is {value!r:.100}"
        )
    return value


async def run_unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the caller closes the connection. Raises
    CallerGone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    waits: set[Awaitable[Any]] = {working, gone}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
        if not working.done():
            raise CallerGone
        try:
            return await working
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first request of a batch that was refused
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
