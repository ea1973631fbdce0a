"""Call SGLang's HTTP server: generate, abort, prefill, load weights, read what the engine is.

This module owns the HTTP session; it knows the engine's JSON, nothing of steps or queues. aiohttp
costs 31 us of CPU a chunk of a stream here where httpx costs 71, and each token is one chunk.

A chunk of a stream has the new tokens alone where SGLang was started with
--incremental-streaming-output, else all tokens of the request so far. Either way the number of
tokens must agree with `completion_tokens`: a stream that is read in the wrong way would deliver
wrong tokens without an error.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from aiohttp.http import HttpProcessingError
from opentelemetry import propagate
from treadle_core.engine_queue.pace import EngineProgress, EngineWork

# For questions; a CPU engine answers between two forward passes, and a long prefill takes seconds.
ANSWER_TIMEOUT_S = 10.0
# loading hundreds of GB from a network disk takes minutes; a collective gives up as late
WEIGHTS_TIMEOUT_S = 1800.0
# For one request that the engine has forgotten while it serves others; no prefill takes so long.
FORGOTTEN_S = 1800.0
# SGLang closes a connection that was idle for 5 s. A request that is sent on it at that moment
# breaks, as if the engine were lost, so connections are closed here before.
IDLE_CONNECTION_S = 2.0
LONGEST_LINE_BYTES = 4 * 1024 * 1024  # the last chunk of a long step carries a little of everything
INCREMENTAL_FLAG = "--incremental-streaming-output"
LARGEST_INT32, LARGEST_INT64, LARGEST_FLOAT32 = 2**31 - 1, 2**63 - 1, 3.4e38
ROUNDING = 1e-3  # by which the logarithm of a probability may come out above 0
_CONNECTION_ERRORS = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)
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
_VALID_RANGE = re.compile(r"valid range is \[0, (\d{1,9})\)")

T = TypeVar("T")


class EngineLost(Exception):  # noqa: N818 - what happened, as callers speak of it
    """The engine does not answer, or a stream broke before its end."""


class EngineRefused(Exception):  # noqa: N818
    """The engine answered with an error, whose message this is."""


@dataclass(frozen=True)
class EngineRequest:
    """One attempt at a step. `rid` is unique, and no rid is the beginning of another: SGLang aborts
    by prefix."""

    rid: str
    input_ids: Sequence[int]
    sampling: Mapping[str, object]
    cache_salt: str


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


class EngineClient:
    """Client of one engine at `base_url`. work, progress: record the requests and the tokens of all
    streams.

    `incremental`: whether a chunk has the new tokens alone; the caller that reads what the engine
    is sets it. Every method raises EngineLost and EngineRefused.
    """

    def __init__(self, base_url: str, work: EngineWork, progress: EngineProgress) -> None:
        self.incremental = True
        self._base_url = base_url
        self._work, self._progress = work, progress
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_read=FORGOTTEN_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            read_bufsize=LONGEST_LINE_BYTES,
            timeout=aiohttp.ClientTimeout(ANSWER_TIMEOUT_S),
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
            "cache_salt": request.cache_salt,
            "stream": True,
            "return_logprob": True,
        }
        url, timeout = f"{self._base_url}/generate", self._stream_timeout
        stream = _Stream(self.incremental, as_count(request.sampling["max_new_tokens"]))
        with self._translate_errors("/generate", timeout.sock_read), self._noted(request):
            async with self._session.post(
                url, json=body, timeout=timeout, headers=_trace_headers()
            ) as response:
                if response.status != 200:
                    raise EngineRefused(await _message(response))
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk, now = stream.read(json.loads(line[6:])), time.monotonic()
                    self._progress.note_tokens(request.rid, now)
                    if chunk.token_ids:
                        self._work.add(request.rid, len(chunk.token_ids), chunk.cached_tokens, now)
                    yield chunk
                    if chunk.finish:
                        return
        raise EngineLost(f"the engine at {self._base_url} ended a stream without saying why")

    async def abort(self, rid: str) -> None:
        """End a request; its stream then ends with everything sampled. An unknown rid changes
        nothing."""
        await self._ask("POST", "/abort_request", {"rid": rid})

    async def prefill(self, rid: str, input_ids: Sequence[int], cache_salt: str) -> Prefill:
        """Bring the KV of a prefix onto the engine."""
        body = {
            "rid": rid,
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 0},
            "cache_salt": cache_salt,
        }
        with self._watched(rid, len(input_ids)):
            prefill = await self._ask(
                "POST",
                "/generate",
                body,
                timeout_s=FORGOTTEN_S,
                read=lambda answer: _prefill(answer, len(input_ids)),
            )
            self._progress.note_tokens(rid, time.monotonic())
        return prefill

    async def sample_token(self, rid: str) -> None:
        """Have the engine generate one token, in the time in which a working engine does."""
        body = {
            "rid": rid,
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        with self._watched(rid, 1):
            await self._ask("POST", "/generate", body, timeout_s=self._progress.stall_s)
            self._progress.note_tokens(rid, time.monotonic())

    async def describe(self) -> tuple[Mapping[str, Any], Mapping[str, Any], int]:
        """Return the engine's /server_info, its /model_info and its vocabulary's size, 0 where the
        engine does not report it."""
        server: Mapping[str, Any] = await self._ask("GET", "/server_info")
        return server, await self._ask("GET", "/model_info"), await self._vocab_size()

    async def name_of_weights(self) -> str:
        """Return the engine's name for its present weights."""
        return await self._ask(
            "GET", "/model_info", read=lambda answer: as_text(answer["weight_version"])
        )

    async def kv_tokens_used(self) -> int:
        """Return how many KV tokens running requests hold."""
        # SGLang's HTTP server answers with what the generating process wrote last, whether or not
        # that one hangs.
        used_tokens, unread_tokens = await self._ask("GET", "/v1/loads?include=core", read=_loads)
        self._progress.note_unread(unread_tokens, time.monotonic())
        return used_tokens

    async def update_weights(self, model_path: str, weight_version: str) -> None:
        """Load weights and name them. The engine must be idle."""
        # Not flushed with the load: a refused flush would fail a load that took place. The salt
        # keeps old KV from being hit.
        body = {"model_path": model_path, "weight_version": weight_version, "flush_cache": False}
        await self._load("/update_weights_from_disk", body)

    async def name_weights(self, name: str) -> None:
        """Name the present weights."""
        await self._ask(
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

    async def release_memory(self, tags: Collection[str]) -> None:
        """Give memory away. An engine that is not idle dies of it."""
        await self._load("/release_memory_occupation", {"tags": sorted(tags)})

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Take memory back. An engine that has not given one of the tags away dies of it."""
        await self._load("/resume_memory_occupation", {"tags": sorted(tags)})

    async def flush_cache(self, wait_s: float = 0.0) -> bool:
        """Drop all KV on the engine; return False where it refuses because something runs after
        `wait_s`."""
        try:
            await self._ask("POST", f"/flush_cache?timeout={wait_s:g}")
        except EngineRefused:
            return False
        return True

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the tokens' text, special tokens included."""
        body = {"tokens": list(token_ids), "skip_special_tokens": False}
        return await self._ask("POST", "/detokenize", body, read=lambda answer: str(answer["text"]))

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
            await self._ask("POST", "/generate", body)
        except EngineRefused as error:
            found = _VALID_RANGE.search(str(error))
            return int(found[1]) if found else 0
        return 0

    async def _load(self, path: str, body: object) -> None:
        """Send a request during which the engine shows no progress."""
        self._progress.begin_load()
        try:
            answer: Any = await self._ask("POST", path, body, timeout_s=WEIGHTS_TIMEOUT_S)
            if isinstance(answer, dict) and answer.get("success") is False:
                raise EngineRefused(str(answer.get("message")))
        finally:
            self._progress.end_load(time.monotonic())

    async def _ask(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout_s: float | None = None,
        read: Callable[[Any], T] = lambda answer: answer,
    ) -> T:
        """Send a request; return what `read` makes of the answer's JSON, or of None where it is
        text."""
        timeout = aiohttp.ClientTimeout(timeout_s or ANSWER_TIMEOUT_S)
        with self._translate_errors(path, timeout.total):
            url, headers = f"{self._base_url}{path}", _trace_headers()
            async with self._session.request(
                method, url, json=body, timeout=timeout, headers=headers
            ) as response:
                if response.status != 200:
                    raise EngineRefused(await _message(response))
                return read(
                    await response.json() if response.content_type == "application/json" else None
                )

    @contextmanager
    def _noted(self, request: EngineRequest) -> Iterator[None]:
        self._work.begin(request.rid, len(request.input_ids), time.monotonic())
        try:
            with self._watched(request.rid, len(request.input_ids)):
                yield
        finally:
            self._work.end(request.rid)

    @contextmanager
    def _watched(self, rid: str, context_tokens: int) -> Iterator[None]:
        self._progress.begin(rid, context_tokens, time.monotonic())
        try:
            yield
        finally:
            self._progress.end(rid, time.monotonic())

    @contextmanager
    def _translate_errors(self, path: str, timeout_s: float | None) -> Iterator[None]:
        """Raise EngineLost for a connection that breaks and for a silence of `timeout_s` within the
        block."""
        where = f"the engine at {self._base_url}"
        try:
            yield
        except _CONNECTION_ERRORS as error:
            raise EngineLost(f"{where} does not answer {path}: {error!r}") from error
        except HttpProcessingError as error:  # a line that is too long
            raise EngineLost(
                f"{where} sends too much at once; start it with {INCREMENTAL_FLAG}: {error!r}"
            ) from error
        except TimeoutError as error:
            raise EngineLost(f"{where} was silent on {path} for {timeout_s:g} s") from error
        except PROTOCOL_ERRORS as error:
            raise protocol_broken(where, path, error) from error


def _trace_headers() -> dict[str, str]:
    """Return the W3C trace context of the present call, which SGLang's spans (--enable-trace)
    continue."""
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


class _Stream:
    """Reader of the chunks of one stream of /generate. incremental: as of EngineClient. limit: most
    tokens."""

    def __init__(self, incremental: bool, limit: int) -> None:
        self._incremental, self._limit = incremental, limit
        self._received = 0  # tokens
        self._last: object = None  # token
        self._text = 0  # characters

    def read(self, answer: Mapping[str, Any]) -> EngineChunk:
        """Return what is new in a chunk. Raises EngineLost unless it has the tokens that are due,
        and PROTOCOL_ERRORS."""
        if "error" in answer:
            raise EngineRefused(str(answer["error"].get("message", answer["error"])))
        meta, text = answer["meta_info"], str(answer.get("text") or "")
        finish = meta["finish_reason"] or {}
        ids, entries = answer["output_ids"], meta.get("output_token_logprobs") or ()
        count = as_count(meta["completion_tokens"])
        if count > self._limit:
            raise ValueError(f"{count} tokens, of which {self._limit} were asked for")
        if self._incremental:
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
            whole = len(ids) >= due if not finish else len(ids) == due
            ids, entries = ids[self._received : due], entries[self._received : due]
            text = text[self._text :]
        if not whole or not len(ids) == len(entries) == count - self._received:
            how = "with" if self._incremental else "without"
            raise EngineLost(
                f"the engine sent {len(answer['output_ids'])} tokens and {len(entries)} new "
                f"logprobs where {due} "
                f"tokens were due, as it says that it runs {how} {INCREMENTAL_FLAG}"
            )
        self._received, self._text = count, self._text + len(text)
        self._last = ids[-1] if ids else self._last
        return EngineChunk(
            token_ids=[as_count(token) for token in ids],
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


def _logprob(value: Any) -> float:
    if type(value) not in (int, float) or not -LARGEST_FLOAT32 <= value <= ROUNDING:
        raise ValueError(f"{str(value)[:64]!r} is no log-probability")
    return float(value)


def _prefill(answer: Mapping[str, Any], count: int) -> Prefill:
    meta = answer["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    cached, storage = as_count(meta["cached_tokens"], count), as_count(details.get("storage") or 0)
    return Prefill(cached=as_count(cached - storage), from_storage=storage, computed=count - cached)


def _loads(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Return the KV tokens in use, and the tokens of waiting requests that are not cached."""
    loads = answer["loads"]
    used = sum(as_count(load["num_used_tokens"]) for load in loads)
    return used, sum(as_count(load.get("num_waiting_uncached_tokens") or 0) for load in loads)


def protocol_broken(where: str, path: str, error: Exception) -> EngineLost:
    """Return the error for an answer that SGLang would not give."""
    return EngineLost(f"{where} does not speak the protocol of SGLang 0.5 on {path}: {error!r}")


async def _message(response: aiohttp.ClientResponse) -> str:
    text = await response.text()
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        return f"HTTP {response.status}: {text[:400]}"
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(answer.get("message") or answer) if isinstance(answer, dict) else text[:400]
