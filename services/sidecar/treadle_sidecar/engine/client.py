"""Call SGLang's HTTP server: generate, abort, prefill, load weights, ask what it is.

Owns the HTTP session; knows the engine's JSON, nothing of steps or queues. aiohttp costs 31 us of CPU a chunk of a
stream here where httpx costs 71, and each token is one chunk.

Tokens are counted by `completion_tokens`, not by what a chunk carries: SGLang repeats the last token in the echo of an
abort that found its request waiting (TokenizerManager._handle_abort_req), and sends all logprobs with it.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from treadle_core.curves import EngineWork

# For questions; a CPU engine answers between two forward passes, and a long prefill takes seconds.
ANSWER_TIMEOUT_S = 10.0
WEIGHTS_TIMEOUT_S = 1800.0  # loading hundreds of GB from a network disk takes minutes
LONGEST_LINE_BYTES = 4 * 1024 * 1024  # the last chunk of a long step carries a little of everything
_CONNECTION_ERRORS = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)
_VALID_RANGE = re.compile(r"valid range is \[0, (\d+)\)")


class EngineLost(Exception):  # noqa: N818 - what happened, as callers speak of it
    """The engine does not answer, or a stream broke before its end."""


class EngineRefused(Exception):  # noqa: N818
    """The engine answered with an error; the message is its own."""


@dataclass(frozen=True)
class EngineRequest:
    """One attempt at a step. `rid` is unique, and no rid is the beginning of another: SGLang aborts by prefix."""

    rid: str
    input_ids: Sequence[int]
    sampling: Mapping[str, object]
    cache_salt: str


@dataclass(frozen=True)
class EngineChunk:
    """New tokens since the chunk before.

    `finish` is stop, length or abort on the last chunk, whose `spans` (version, start, end) cover the attempt.
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
    """Where a prefix's KV came from, in tokens: this engine (device or host), shared storage, or computed."""

    cached: int
    from_storage: int
    computed: int


class EngineClient:
    """One engine at `base_url`; a stream without a chunk for `stall_s` seconds is lost. work: is given the tokens of
    all streams.

    Every method raises EngineLost and EngineRefused.
    """

    def __init__(self, base_url: str, stall_s: float, work: EngineWork) -> None:
        self._base_url = base_url
        self._work = work
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_read=stall_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=LONGEST_LINE_BYTES,
            timeout=aiohttp.ClientTimeout(ANSWER_TIMEOUT_S),
        )

    async def close(self) -> None:
        """Break what is under way."""
        await self._session.close()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """The tokens of one attempt; the last chunk has `finish`."""
        body = {
            "rid": request.rid,
            "input_ids": list(request.input_ids),
            "sampling_params": request.sampling,
            "cache_salt": request.cache_salt,
            "stream": True,
            "return_logprob": True,
        }
        received, url, timeout = 0, f"{self._base_url}/generate", self._stream_timeout
        with self._translate_errors("/generate", timeout.sock_read), self._noted(request):
            async with self._session.post(url, json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise EngineRefused(await _message(response))
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = _chunk(json.loads(line[6:]), received)
                    received += len(chunk.token_ids)
                    if chunk.token_ids:
                        self._work.add(request.rid, len(chunk.token_ids), chunk.cached_tokens, time.monotonic())
                    yield chunk
                    if chunk.finish:
                        return
        raise EngineLost(f"the engine at {self._base_url} ended a stream without saying why")

    async def abort(self, rid: str) -> None:
        """End a request; its stream then ends with everything sampled. An unknown rid changes nothing."""
        await self._ask("POST", "/abort_request", {"rid": rid})

    async def prefill(self, rid: str, input_ids: Sequence[int], cache_salt: str) -> Prefill:
        """Bring the KV of a prefix onto the engine."""
        body = {
            "rid": rid,
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 0},
            "cache_salt": cache_salt,
        }
        answer = await self._ask("POST", "/generate", body, timeout_s=self._stream_timeout.sock_read)
        meta = answer["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        cached, storage = int(meta["cached_tokens"]), int(details.get("storage") or 0)
        return Prefill(cached=cached - storage, from_storage=storage, computed=len(input_ids) - cached)

    async def describe(self) -> tuple[Mapping[str, Any], Mapping[str, Any], int]:
        """The engine's /server_info and /model_info, and its vocabulary's size, 0 where it does not tell."""
        server = await self._ask("GET", "/server_info")
        return server, await self._ask("GET", "/model_info"), await self._vocab_size()

    async def weight_version(self) -> str:
        """The name of the present weights."""
        return str((await self._ask("GET", "/model_info"))["weight_version"])

    async def kv_tokens_used(self) -> int:
        """KV tokens that running requests hold."""
        loads = (await self._ask("GET", "/v1/loads?include=core"))["loads"]
        return sum(int(load["num_used_tokens"]) for load in loads)

    async def update_weights(self, model_path: str, weight_version: str) -> None:
        """Load weights and name them. The engine must be idle."""
        # Not flushed with the load: a refused flush would fail a load that took place. The salt keeps old KV from
        # being hit.
        body = {"model_path": model_path, "weight_version": weight_version, "flush_cache": False}
        await self._ask("POST", "/update_weights_from_disk", body, timeout_s=WEIGHTS_TIMEOUT_S)

    async def flush_cache(self) -> bool:
        """Drop all KV on the engine; False where it refuses because something runs."""
        try:
            await self._ask("POST", "/flush_cache")
        except EngineRefused:
            return False
        return True

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """The tokens' text, special tokens included."""
        answer = await self._ask("POST", "/detokenize", {"tokens": list(token_ids), "skip_special_tokens": False})
        return str(answer["text"])

    async def _vocab_size(self) -> int:
        # An id outside of the vocabulary kills the engine, and no endpoint tells the size. The refusal of this request
        # does, and costs no forward pass.
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

    async def _ask(self, method: str, path: str, body: object = None, timeout_s: float | None = None) -> Any:
        """The answer's JSON; None where it is text."""
        timeout = aiohttp.ClientTimeout(timeout_s or ANSWER_TIMEOUT_S)
        with self._translate_errors(path, timeout.total):
            async with self._session.request(method, f"{self._base_url}{path}", json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise EngineRefused(await _message(response))
                return await response.json() if response.content_type == "application/json" else None

    @contextmanager
    def _noted(self, request: EngineRequest) -> Iterator[None]:
        self._work.begin(request.rid, len(request.input_ids), time.monotonic())
        try:
            yield
        finally:
            self._work.end(request.rid)

    @contextmanager
    def _translate_errors(self, path: str, timeout_s: float | None) -> Iterator[None]:
        """Raise EngineLost for a connection that breaks and for a silence of `timeout_s` within the block."""
        where = f"the engine at {self._base_url}"
        try:
            yield
        except _CONNECTION_ERRORS as error:
            raise EngineLost(f"{where} does not answer {path}: {error!r}") from error
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise EngineLost(f"{where} does not speak the protocol of SGLang 0.5: {error!r}") from error
        except TimeoutError as error:
            raise EngineLost(f"{where} was silent on {path} for {timeout_s:g} s") from error


def _chunk(answer: Mapping[str, Any], received: int) -> EngineChunk:
    if "error" in answer:
        raise EngineRefused(str(answer["error"].get("message", answer["error"])))
    meta = answer["meta_info"]
    fresh = int(meta["completion_tokens"]) - received
    token_ids = answer["output_ids"][:fresh]
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs", ())[:fresh]]
    if not len(token_ids) == len(logprobs) == fresh:
        raise EngineLost(f"the engine sent {len(token_ids)} tokens and {len(logprobs)} logprobs where {fresh} were due")
    finish = meta["finish_reason"] or {}
    return EngineChunk(
        token_ids=token_ids,
        logprobs=logprobs,
        text=answer.get("text") or "",
        weight_version=meta["weight_version"],
        cached_tokens=int(meta.get("cached_tokens") or 0),
        finish=finish.get("type", ""),
        spans=[(span["version"], span["start"], span["end"]) for span in meta.get("weight_versions") or ()],
        message=str(finish.get("message") or ""),
    )


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
