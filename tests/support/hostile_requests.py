"""Hostile and odd requests of the gateway's HTTP paths, made from schemas: the one that an engine
publishes at /openapi.json, OpenAI's, from the types of its client, and tables of what has no
published schema. The list is the same one each time."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import TypeAdapter

SEED = 46
PAIRS = 12  # requests for a path that change two fields
STREAMED = 0.15  # of the requests for a path that can stream
CONTEXT_TOKENS = 256  # of the engine, whose model would take more
IDS = [5, 6, 7, 8, 9]
GENERATE, CHAT, COMPLETE = "/generate", "/v1/chat/completions", "/v1/completions"
RESPOND, VLLM, SKYRL = "/v1/responses", "/inference/v1/generate", "/skyrl/v1/generate"
TOKENIZE, DETOKENIZE, ABORT = "/tokenize", "/detokenize", "/abort_request"
STREAMS = (GENERATE, CHAT, COMPLETE, RESPOND)

# Greedy by two fields: a request that spoils one of them stays greedy.
GREEDY = {"temperature": 0, "top_k": 1}
GOOD: Mapping[str, dict[str, Any]] = {
    GENERATE: {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2, **GREEDY}},
    CHAT: {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 2, **GREEDY},
    COMPLETE: {"prompt": "Say hi to", "max_tokens": 2, **GREEDY},
    RESPOND: {"input": "Say hi.", "max_output_tokens": 2, "temperature": 0},
    VLLM: {"token_ids": IDS, "sampling_params": {"max_tokens": 2, **GREEDY}},
    SKYRL: {"token_ids": IDS, "sampling_params": {"max_tokens": 2, **GREEDY}},
    TOKENIZE: {"prompt": "Say hi"},
    DETOKENIZE: {"tokens": IDS},
    ABORT: {"rid": "nobody"},
}
PUBLISHED = {
    GENERATE: "GenerateReqInput",
    CHAT: "ChatCompletionRequest",
    COMPLETE: "CompletionRequest",
    RESPOND: "ResponsesRequest",
    TOKENIZE: "TokenizeRequest",
    DETOKENIZE: "DetokenizeRequest",
    ABORT: "AbortReq",
}
OPENAI = {
    CHAT: chat_create_params.CompletionCreateParamsNonStreaming,
    COMPLETE: completion_create_params.CompletionCreateParamsNonStreaming,
    RESPOND: response_create_params.ResponseCreateParamsNonStreaming,
}
# Fields of sampling_params, whose kinds SGLang and vLLM do not publish.
SHARED = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), "number"),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), "number"),
    **dict.fromkeys(("top_k", "n"), "integer"),
    **dict.fromkeys(
        ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"), "boolean"
    ),
    "stop": "texts",
    "stop_token_ids": "ids",
    "logit_bias": "object",
    "unheard_of": "any",
}
SAMPLED: Mapping[str, Mapping[str, str]] = {
    GENERATE: {
        **SHARED,
        **dict.fromkeys(
            ("max_new_tokens", "min_new_tokens", "beam_width", "sampling_seed"), "integer"
        ),
        **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), "grammar"),
        "stop_regex": "grammar",
        "no_stop_trim": "boolean",
        "stream_interval": "integer",
        "custom_params": "object",
        "watermark": "object",
    },
    VLLM: {
        **SHARED,
        **dict.fromkeys(("max_tokens", "min_tokens", "seed", "logprobs"), "integer"),
        **dict.fromkeys(("detokenize", "include_stop_str_in_output"), "boolean"),
        "prompt_logprobs": "integer",
        "bad_words": "texts",
        "allowed_token_ids": "ids",
        "structured_outputs": "object",
        "extra_args": "object",
        "output_kind": "integer",
    },
}
VLLM_FIELDS = {
    **dict.fromkeys(("model", "request_id", "cache_salt", "session_id"), "string"),
    **dict.fromkeys(("features", "kv_transfer_params", "nvext"), "object"),
    "token_ids": "ids",
    "sampling_params": "object",
    "content_parts": "texts",
    "stream": "boolean",
    "return_token_ids": "boolean",
    "priority": "integer",
}
# Nobody outside an engine's own processes sends them. No message of the engine names the first, and
# it dies of any value of the second.
INTERNAL = {"http_worker_ipc", "positional_embed_overrides"}

NAN, INFINITE = float("nan"), float("inf")
WHOLE = [0, -1, 1, 2, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30]
DEEP = json.loads("[" * 60 + "]" * 60)
VALUES: Mapping[str, Sequence[Any]] = {
    "integer": [*WHOLE, 1.5, "1", True, [1], [], {}, NAN, INFINITE, None],
    "number": [0, -1, 0.5, 2, 1e308, -1e308, 1e-320, NAN, -INFINITE, "0.5", True, [0.5], {}, None],
    "boolean": [True, False, 0, 1, 2, "true", "maybe", None, [], [True], {}, NAN],
    "string": ["", "é𝄞\0", "\ud800", "x" * 20_000, 5, True, [], ["a"], ["a", 5], {}, None],
    "texts": ["", "a", "\ud800", [], [""], ["a"], [5], [None], ["a"] * 40, "x" * 20_000, {}, 5],
    "ids": [[], [0], [-1], [1_000_000], [2**31], [2**63], [1.5], ["5"], [None], [True], [[5]], 5],
    "array": [[], [None], [1], [-1], ["a"], [""], [[]], [[5], ["a"]], [{}], [1] * 2000, DEEP, "a"],
    "object": [{}, {"a": 1}, {"5": 1}, {"5": 1e308}, {"1000000": 1}, {"-1": 1}, {"a": DEEP}, [], 5],
    "grammar": ["", "(", "{", "[]", '{"type":"x"}', "(a+)+$", "root ::= ", "\ud800", ["a"], 5, {}],
}
HUGE = [5] * (CONTEXT_TOKENS + 800)
PROMPTS: list[Any] = [
    *([], [0], [-1], [1_000_000], [5, 1_000_000], [2**31], [2**63], [1.5], ["5"], [None], [True]),
    *([[5], [6, 7]], [[5], []], [[]], [[5], 6], [5, [6]], [[5], [1_000_000]], HUGE, [[5], HUGE]),
    *([5] * CONTEXT_TOKENS, 5, {}, None, "5"),
]
TEXTS: list[Any] = [
    *("", " ", "\0", "\ud800", "x " * 9_000, [""], ["a", ""], ["a", "b"], [], [None], ["a", 5]),
    *([["a"]], {}, 5, True),
]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "no JSON"}}
CONTENTS: list[Any] = [
    *(None, "", 5, [], [{}], ["a"], {"a": 1}, DEEP, "\ud800", "<|im_end|>", "x " * 9_000),
    *([{"type": "text"}], [{"type": "text", "text": 5}], [{"type": "text", "text": "a"}]),
    [{"type": "image_url", "image_url": {"url": "data:,"}}],
]
MESSAGES: list[Any] = [
    *([], {}, None, "a", [None], ["a"], [{}], [{"role": "user"}], [{"role": 5, "content": "a"}]),
    *([{"role": "x", "content": "a"}], [{"role": "system", "content": "a"}]),
    *([{"role": "tool", "content": "a"}], [{"role": "assistant", "content": "a"}]),
    *([{"role": "user", "content": content}] for content in CONTENTS),
    [{"role": "assistant", "content": None, "tool_calls": [{}]}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ],
]
ITEMS: list[Any] = [
    *([], [None], ["a"], [{}], [{"type": "x"}], [{"type": "reasoning"}]),
    *([{"type": "function_call"}], [{"type": "function_call_output"}], "", "x " * 9_000, 5, {}),
]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
TOOLS: list[Any] = [
    *([FUNCTION], [{}], ["a"], [None], "a", {}, [{"type": "x"}], [{"type": "function"}]),
    *([{"type": "function", "function": {"name": name}}] for name in ("", 5, None)),
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "no type"}}}],
]
CHOICES: list[Any] = ["required", "none", "x", 5, {"type": "function", "function": {"name": "z"}}]
# Two prompts, for which these fields have a list of another length or of other kinds.
LISTED: Mapping[str, list[Any]] = {
    "sampling_params": [[], [None], [{}], [{"n": 2}, {"n": 1}], [{}, {}, {}], [5, "a"]],
    **{key: [[], [True], [True, None], [True] * 3, [0, 1]] for key in ("return_logprob",)},
    **{key: [[], [0], [0] * 3, [0, "a"]] for key in ("logprob_start_len", "top_logprobs_num")},
    "token_ids_logprob": [[], [5], [[5]], [[5], [1_000_000]]],
    "rid": [[], ["a"], ["a", "a"], ["a", 5], ["a", "b", "c"]],
    **{key: [[], ["a"], ["a", 5]] for key in ("extra_key", "cache_salt", "lora_path")},
}
# What makes the gateway forward a request that the mesh could carry, and changes no token.
FORWARDED: Mapping[str, Any] = {"logit_bias": {"1": 0}}
BODIES = [
    *(b"", b"{", b"[]", b"5", b'"a"', b"null", b"NaN", b"\xff\xfe", b"{'a':1}", b"{}"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b'{"a":1' + b"0" * 6_000 + b"}"),
]
NO_JSON = (b"NaN", b"Infinity", b"\\ud800")  # what Python writes and JSON does not have


@dataclass(frozen=True)
class Hostile:
    """A request. fields: what is wrong or odd in it; empty: its body as a whole. greedy: whether the
    engine answers it in the same way each time."""

    path: str
    fields: tuple[str, ...]
    body: dict[str, Any] | bytes
    greedy: bool = True

    @property
    def raw(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    @property
    def named(self) -> tuple[str, ...]:
        """Words of which an error has one."""
        words = [*self.fields, "maximum context length"]
        if not self.fields or any(each in self.raw for each in NO_JSON):
            words += ["body", *GOOD[self.path]]
        if self.path == SKYRL:  # the engines of the tests report no experts, whatever is asked
            words += ["routed_experts"]
        return tuple(words)

    def __str__(self) -> str:
        text = self.raw.decode("latin-1")
        return f"POST {self.path} {text if len(text) < 400 else f'{text[:300]}… ({len(text)})'}"


def hostile_requests(published: Mapping[str, Any], model: str) -> list[Hostile]:
    """Return the requests. published: an engine's /openapi.json. model: the name that it has for
    its model."""
    rng = Random(SEED)
    made = [
        *_changed(_kinds(published), rng),
        *_of_kind(GENERATE, "input_ids", PROMPTS, rng, FORWARDED, {"return_logprob": True}),
        *_of_kind(GENERATE, "text", TEXTS, rng, {"return_logprob": True, "logprob_start_len": 0}),
        *_of_kind(COMPLETE, "prompt", PROMPTS + TEXTS, rng, FORWARDED, {"echo": True}),
        *_of_kind(CHAT, "messages", MESSAGES, rng, FORWARDED, {"continue_final_message": True}),
        *_of_kind(CHAT, "input_ids", PROMPTS, rng, FORWARDED),
        *_of_kind(RESPOND, "input", ITEMS + MESSAGES, rng),
        *_of_kind(VLLM, "token_ids", PROMPTS, rng, FORWARDED),
        *_of_kind(SKYRL, "token_ids", PROMPTS, rng),
        *_of_kind(DETOKENIZE, "tokens", PROMPTS, rng),
        *_of_kind(TOKENIZE, "messages", MESSAGES, rng),
        *_of_kind(CHAT, "tools", TOOLS, rng, *({"tool_choice": each} for each in CHOICES)),
        *_of_kind(RESPOND, "tools", TOOLS, rng),
        *_lists(rng),
        *(Hostile(path, (), raw) for path in GOOD for raw in rng.sample(BODIES, 3)),
    ]
    return [_named(request, model) for request in made if not _is_token_0(request)]


def _is_token_0(request: Hostile) -> bool:
    """Return whether token 0 is the whole prompt, which SGLang takes for an empty one."""
    body = request.body
    return request.path == COMPLETE and isinstance(body, dict) and body.get("prompt") == [0]


def requests_that_kill() -> list[Hostile]:
    """Return requests of which SGLang dies, or after which it answers nothing more."""
    bad, empty = [5, 1_000_000], ["a", ""]
    from_start = {"return_logprob": True, "logprob_start_len": 0}
    stops = {"stop_token_ids": [1_000_000]}
    made: list[tuple[str, str, dict[str, Any]]] = [
        (GENERATE, "text", {"input_ids": None, "text": "", **from_start}),
        (GENERATE, "text", {"input_ids": None, "text": empty, **from_start}),
        (GENERATE, "input_ids", {"input_ids": [1_000_000], **from_start}),
        (GENERATE, "input_ids", {"input_ids": [[]], **FORWARDED}),
        (GENERATE, "input_ids", {"input_ids": bad, **FORWARDED}),
        (GENERATE, "input_ids", {"input_ids": [-1], **FORWARDED}),
        (GENERATE, "input_ids", {"input_ids": [2**31], **FORWARDED}),
        (GENERATE, "stop_token_ids", {"min_new_tokens": 1, **stops}),
        (GENERATE, "stop_token_ids", {"min_new_tokens": 1, "stop_token_ids": [-1]}),
        (GENERATE, "n", {"n": 100_000, **FORWARDED}),
        (GENERATE, "top_logprobs_num", {"top_logprobs_num": 1_000_000, "return_logprob": True}),
        (GENERATE, "token_ids_logprob", {"token_ids_logprob": bad, "return_logprob": True}),
        (GENERATE, "positional_embed_overrides", {"positional_embed_overrides": {"a": 1}}),
        (GENERATE, "positional_embed_overrides", {"positional_embed_overrides": 0}),
        (GENERATE, "top_logprobs_num", {"top_logprobs_num": [1], "return_logprob": True}),
        (GENERATE, "custom_labels", {"custom_labels": {"a": "b"}}),
        (COMPLETE, "custom_labels", {"custom_labels": {"a": "b"}}),
        (COMPLETE, "prompt", {"prompt": bad, "logprobs": 1}),
        (COMPLETE, "prompt", {"prompt": [[5], bad], **FORWARDED}),
        (COMPLETE, "prompt", {"prompt": empty, "echo": True}),
        (COMPLETE, "logprobs", {"logprobs": 100_000}),
        (COMPLETE, "stop_token_ids", {"min_tokens": 1, **stops}),
        (CHAT, "input_ids", {"input_ids": bad, **FORWARDED}),
        (CHAT, "top_logprobs", {"logprobs": True, "top_logprobs": 100_000}),
        (CHAT, "stop_token_ids", {"min_tokens": 1, **stops}),
        (VLLM, "token_ids", {"token_ids": bad, **FORWARDED}),
        (VLLM, "stop_token_ids", {"min_tokens": 2, **stops}),
        (SKYRL, "token_ids", {"token_ids": bad}),
    ]
    return [
        Hostile(path, (field,), with_more(path, GOOD[path], more)) for path, field, more in made
    ]


def with_more(path: str, body: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body with more fields, each where the path has it."""
    sampled = SAMPLED.get(VLLM if path == SKYRL else path, {})
    made = {**body, **{name: value for name, value in more.items() if name not in sampled}}
    if sampled:
        inside = {name: value for name, value in more.items() if name in sampled}
        made["sampling_params"] = {**body["sampling_params"], **inside}
    return made


def _kinds(published: Mapping[str, Any]) -> dict[str, dict[str, set[str]]]:
    """Return the kinds of values of each field, by path."""
    schemas = published["components"]["schemas"]
    found: dict[str, dict[str, set[str]]] = {path: {} for path in GOOD}
    for path, name in PUBLISHED.items():
        for field, schema in schemas[name]["properties"].items():
            found[path][field] = set(_types(schema, schemas))
    for path, params in OPENAI.items():
        own = TypeAdapter(params).json_schema()
        for field, schema in own["properties"].items():
            found[path].setdefault(field, set()).update(_types(schema, own["$defs"]))
    for path in (VLLM, SKYRL):
        found[path] = {field: {kind} for field, kind in VLLM_FIELDS.items()}
    return found


def _types(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        yield from _types(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for each in schema.get("anyOf", []):
        yield from _types(each, schemas)
    if "anyOf" not in schema and "$ref" not in schema:
        yield schema.get("type", "any")


def _values(kinds: set[str], rng: Random) -> list[Any]:
    """Return values for a field, in any order: extremes of its kinds, and of another one."""
    known = sorted(kinds & VALUES.keys()) or sorted(VALUES)
    pool = [value for kind in known for value in VALUES[kind]] + rng.sample(VALUES["object"], 2)
    return rng.sample(pool, len(pool))


def _changed(kinds: Mapping[str, Mapping[str, set[str]]], rng: Random) -> Iterator[Hostile]:
    """Yield good requests with one changed field, then with two."""
    for path, good in GOOD.items():
        places: list[tuple[str, str, set[str]]] = [
            ("", field, kinds[path][field]) for field in sorted(kinds[path].keys() - INTERNAL)
        ]
        sampled = SAMPLED.get(VLLM if path == SKYRL else path, {})
        places += [("sampling_params", field, {kind}) for field, kind in sampled.items()]
        for place in places:
            yield _change(path, good, [place], rng)
        for _ in range(PAIRS):
            yield _change(path, good, rng.sample(places, 2), rng)


def _change(
    path: str, good: Mapping[str, Any], places: Sequence[tuple[str, str, set[str]]], rng: Random
) -> Hostile:
    body = copy.deepcopy(dict(good))
    # What goes into an object comes first: another change may replace the object.
    for inside, field, kinds in sorted(places, key=lambda place: not place[0]):
        (body[inside] if inside else body)[field] = _values(kinds, rng)[0]
    fields = [field for _, field, _ in places]
    if path == GENERATE and "text" in fields:
        del body["input_ids"]
    if path in STREAMS and rng.random() < STREAMED:
        body.setdefault("stream", True)
    sampling = body.get("sampling_params", body)
    greedy = isinstance(sampling, dict) and any(
        sampling.get(name) == value and type(sampling.get(name)) is int
        for name, value in GREEDY.items()
    )
    return Hostile(path, tuple(fields), body, greedy)


def _of_kind(
    path: str, field: str, values: Sequence[Any], rng: Random, *more: Mapping[str, Any]
) -> Iterator[Hostile]:
    """Yield good requests with each of these values in a field; `more`, which is added to some,
    makes the gateway forward them."""
    for value in values:
        extra = rng.choice([{}, *more])
        body = with_more(path, GOOD[path], extra) | {field: value}
        if field == "text":
            del body["input_ids"]
        yield Hostile(path, (field, *extra), body)


def _lists(rng: Random) -> Iterator[Hostile]:
    for field, values in LISTED.items():
        for value in values:
            source: dict[str, Any] = rng.choice(
                [{"input_ids": [[5, 6, 7], [8, 9]]}, {"text": ["a b", "c"]}]
            )
            sampling = GOOD[GENERATE]["sampling_params"]
            body = {**source, "sampling_params": sampling, "return_logprob": True, field: value}
            yield Hostile(GENERATE, (field, *source), body, field != "sampling_params")


def _named(request: Hostile, model: str) -> Hostile:
    """Return a request that names the model, as OpenAI's clients always do."""
    if isinstance(request.body, bytes) or request.path not in (CHAT, COMPLETE, RESPOND):
        return request
    body = {"model": model, **request.body}
    return Hostile(request.path, request.fields, body, request.greedy)
