"""Call SGLang's HTTP server: generate, abort, prefill, load weights, read what the engine is.

An engine is one SGLang server. This module knows its JSON, its errors and its habits with
connections, nothing of steps or queues. aiohttp costs 31 us of CPU a chunk of a stream here where
httpx costs 71, and each token is one chunk.

A chunk of a stream has the new tokens alone where SGLang was started with
--incremental-streaming-output, else all tokens of the request so far. Either way the number of
tokens must agree with `completion_tokens`: a stream that is read in the wrong way would deliver
wrong tokens without an error.
"""

import asyncio
import json
import re
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import aiohttp
from aiohttp.http import HttpProcessingError
from opentelemetry import propagate

# SGLang closes a connection that was idle for 5 s. A request that is sent on it at that moment
# breaks, as if the engine were lost, so connections are closed here before.
IDLE_CONNECTION_S = 2.0
LONGEST_LINE_BYTES = 4 * 1024 * 1024  # the last chunk of a long step carries a little of everything
INCREMENTAL_FLAG = "--incremental-streaming-output"
LARGEST_INT32, LARGEST_INT64, LARGEST_FLOAT32 = 2**31 - 1, 2**63 - 1, 3.4e38
ROUNDING = 1e-3  # by which the logarithm of a probability may come out above 0
MOST_STOP_STRINGS = 32  # SGLang's MAX_STOP_COUNT
# Reading an answer that SGLang would not give raises these: other types, missing parts, no JSON,
# numbers beyond their range, lists in lists in lists.
PROTOCOL_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
)
# Tokens that end an answer wherever a tokenizer has them, whatever the model's files name.
ALWAYS_END = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
_CONNECTION_ERRORS = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)
_KEYS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password"})
_KEY_FLAG = re.compile(r"(--(?:admin-)?api-key)[ =]\S+")
_VALID_RANGE = re.compile(r"valid range is \[0, (\d{1,9})\)")
# The paths that a step takes, and the statuses with which an engine says that a request is wrong:
# 400, too large, and what a proxy's schema refuses. With any other error the engine has failed.
_STEP_PATHS = frozenset({"/generate", "/detokenize"})
_REQUEST_FAULTS = frozenset({400, 413, 422})
_FAILURE = 500  # status of an error that names none
PROBE_TOKENS = 4  # more than the prefill brings, as a step's

T = TypeVar("T")

# unsent: no connection, so that the engine cannot have the request. reset: the system reports that
# the connection is gone. broken: it ended early. silent: no answer in time. garbled: the answer is
# not one of SGLang's. failed: the answer is an error for which the request is not to blame.
Loss = Literal["unsent", "reset", "broken", "silent", "garbled", "failed"]


class EngineLost(Exception):  # noqa: N818 - what happened, as callers speak of it
    """The engine does not answer or has failed, or a stream broke before its end."""

    def __init__(self, message: str, loss: Loss = "broken") -> None:
        super().__init__(message)
        self.loss: Loss = loss

    @property
    def is_gone(self) -> bool:
        """Return whether nothing listens at the engine's address any more."""
        return self.loss in ("unsent", "reset")


class EngineRefused(Exception):  # noqa: N818
    """The engine answered with an error, whose message this is. status: of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Seconds after which an engine that does not answer counts as lost."""

    connect_s: float = 10.0
    """The client waits so long for a connection."""
    answer_s: float = 10.0
    """A call that only reads or sets something gets its answer within this time. A CPU engine
    answers between two forward passes, and a long prefill takes seconds."""
    silence_s: float = 1800.0
    """An engine that sends no chunk of a stream for so long has forgotten it, though it may serve
    others. No prefill takes so long."""
    load_s: float = 1800.0
    """A load of weights ends within this time. Hundreds of GB from a network disk take minutes, and
    a collective operation gives up as late."""


@dataclass(frozen=True)
class EngineRequest:
    """One attempt at a step. `rid` is unique, and no rid is the beginning of another: SGLang aborts
    by prefix."""

    rid: str
    input_ids: Sequence[int]
    sampling: Mapping[str, object]
    """SGLang's sampling_params (`sglang_sampling`)."""
    cache_salt: str = ""


@dataclass(frozen=True)
class EngineChunk:
    """New tokens of a stream since the chunk before.

    `finish` is stop, length or abort on the last chunk, whose `spans` (version, start, end) cover
    the attempt.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    weight_version: str
    cached_tokens: int
    finish: str = ""
    spans: Sequence[tuple[str, int, int]] = ()
    message: str = ""  # of an abort


@dataclass(frozen=True)
class Prefill:
    """Origin of a prefix's KV, in tokens: this engine (device or host), shared storage, or
    computed."""

    cached: int
    from_storage: int
    computed: int


class Observer(Protocol):
    """Receiver of a client's reports about the requests that make its engine work."""

    def begin(self, rid: str, context_tokens: int, *, streamed: bool) -> None:
        """Note that a request is about to be sent. streamed: its tokens come one by one."""

    def receive(self, rid: str, new_tokens: int, cached_tokens: int) -> None:
        """Note a chunk of a stream, or the whole answer of another request, with 0 tokens."""

    def end(self, rid: str) -> None:
        """Note that a request is not on the engine any more, for whatever reason."""

    def begin_load(self) -> None:
        """Note that the engine loads weights, and shows no progress meanwhile."""

    def end_load(self) -> None:
        """Note that weights are loaded."""


def open_session(key: str = "") -> aiohttp.ClientSession:
    """Return a pool of connections to any number of engines, which its owner closes. key: SGLang's
    --api-key; empty: the engines have none."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else None,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        read_bufsize=LONGEST_LINE_BYTES,
    )


class EngineClient:
    """Client of one engine at `url`. Every method raises EngineLost and EngineRefused.

    session: shared with clients of other engines, and closed by its owner; None: one of its own,
    which `close` closes. incremental: whether a chunk of a stream has the new tokens alone; None:
    found out from each chunk. vocab_size: of the model; 0: not known. A caller that has read what
    the engine is sets both, and is then not sent wrong tokens by an engine that does otherwise.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.url = url
        self.incremental: bool | None = None
        self.vocab_size = 0
        self._session = session if session is not None else open_session()
        self._limits = limits or Limits()
        self._observer = observer
        self._stream_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._limits.connect_s, sock_read=self._limits.silence_s
        )

    async def close(self) -> None:
        """Close the session, which breaks what is under way."""
        await self._session.close()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """Yield the tokens of one attempt; the last chunk has `finish`."""
        body = {
            "rid": request.rid,
            "input_ids": list(request.input_ids),
            "sampling_params": request.sampling,
            "stream": True,
            "return_logprob": True,
        }
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        most = as_count(request.sampling["max_new_tokens"])
        stream = _Stream(self.incremental, most, self.vocab_size)
        timeout, observer = self._stream_timeout, self._observer
        with (
            self._translate_errors("/generate", timeout.sock_read),
            self._observed(request.rid, len(request.input_ids), streamed=True),
        ):
            async with self._session.post(
                f"{self.url}/generate", json=body, timeout=timeout, headers=_trace_headers()
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = stream.read(json.loads(line[6:]))
                    if observer is not None:
                        observer.receive(request.rid, len(chunk.token_ids), chunk.cached_tokens)
                    yield chunk
                    if chunk.finish:
                        return
        raise EngineLost(f"the engine at {self.url} ended a stream without saying why")

    async def generate_whole(self, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request of /generate in SGLang's own form that asks for no
        stream."""
        return await self.ask("POST", "/generate", body, timeout_s=self._limits.silence_s)

    async def abort(self, rid: str) -> None:
        """End a request; its stream then ends with everything sampled. An unknown rid changes
        nothing."""
        await self.ask("POST", "/abort_request", {"rid": rid})

    async def prefill(self, rid: str, input_ids: Sequence[int], cache_salt: str) -> Prefill:
        """Bring the KV of a prefix onto the engine."""
        body = {
            "rid": rid,
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 0},
            "cache_salt": cache_salt,
        }
        count = len(input_ids)
        return await self._ask_to_compute(
            body, self._limits.silence_s, lambda answer: _prefill(answer, count)
        )

    async def sample_tokens(self, rid: str, timeout_s: float) -> None:
        """Have the engine generate a few tokens as it does those of a step, in the time in which a
        working engine does."""
        sampling = {"max_new_tokens": PROBE_TOKENS, "temperature": 0.0, "ignore_eos": True}
        request = EngineRequest(rid, [0], sampling)
        try:
            async with asyncio.timeout(timeout_s), aclosing(self.generate(request)) as chunks:
                async for _ in chunks:
                    pass
        except TimeoutError as error:
            raise EngineLost(
                f"the engine at {self.url} did not stream {PROBE_TOKENS} tokens in {timeout_s:g} s",
                "silent",
            ) from error

    async def health(self) -> None:
        """Return where the engine answers that it serves."""
        await self.ask("GET", "/health")

    async def describe(self) -> tuple[Mapping[str, Any], Mapping[str, Any], int]:
        """Return the engine's /server_info, its /model_info and its vocabulary's size, 0 where the
        engine does not report it."""
        return await self.server_info(), await self.model_info(), await self._vocab_size()

    async def server_info(self) -> dict[str, Any]:
        """Return the arguments with which SGLang was started, and its state; without its keys,
        which it reports too."""
        return await self.ask(
            "GET", "/server_info", read=lambda answer: _as_object(_without_keys(answer))
        )

    async def model_info(self) -> dict[str, Any]:
        """Return what SGLang says of its model and of the version of its weights."""
        return await self.ask("GET", "/model_info", read=_as_object)

    async def name_of_weights(self) -> str:
        """Return the engine's name for its present weights."""
        return await self.ask(
            "GET", "/model_info", read=lambda answer: as_text(answer["weight_version"])
        )

    async def loads(self, query: str) -> dict[str, Any]:
        """Return the answer of /v1/loads, with the loads of the engine's ranks in `loads`. query:
        what is asked for, empty: SGLang's default."""
        path = f"/v1/loads?{query}" if query else "/v1/loads"
        return await self.ask("GET", path, read=lambda answer: {**answer, "loads": answer["loads"]})

    async def kv_tokens(self) -> tuple[int, int]:
        """Return how many KV tokens running requests hold, and how many tokens of waiting requests
        are not cached."""
        # SGLang's HTTP server answers with what the generating process wrote last, whether or not
        # that one hangs.
        return await self.ask("GET", "/v1/loads?include=core", read=_kv_tokens)

    async def update_weights(self, model_path: str, weight_version: str) -> None:
        """Load weights and name them. The engine must be idle."""
        # Not flushed with the load: a refused flush would fail a load that took place. The salt
        # keeps old KV from being hit.
        body = {"model_path": model_path, "weight_version": weight_version, "flush_cache": False}
        await self._load("/update_weights_from_disk", body)

    async def name_weights(self, name: str) -> None:
        """Name the present weights."""
        await self.ask(
            "POST", "/update_weight_version", {"new_version": name, "abort_all_requests": False}
        )

    async def begin_push(self) -> None:
        """Make the weights ready to be overwritten; pushes by "distributed" and "tensor" need
        this."""
        try:
            await self._load("/begin_weight_update", {})
        except EngineRefused as error:
            if "already open" not in str(error):
                raise
            await self.end_push()  # a push that was broken off has not
            await self._load("/begin_weight_update", {})

    async def end_push(self) -> None:
        """Make the pushed weights ready to be used. The engine refuses without a `begin_push`
        before."""
        await self._load("/end_weight_update", {})

    async def push_weights(self, way: str, body: Mapping[str, Any]) -> None:
        """Take weights by "distributed", "tensor" or "ipc", without naming them. The engine must be
        idle."""
        given = {name: value for name, value in body.items() if name != "weight_version"}
        await self._load(f"/update_weights_from_{way}", {**given, "flush_cache": False})

    async def join_group(self, body: Mapping[str, Any]) -> None:
        """Join a process group; return once all ranks are there."""
        await self._load("/init_weights_update_group", body)

    async def leave_group(self, group_name: str) -> None:
        """Leave a process group."""
        await self._load("/destroy_weights_update_group", {"group_name": group_name})

    async def release_memory(self, tags: Collection[str] = ()) -> None:
        """Give memory away, all without tags. An engine that is not idle dies of it."""
        await self._load("/release_memory_occupation", {"tags": sorted(tags)} if tags else {})

    async def resume_memory(self, tags: Collection[str] = ()) -> None:
        """Take memory back, all without tags. An engine that has not given one of the tags away
        dies of it."""
        await self._load("/resume_memory_occupation", {"tags": sorted(tags)} if tags else {})

    async def flush_cache(self, wait_s: float = 0.0) -> None:
        """Drop all KV on the engine, which refuses where something runs after `wait_s`."""
        await self.ask(
            "POST", f"/flush_cache?timeout={wait_s:g}", timeout_s=wait_s + self._limits.answer_s
        )

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the tokens' text, special tokens included."""
        body = {"tokens": list(token_ids), "skip_special_tokens": False}
        return await self.ask("POST", "/detokenize", body, read=lambda answer: str(answer["text"]))

    async def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a text or of a conversation, by the model's template."""
        return await self.ask("POST", "/tokenize", body, read=lambda answer: list(answer["tokens"]))

    async def separate_reasoning(self, text: str, parser: str) -> tuple[str, str]:
        """Return the reasoning in a text, and the rest. parser: SGLang's name of one."""
        return await self.ask(
            "POST",
            "/separate_reasoning",
            {"text": text, "reasoning_parser": parser},
            read=lambda answer: (answer["reasoning_text"] or "", answer["text"] or ""),
        )

    async def parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]], parser: str
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return a text without its tool calls, and the name and the arguments of each. parser:
        SGLang's name of one."""
        return await self.ask(
            "POST",
            "/parse_function_call",
            {"text": text, "tools": tools, "tool_call_parser": parser},
            read=lambda answer: (
                answer["normal_text"] or "",
                [(call["name"], call["parameters"]) for call in answer["calls"]],
            ),
        )

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message with which the engine answers a short chat."""
        return await self.ask(
            "POST",
            "/v1/chat/completions",
            body,
            read=lambda answer: _as_object(answer["choices"][0]["message"]),
        )

    @asynccontextmanager
    async def forward(
        self, method: str, path: str, raw: bytes
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Send a body of JSON as it is; yield the answer as it comes."""
        timeout = self._stream_timeout
        headers = {"Content-Type": "application/json", **_trace_headers()}
        with self._translate_errors(path, timeout.sock_read):
            async with self._session.request(
                method, f"{self.url}{path}", data=raw, timeout=timeout, headers=headers
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                yield response

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout_s: float | None = None,
        read: Callable[[Any], T] = lambda answer: answer,
    ) -> T:
        """Send a request; return what `read` makes of the answer's JSON, or of None where it is
        text."""
        limits = self._limits
        timeout = aiohttp.ClientTimeout(
            total=timeout_s or limits.answer_s, sock_connect=limits.connect_s
        )
        with self._translate_errors(path, timeout.total):
            url, headers = f"{self.url}{path}", _trace_headers()
            async with self._session.request(
                method, url, json=body, timeout=timeout, headers=headers
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                return read(
                    await response.json() if response.content_type == "application/json" else None
                )

    async def _ask_to_compute(
        self, body: Mapping[str, Any], timeout_s: float, read: Callable[[Any], T]
    ) -> T:
        """Send a request whose answer is a sign that the engine makes progress."""
        rid = body["rid"]
        with self._observed(rid, len(body["input_ids"]), streamed=False):
            answer = await self.ask("POST", "/generate", body, timeout_s, read)
            if self._observer is not None:
                self._observer.receive(rid, 0, 0)
        return answer

    async def _vocab_size(self) -> int:
        # An id outside of the vocabulary kills the engine, and no endpoint reports the size. The
        # refusal of this request does, and costs no forward pass.
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [-1],
        }
        try:
            await self.ask("POST", "/generate", body)
        except EngineRefused as error:
            found = _VALID_RANGE.search(str(error))
            return int(found[1]) if found else 0
        return 0

    async def _load(self, path: str, body: object) -> None:
        """Send a request during which the engine shows no progress."""
        if self._observer is not None:
            self._observer.begin_load()
        try:
            answer: Any = await self.ask("POST", path, body, timeout_s=self._limits.load_s)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise EngineRefused(str(answer.get("message")))
        finally:
            if self._observer is not None:
                self._observer.end_load()

    @contextmanager
    def _observed(self, rid: str, context_tokens: int, *, streamed: bool) -> Iterator[None]:
        observer = self._observer
        if observer is None:
            yield
            return
        observer.begin(rid, context_tokens, streamed=streamed)
        try:
            yield
        finally:
            observer.end(rid)

    @contextmanager
    def _translate_errors(self, path: str, timeout_s: float | None) -> Iterator[None]:
        """Raise EngineLost for a connection that breaks, for a silence of `timeout_s` and, on the
        paths of a step, for an engine that fails within the block."""
        where = f"the engine at {self.url}"
        try:
            yield
        except EngineRefused as error:
            if path not in _STEP_PATHS or error.status in _REQUEST_FAULTS:
                raise
            raise EngineLost(
                f"{where} failed on {path} (HTTP {error.status}): {error}", "failed"
            ) from error
        except TimeoutError as error:
            raise EngineLost(
                f"{where} was silent on {path} for {timeout_s:g} s", "silent"
            ) from error
        except _CONNECTION_ERRORS as error:
            unsent = isinstance(error, aiohttp.ClientConnectorError)
            loss: Loss = "unsent" if unsent else "reset" if isinstance(error, OSError) else "broken"
            raise EngineLost(f"{where} does not answer {path}: {error!r}", loss) from error
        except HttpProcessingError as error:  # a line that is too long
            raise EngineLost(
                f"{where} sends too much at once; start it with {INCREMENTAL_FLAG}: {error!r}"
            ) from error
        except PROTOCOL_ERRORS as error:
            raise protocol_broken(where, path, error) from error


def _trace_headers() -> dict[str, str]:
    """Return the W3C trace context of the present call, which SGLang's spans (--enable-trace)
    continue."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


class _Stream:
    """Reader of the chunks of one stream of /generate. incremental, vocab_size: as of EngineClient.
    limit: most tokens."""

    def __init__(self, incremental: bool | None, limit: int, vocab_size: int) -> None:
        self._incremental, self._limit = incremental, limit
        self._highest = vocab_size - 1 if vocab_size else LARGEST_INT32
        self._received = 0  # tokens
        self._last: object = None  # token
        self._text = 0  # characters

    def read(self, answer: Mapping[str, Any]) -> EngineChunk:
        """Return what is new in a chunk. Raises EngineLost unless it has the tokens that are due,
        EngineRefused for an error, and PROTOCOL_ERRORS."""
        if "error" in answer:
            raise _error_of_event(answer["error"])
        meta, text = answer["meta_info"], str(answer.get("text") or "")
        finish = meta["finish_reason"] or {}
        # An abort that nobody asked for has a status, and may lack what other chunks have.
        if finish.get("status_code") is not None:
            raise EngineRefused(str(finish.get("message")), as_count(finish["status_code"]))
        ids, entries = answer["output_ids"], meta.get("output_token_logprobs") or ()
        count = as_count(meta["completion_tokens"])
        if count > self._limit:
            raise ValueError(f"{count} tokens, of which {self._limit} were asked for")
        incremental = len(ids) < count if self._incremental is None else self._incremental
        if incremental:
            due = count - self._received
            # The echo of an abort that found its request waiting repeats the last token, with the
            # logprobs of all (TokenizerManager._handle_abort_req).
            echoed = (
                bool(ids) and finish.get("type") == "abort" and ids[-1] == [self._last, *ids][-2]
            )
            whole = len(ids) == due + echoed or len(ids) == due
            ids, entries = ids[:due], entries[:due]
        else:
            due = count
            # SGLang hands out its own growing lists: they may be ahead of the count that came with
            # them.
            ahead = not finish or self._incremental is None
            whole = len(ids) >= due if ahead else len(ids) == due
            ids, entries = ids[self._received : due], entries[self._received : due]
            text = text[self._text :]
        if not whole or not len(ids) == len(entries) == count - self._received:
            how = "with" if incremental else "without"
            raise EngineLost(
                f"the engine sent {len(answer['output_ids'])} tokens and {len(entries)} new "
                f"logprobs where {due} "
                f"tokens were due, as it says that it runs {how} {INCREMENTAL_FLAG}"
            )
        self._received, self._text = count, self._text + len(text)
        self._last = ids[-1] if ids else self._last
        token_ids = [as_count(token) for token in ids]
        if max(token_ids, default=0) > self._highest:
            raise ValueError(f"token {max(token_ids)}, of a vocabulary of {self._highest + 1}")
        return EngineChunk(
            token_ids=token_ids,
            logprobs=[_logprob(entry[0]) for entry in entries],
            text=text,
            weight_version=as_text(meta["weight_version"]),
            cached_tokens=as_count(meta.get("cached_tokens") or 0),
            finish=as_text(finish.get("type", "")),
            spans=[
                (as_text(span["version"]), as_count(span["start"]), as_count(span["end"]))
                for span in meta.get("weight_versions") or ()
            ],
            message=str(finish.get("message") or ""),
        )


def as_count(value: object, most: int = LARGEST_INT32) -> int:
    """Return an int from 0 to `most`, which a message can carry. Raises ValueError."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:64]!r} is no number from 0 to {most}")
    return value


def as_text(value: object) -> str:
    """Return a string that a message can carry. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:64]!r} is no text")
    value.encode()  # a lone surrogate is an error
    return value


def _as_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{str(value)[:64]!r} is no JSON object")
    return value


def _without_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_keys(each) for name, each in value.items() if name not in _KEYS}
    if isinstance(value, list):
        return [_without_keys(each) for each in value]
    return _KEY_FLAG.sub(r"\1 ***", value) if isinstance(value, str) else value


def _logprob(value: Any) -> float:
    if type(value) not in (int, float) or not -LARGEST_FLOAT32 <= value <= ROUNDING:
        raise ValueError(f"{str(value)[:64]!r} is no log-probability")
    return float(value)


def _prefill(answer: Mapping[str, Any], count: int) -> Prefill:
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    cached, storage = as_count(meta["cached_tokens"], count), as_count(details.get("storage") or 0)
    return Prefill(cached=as_count(cached - storage), from_storage=storage, computed=count - cached)


def _kv_tokens(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Return the KV tokens in use, and the tokens of waiting requests that are not cached."""
    loads = answer["loads"]
    used = sum(as_count(load["num_used_tokens"]) for load in loads)
    return used, sum(as_count(load.get("num_waiting_uncached_tokens") or 0) for load in loads)


def protocol_broken(where: str, path: str, error: Exception) -> EngineLost:
    """Return the error for an answer that SGLang would not give."""
    return EngineLost(
        f"{where} does not speak the protocol of SGLang 0.5 on {path}: {error!r}", "garbled"
    )


def _error_of_event(error: object) -> EngineRefused:
    """Return the error that a stream has in place of a chunk."""
    if not isinstance(error, dict):
        return EngineRefused(str(error), _FAILURE)
    invalid = error.get("type") == "invalid_request_error"
    status = error.get("code", min(_REQUEST_FAULTS) if invalid else _FAILURE)
    return EngineRefused(
        str(error.get("message", error)), status if type(status) is int else _FAILURE
    )


async def _refusal(response: aiohttp.ClientResponse) -> EngineRefused:
    """Return the error with the reason that an engine gives."""
    text = await response.text()
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return EngineRefused(f"HTTP {response.status}: {text[:400]}", response.status)
    if not isinstance(answer, dict):
        return EngineRefused(text[:400], response.status)
    error = answer.get("error")
    if isinstance(error, dict):
        error = error.get("message", error)
    message = str(error or answer.get("message") or answer)
    # Behind the reason, SGLang names the line of its own source.
    return EngineRefused(message.split("\n\n  File ")[0].strip(), response.status)


@dataclass(frozen=True)
class SamplingField:
    """A parameter with which tokens are sampled."""

    name: str
    """The field has this name in SamplingParams of the protos, in vLLM's and in OpenAI's form."""
    kind: Literal["whole", "number", "flag", "texts", "ids"]
    bounds: str = ""
    """The text of an error describes a value in range with these words."""
    is_within: Callable[[Any], bool] = lambda value: True
    sglang: str = ""
    """The field has this name in SGLang's sampling_params; empty where it is `name`."""

    @property
    def sglang_name(self) -> str:
        """Return its name in SGLang's sampling_params."""
        return self.sglang or self.name

    def problem(self, value: Any) -> str:
        """Return what would be right in place of a value; empty where the value is right."""
        kinds = _KINDS[self.kind]
        many = self.kind in ("texts", "ids")
        if not all(type(each) in kinds for each in (value if many else (value,))):
            what = "hold values" if many else "be"
            return f"must {what} of type {kinds[-1].__name__}, is {value!r:.100}"
        return "" if self.is_within(value) else f"must {self.bounds}, is {value!r:.100}"


_KINDS: Mapping[str, tuple[type, ...]] = {
    "whole": (int,),
    "number": (int, float),
    "flag": (bool,),
    "texts": (str,),
    "ids": (int,),
}
# Every field of SamplingParams in the protos: one table for all who read, check or send them.
SAMPLING: Mapping[str, SamplingField] = {
    field.name: field
    for field in (
        SamplingField(
            "max_new_tokens",
            "whole",
            "be > 0, as an int32",
            lambda count: 0 < count <= LARGEST_INT32,
        ),
        SamplingField(
            "temperature",
            "number",
            "be a finite number >= 0",
            lambda value: 0 <= value <= LARGEST_FLOAT32,
        ),
        SamplingField("top_p", "number", "be in (0, 1]", lambda value: 0 < value <= 1),
        SamplingField(
            "top_k",
            "whole",
            "be >= 1, or -1 for all",
            lambda count: 1 <= count <= LARGEST_INT32 or count == -1,
        ),
        SamplingField("min_p", "number", "be in [0, 1]", lambda value: 0 <= value <= 1),
        SamplingField(
            "seed",
            "whole",
            "be >= 0, as an int64",
            lambda seed: 0 <= seed <= LARGEST_INT64,
            sglang="sampling_seed",
        ),
        SamplingField(
            "stop",
            "texts",
            f"be {MOST_STOP_STRINGS} strings at most, none of them empty",
            lambda texts: len(texts) <= MOST_STOP_STRINGS and all(texts),
        ),
        SamplingField(
            "stop_token_ids",
            "ids",
            "not hold a negative id, as int32",
            lambda ids: all(0 <= each <= LARGEST_INT32 for each in ids),
        ),
        SamplingField("ignore_eos", "flag"),
    )
}


def sglang_sampling(given: Iterable[tuple[str, Any]]) -> dict[str, object]:
    """Return SGLang's sampling_params for names and values of SAMPLING; None and empty lists take
    the engine's default."""
    params: dict[str, object] = {"skip_special_tokens": False}
    for name, value in given:
        field = SAMPLING[name]
        if field.kind in ("texts", "ids"):
            value = list(value) or None
        if value is not None:
            params[field.sglang_name] = value
    return params


def end_token_ids(folder: Path, *, tokenizer: bool = True) -> frozenset[int]:
    """Return the ids that end an answer of the model in a folder, as SGLang finds them: those of
    its config, of its generation config, and those of its tokenizer.

    tokenizer: whether the engine has one; with --skip-tokenizer-init it has not.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        found |= {ids} if isinstance(ids, int) else set(ids or ())  # an id may be 0
    return frozenset(found | _ends_of_tokenizer(folder) if tokenizer else found)


def _ends_of_tokenizer(folder: Path) -> set[int]:
    config, vocab = _read_json(folder / "tokenizer_config.json"), dict[str, int]()
    ids = {
        str(token["content"]): int(at)
        for at, token in (config.get("added_tokens_decoder") or {}).items()
    }
    if not ids:  # tokenizer.json has megabytes
        file = _read_json(folder / "tokenizer.json")
        ids = {str(token["content"]): int(token["id"]) for token in file.get("added_tokens") or ()}
        words = (file.get("model") or {}).get("vocab")
        vocab = words if isinstance(words, dict) else {}
    end = config.get("eos_token") or _read_json(folder / "special_tokens_map.json").get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    found = {ids[each] for each in ALWAYS_END if each in ids}
    at = ids.get(text, vocab.get(text)) if text else None
    return found if at is None else found | {at}


def _read_json(file: Path) -> dict[str, Any]:
    return _as_object(json.loads(file.read_text())) if file.is_file() else {}
