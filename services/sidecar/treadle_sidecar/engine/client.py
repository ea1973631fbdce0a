"""SGLang's HTTP server as the sidecar uses it. Owns the HTTP session; knows the engine's JSON, nothing of steps or
queues.

aiohttp, because each token is one chunk of a stream: it costs 31 us of CPU a chunk here where httpx costs 71.

Tokens are counted by `completion_tokens`, not by what a chunk carries: SGLang repeats the last token in the echo of
an abort that found its request waiting (TokenizerManager._handle_abort_req), and sends all logprobs with it.

What the sidecar knows of its engine: read from SGLang's /server_info and /model_info, and from the model's own
files where they are here."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from treadle_sidecar.engine.process import SPARE_REQUESTS

GIB = 1024**3
# SGLang keeps these below its context length (Scheduler: max_req_len, and num_reserved tokens of max_req_input_len).
INPUT_MARGIN_TOKENS = 4


@dataclass(frozen=True)
class EngineProfile:
    """One running engine. Sizes in tokens; `vocab_size` 0 and empty `end_token_ids` where they could not be learned."""

    model_path: str
    weight_version: str
    max_input_tokens: int
    max_sequence_tokens: int  # prompt and output together
    kv_tokens: int
    kv_bytes_per_token: int
    slots: int
    page_tokens: int
    tensor_parallel: int
    storage: bool  # HiCache with a storage backend: KV can move
    deterministic: bool  # honours seeds, and dies of min_p together with them
    vocab_size: int
    end_token_ids: frozenset[int]

    @property
    def storage_suffixes(self) -> tuple[str, ...]:
        """What HiCache's file backend appends to a page's key: for KV by rank, and for KV that ranks share (MLA)."""
        name = self.model_path.replace("/", "-")
        return (f"_{name}_0_{self.tensor_parallel}.bin", f"_{name}.bin")


def read_profile(server: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int) -> EngineProfile:
    """From the two answers of the engine; `vocab_size` as the engine's own error message tells it, 0 where it does
    not.
    """
    state = (server.get("internal_states") or [{}])[0]
    memory = state.get("memory_usage") or {}
    kv_tokens = int(memory.get("token_capacity") or server.get("max_total_num_tokens") or 0)
    max_input = int(server.get("max_req_input_len") or 0)
    requests = int(state.get("effective_max_running_requests_per_dp") or server.get("max_running_requests") or 1)
    model_path = str(model["model_path"])
    configs = list(_model_files(model_path))
    return EngineProfile(
        model_path=model_path,
        weight_version=str(model["weight_version"]),
        max_input_tokens=max_input,
        max_sequence_tokens=max_input + INPUT_MARGIN_TOKENS,
        kv_tokens=kv_tokens,
        kv_bytes_per_token=round(float(memory.get("kvcache") or 0.0) * GIB / kv_tokens) if kv_tokens else 0,
        slots=max(requests - SPARE_REQUESTS, 1),
        page_tokens=int(server.get("page_size") or 1),
        tensor_parallel=int(server.get("tp_size") or 1),
        storage=bool(server.get("hicache_storage_backend")),
        deterministic=bool(server.get("enable_deterministic_inference")),
        vocab_size=vocab_size,
        end_token_ids=frozenset(token for config in configs for token in _end_tokens(config)),
    )


def _model_files(model_path: str) -> Iterator[dict[str, Any]]:
    """config.json and generation_config.json of a local model, or of a hub model in its cache beside the engine."""
    folder = Path(model_path)
    if not folder.is_dir():
        hub = Path.home() / ".cache" / "huggingface" / "hub" / f"models--{model_path.replace('/', '--')}" / "snapshots"
        folder = max(hub.glob("*"), default=folder)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.is_file():
            yield json.loads(file.read_text())


def _end_tokens(config: Mapping[str, Any]) -> list[int]:
    tokens = config.get("eos_token_id")
    if isinstance(tokens, int):
        return [tokens]
    return [int(token) for token in tokens or ()]


ANSWER_TIMEOUT_S = (
    10.0  # for questions; a CPU engine answers between two forward passes, and a long prefill takes seconds
)
WEIGHTS_TIMEOUT_S = 1800.0  # loading hundreds of GB from a network disk takes minutes
LONGEST_LINE_BYTES = 4 * 1024 * 1024  # the last chunk of a long step carries a little of everything
_CONNECTION_ERRORS = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)
_VALID_RANGE = re.compile(r"valid range is \[0, (\d+)\)")


class EngineLost(Exception):  # noqa: N818 - what happened, as callers speak of it
    """The engine does not answer, or broke off in the middle of a stream."""


class EngineRefused(Exception):  # noqa: N818
    """The engine answered that it will not; the message is its own."""


@dataclass(frozen=True)
class EngineRequest:
    """One attempt at a step. `rid` is unique, and no rid is the beginning of another: SGLang aborts by prefix."""

    rid: str
    input_ids: Sequence[int]
    sampling: Mapping[str, object]
    cache_salt: str


@dataclass(frozen=True)
class EngineChunk:
    """New tokens since the chunk before. `finish` is stop, length or abort on the last; `spans` (version, start, end)
    then cover the attempt.
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
    """What a request without output tokens found: tokens on this engine (device or host), taken from storage, and
    computed.
    """

    cached: int
    from_storage: int
    computed: int


class EngineClient:
    """One engine at `base_url`; `stall_s`: a stream without a chunk for so long is lost."""

    def __init__(self, base_url: str, stall_s: float) -> None:
        self._base_url = base_url
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_read=stall_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=LONGEST_LINE_BYTES,
            timeout=aiohttp.ClientTimeout(ANSWER_TIMEOUT_S),
        )

    async def close(self) -> None:
        """Breaks what is under way."""
        await self._session.close()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """The tokens of one attempt; the last chunk has `finish`. Raises EngineLost, EngineRefused."""
        body = {
            "rid": request.rid,
            "input_ids": list(request.input_ids),
            "sampling_params": request.sampling,
            "cache_salt": request.cache_salt,
            "stream": True,
            "return_logprob": True,
        }
        received = 0
        try:
            async with self._session.post(
                f"{self._base_url}/generate", json=body, timeout=self._stream_timeout
            ) as response:
                if response.status != 200:
                    raise EngineRefused(await _message(response))
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    answer = json.loads(line[6:])
                    if "error" in answer:
                        raise EngineRefused(str(answer["error"].get("message", answer["error"])))
                    chunk = _chunk(answer, received)
                    received += len(chunk.token_ids)
                    yield chunk
                    if chunk.finish:
                        return
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise EngineLost(f"the engine at {self._base_url} speaks otherwise than SGLang 0.5: {error!r}") from error
        except _CONNECTION_ERRORS as error:
            raise EngineLost(f"the stream of the engine at {self._base_url} broke: {error!r}") from error
        except TimeoutError as error:
            raise EngineLost(
                f"the engine at {self._base_url} sent no token for {self._stream_timeout.sock_read:g} s"
            ) from error
        raise EngineLost(f"the engine at {self._base_url} ended a stream without saying why")

    async def abort(self, rid: str) -> None:
        """Asks the engine to end a request; its stream then ends with everything sampled. An unknown rid is fine.
        Raises EngineLost.
        """
        await self._ask("POST", "/abort_request", {"rid": rid})

    async def prefill(self, rid: str, input_ids: Sequence[int], cache_salt: str) -> Prefill:
        """Brings the KV of a prefix onto the engine. Raises EngineLost, EngineRefused; TimeoutError is the caller's
        deadline.
        """
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

    async def profile(self) -> EngineProfile:
        """Everything there is to know. Raises EngineLost, EngineRefused."""
        server = await self._ask("GET", "/server_info")
        model = await self._ask("GET", "/model_info")
        return read_profile(server, model, await self._vocab_size())

    async def weight_version(self) -> str:
        """What the engine calls its present weights. Raises EngineLost, EngineRefused."""
        return str((await self._ask("GET", "/model_info"))["weight_version"])

    async def kv_tokens_used(self) -> int:
        """KV tokens that running requests hold. Raises EngineLost, EngineRefused."""
        loads = (await self._ask("GET", "/v1/loads?include=core"))["loads"]
        return sum(int(load["num_used_tokens"]) for load in loads)

    async def update_weights(self, model_path: str, weight_version: str) -> None:
        """Loads weights and names them. The engine must be idle. Raises EngineLost, EngineRefused with the engine's
        message.
        """
        # Not flushed with the load: a refused flush would fail a load that took place. The salt keeps old KV from
        # being hit.
        body = {"model_path": model_path, "weight_version": weight_version, "flush_cache": False}
        await self._ask("POST", "/update_weights_from_disk", body, timeout_s=WEIGHTS_TIMEOUT_S)

    async def flush_cache(self) -> bool:
        """Drops all KV on the engine; False where it would not, because something runs. Raises EngineLost."""
        try:
            await self._ask("POST", "/flush_cache", text=True)
        except EngineRefused:
            return False
        return True

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """The tokens' text, special tokens included. Raises EngineLost, EngineRefused."""
        answer = await self._ask("POST", "/detokenize", {"tokens": list(token_ids), "skip_special_tokens": False})
        return str(answer["text"])

    async def _vocab_size(self) -> int:
        # Nothing says it outright; an id outside of it kills the engine. This refusal names it and costs no forward
        # pass.
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

    async def _ask(
        self, method: str, path: str, body: object = None, *, timeout_s: float | None = None, text: bool = False
    ) -> Any:
        timeout = aiohttp.ClientTimeout(timeout_s or ANSWER_TIMEOUT_S)
        try:
            async with self._session.request(method, f"{self._base_url}{path}", json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise EngineRefused(await _message(response))
                if text or not response.content_length:
                    return await response.text()
                return await response.json()
        except _CONNECTION_ERRORS as error:
            raise EngineLost(f"the engine at {self._base_url} does not answer {path}: {error!r}") from error
        except TimeoutError as error:
            raise EngineLost(
                f"the engine at {self._base_url} did not answer {path} within {timeout.total:g} s"
            ) from error


def _chunk(answer: Mapping[str, Any], received: int) -> EngineChunk:
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
