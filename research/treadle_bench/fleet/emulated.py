"""Emulated SGLang engines: SGLang's HTTP surface, with sleeps in real time instead of a model.

`python -m treadle_bench.fleet.emulated PORT...` runs one engine a port in this process. An engine
decodes its running requests as one batch whose step takes the time of a shipped profile (LLM on
ACCELERATOR, `treadle_sim.engine_model`), computes what its radix cache does not hold, and sends
CHUNK_TOKENS tokens at once, as with SGLang's --stream-interval. A token follows from the context
alone, so that whoever reads a trajectory can tell a lost or doubled token.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import uvloop
from aiohttp import web
from treadle_sim.engine_model import EngineModel, engine_model

LLM, ACCELERATOR, GPUS, SLOTS = "Qwen3-14B", "H200", 1, 24
MODEL = engine_model(LLM, ACCELERATOR, GPUS, SLOTS)
VOCAB = 100_000
LEAST_TOKEN = 3  # those below are special
CHUNK_TOKENS = 64
PAGE_TOKENS = 64
CONTEXT_TOKENS = 32_768
MOST_BODY_BYTES = 64 * 1024 * 1024


def next_token(last: int, length: int) -> int:
    """What an engine samples after a context of `length` tokens that ends with `last`."""
    return LEAST_TOKEN + (last * 31 + length * 7) % (VOCAB - LEAST_TOKEN)


class RadixCache:
    """Pages of contexts by salt; the page that was not read for longest goes first."""

    def __init__(self, capacity_tokens: int) -> None:
        self._most = capacity_tokens // PAGE_TOKENS
        self._pages: OrderedDict[int, None] = OrderedDict()

    def read(self, salt: str, ids: Sequence[int]) -> int:
        """Tokens of a context whose KV is here; all but the last may be."""
        found = 0
        for page in _page_keys(salt, ids[: len(ids) - 1]):
            if page not in self._pages:
                break
            self._pages.move_to_end(page)
            found += PAGE_TOKENS
        return found

    def write(self, salt: str, ids: Sequence[int]) -> None:
        """Keep the KV of a context."""
        for page in _page_keys(salt, ids):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        self._pages.clear()


def _page_keys(salt: str, ids: Sequence[int]) -> list[int]:
    keys, key, packed = [], hash(salt), array("i", ids)
    for end in range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS):
        key = hash((key, packed[end - PAGE_TOKENS : end].tobytes()))
        keys.append(key)
    return keys


class EmulatedEngine:
    """One engine. Its requests wait for one of `model.slots` slots in the order of their
    arrival."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._cache = RadixCache(model.kv_tokens)
        self._slots = asyncio.Semaphore(model.slots)
        self._prefills = asyncio.Lock()
        self._aborted: dict[str, bool] = {}  # by request that has not ended
        self._decoding = 0
        self._kv_tokens = 0
        self._weight_version = "default"

    def app(self) -> web.Application:
        """Its HTTP surface."""
        app = web.Application(client_max_size=MOST_BODY_BYTES)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.get("/v1/loads", self._loads),
                web.post("/flush_cache", self._flush),
                web.post("/update_weights_from_disk", self._update_weights),
            ]
        )
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if body.get("token_ids_logprob"):
            message = (
                "token_ids_logprob contains out-of-vocabulary token id -1; valid range is "
                f"[0, {VOCAB})."
            )
            return web.json_response({"error": {"message": message}}, status=400)
        ids, salt, limit = (
            body["input_ids"],
            body.get("cache_salt", ""),
            body["sampling_params"]["max_new_tokens"],
        )
        rid = body.get("rid", "")
        self._aborted[rid] = False
        try:
            async with self._slots:
                cached = await self._prefill(salt, ids)
                if not body.get("stream"):
                    output = [next_token(ids[-1], len(ids))][:limit]
                    return web.json_response(
                        self._answer(rid, output, len(output), cached, {"type": "length"})
                    )
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await self._decode(response, rid, ids, limit, cached)
                self._cache.write(salt, ids)
                return response
        finally:
            del self._aborted[rid]

    async def _prefill(self, salt: str, ids: Sequence[int]) -> int:
        cached = self._cache.read(salt, ids)
        async with self._prefills:  # which hold back no decode step here, unlike in an engine
            await asyncio.sleep(self._model.curve.prefill_s(len(ids) - cached, cached))
        self._cache.write(salt, ids)
        return cached

    async def _decode(
        self, response: web.StreamResponse, rid: str, ids: list[int], limit: int, cached: int
    ) -> None:
        held, sent = len(ids), 0
        self._decoding += 1
        self._kv_tokens += held
        try:
            while True:
                count = min(CHUNK_TOKENS, limit - sent)
                step_s = self._model.curve.decode_s(self._decoding)
                await asyncio.sleep(
                    count * (step_s + self._model.curve.per_kv_token_s * self._kv_tokens)
                )
                chunk: list[int] = []
                for _ in range(count):
                    chunk.append(next_token(ids[-1], len(ids)))
                    ids.append(chunk[-1])
                sent += count
                ending = None
                if sent >= limit:
                    ending = {"type": "length", "length": limit}
                elif self._aborted[rid]:
                    ending = {"type": "abort", "message": "Aborted"}
                answer = self._answer(rid, chunk, sent, cached, ending)
                await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
                if ending is not None:
                    await response.write(b"data: [DONE]\n\n")
                    return
        finally:
            self._decoding -= 1
            self._kv_tokens -= held

    def _answer(
        self, rid: str, chunk: Sequence[int], sent: int, cached: int, ending: dict[str, Any] | None
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": ending,
            "weight_version": self._weight_version,
            "completion_tokens": sent,
            "cached_tokens": cached,
            "output_token_logprobs": [[-1.0, token, None] for token in chunk],
        }
        if ending is not None:
            meta["weight_versions"] = [{"version": self._weight_version, "start": 0, "end": sent}]
        return {"text": "", "output_ids": chunk, "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        for running in self._aborted:
            if running.startswith(rid):
                self._aborted[running] = True
        return web.Response()

    async def _server_info(self, _: web.Request) -> web.Response:
        state = {
            "memory_usage": {"token_capacity": self._model.kv_tokens},
            "effective_max_running_requests_per_dp": self._model.slots,
        }
        return web.json_response(
            {
                "incremental_streaming_output": True,
                "stream_interval": CHUNK_TOKENS,
                "disaggregation_mode": "null",
                "max_req_input_len": CONTEXT_TOKENS,
                "page_size": PAGE_TOKENS,
                "tp_size": GPUS,
                "internal_states": [state],
            }
        )

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": f"emulated/{LLM}", "weight_version": self._weight_version}
        )

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_used_tokens": self._kv_tokens}]})

    async def _flush(self, _: web.Request) -> web.Response:
        if self._aborted:
            return web.Response(status=400, text="busy")
        self._cache.clear()
        return web.Response(text="Cache flushed.")

    async def _update_weights(self, request: web.Request) -> web.Response:
        self._weight_version = (await request.json())["weight_version"]
        return web.json_response({"success": True, "message": "loaded"})


async def serve(ports: Sequence[int]) -> None:
    """One engine a port, until the process ends."""
    for port in ports:
        runner = web.AppRunner(EmulatedEngine(MODEL).app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve([int(port) for port in sys.argv[1:]]))
