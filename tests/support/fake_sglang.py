"""FakeSglang: an HTTP server with the endpoints of SGLang that the sidecar uses, and tokens that
follow from the context alone.

It is honest where the sidecar depends on it: streams are incremental or cumulative, an abort ends a
stream with a token or two more and a finish reason of type abort, an abort of an unknown request is
ignored, the KV of a context is cached by salt in pages, only `max_running` requests run, pushed
weights need a session, memory is given away once and taken back once; while it hangs, what needs
SGLang's scheduler process is not answered, and the rest is. What it leaves out: text models. A
token's text is one letter; the next token is a hash of position and predecessor.
"""

import asyncio
import base64
import json
import math
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

from aiohttp import web
from support.conditions import SHUTDOWN_S, until
from support.processes import free_port

VOCAB = 1000
END_TOKEN = 2
PAGE = 16
CONTEXT = 4096
PROBE = "-generates"  # the end of the rid of a sidecar's probe
LAYERS, EXPERTS_PER_TOKEN = 3, 2  # whose experts are numbered through, token by token


def next_token(context: Sequence[int]) -> int:
    """Never a special one: 3..VOCAB-1."""
    return 3 + (context[-1] * 31 + len(context) * 7) % (VOCAB - 3)


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """What an uninterrupted step would sample."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


def text_of(tokens: Sequence[int]) -> str:
    """One letter a token."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


@dataclass(frozen=True)
class Failure:
    """How a request fails at once: by a status of HTTP, an event in its stream with that status, or
    an abort with it. As SGLang does for what its handlers raise, for a request that it refuses
    after its stream has begun, and for one that its scheduler process gives up."""

    how: Literal["http", "event", "abort"]
    status: int


class FakeSglang:
    """`token_s`: time a token takes; `after_abort`: tokens that are sampled between an abort and
    its effect; `incremental`: whether a chunk of a stream has the new tokens alone, or all;
    `says_incremental`: what /server_info says of it."""

    def __init__(
        self,
        token_s: float = 0.002,
        after_abort: int = 1,
        stored: dict[str, list[list[int]]] | None = None,
        incremental: bool = True,
        says_incremental: bool | None = None,
    ) -> None:
        self.token_s = token_s
        self.incremental = incremental
        self.arguments: dict[str, Any] = {  # of /server_info
            "incremental_streaming_output": incremental
            if says_incremental is None
            else says_incremental,
            "disaggregation_mode": "null",
            "enable_return_routed_experts": True,
        }
        self.middlewares: list[Any] = []  # of aiohttp
        self.key = ""  # of --api-key
        self.text_of: Callable[[list[int]], str] = text_of
        self.more_routes: list[web.RouteDef] = []
        # sampled after a prompt, then the end token; empty: what follows from the context
        self.script: list[int] = []
        self.lose_end = (
            False  # whether streams hang after their last token, before they say how they ended
        )
        self.prefill_s = 0.0  # before the first token of a stream
        self.failure: Failure | None = None  # of all streams that `fails` chooses
        self.fails: Callable[[dict[str, Any]], bool] = lambda body: True
        # whether streams bring nothing, while requests that are no streams are answered
        self.is_mute = False
        # what an update of the weights takes; whether one is under way
        self.load_s, self.loading = (0.0, False)
        self.probes = 0  # streams that no step makes; they are not in `requests`
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self.after_abort = after_abort
        self.pushes: list[tuple[str, dict[str, Any]]] = []  # way and body
        self.push_s, self.refuse_push = 0.0, False
        # whether a push is under way; whether weights are unpacked for it
        self.pushing, self.session = (False, False)
        self.groups: list[dict[str, Any]] = []
        self.asleep: set[str] = set()
        self.loads = 0  # from disk
        self.called: list[str] = []  # of the calls that change weights or memory, in order
        self.weight_version = "default"
        self.model_path = "fake/model"
        self.storage = stored is not None
        self.end_at: int | None = None  # length of output at which the fake samples the end token
        self.refuse_weights = False
        self.aborts: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.traceparents: list[str] = []  # of the requests
        self.most_running = 0
        self.sampled = 0  # tokens, of all streams of steps
        self._stored = stored if stored is not None else {}
        self._cached: dict[str, list[list[int]]] = {}
        self._running: dict[str, asyncio.Event] = {}
        self._transports: set[asyncio.WriteTransport] = set()
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """http://127.0.0.1:<port>"""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        """Streams that have not ended."""
        return len(self._running)

    @property
    def steps(self) -> int:
        """Streams of steps that were asked for."""
        return sum(bool(request.get("stream")) for request in self.requests)

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """As SGLang does: only what probes ask is for everybody."""
        is_open = request.path.startswith(("/health", "/ready", "/metrics"))
        if is_open or self.key in ("", request.headers.get("Authorization", "").partition(" ")[2]):
            return cast(web.StreamResponse, await handler(request))
        return web.json_response({"error": "Unauthorized"}, status=401)

    async def start(self) -> None:
        """Listens; again on the same port after `stop`."""
        app = web.Application(
            client_max_size=64 * 1024 * 1024, middlewares=[self._check_key, *self.middlewares]
        )
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.get("/v1/loads", self._loads),
                web.post("/update_weights_from_disk", self._update_weights),
                web.post("/update_weight_version", self._name_weights),
                web.post("/{verb:begin|end}_weight_update", self._change_session),
                web.post("/update_weights_from_{way:distributed|tensor|ipc}", self._push),
                web.post("/init_weights_update_group", self._join),
                web.post("/destroy_weights_update_group", self._leave),
                web.post("/{verb:release|resume}_memory_occupation", self._change_memory),
                web.post("/flush_cache", self._flush),
                web.post("/detokenize", self._detokenize),
                *self.more_routes,
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()

    def hang(self) -> None:
        """As a stopped scheduler process: nothing is generated, and what does not need that process
        is answered."""
        self._goes_on.clear()

    def go_on(self) -> None:
        """End the hang."""
        self._goes_on.set()

    def break_streams(self) -> None:
        """As a network that fails; a request notices it when it sends the next token."""
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    async def stop(self) -> None:
        """As a killed process: connections break, KV and weights are gone."""
        self.break_streams()
        self.go_on()
        for aborted in self._running.values():
            aborted.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._cached.clear()
        self._running.clear()
        self.groups.clear()
        self.asleep.clear()
        self.session = False
        self.weight_version = "default"

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_probe = str(body.get("rid")).endswith(PROBE)
        self.probes += is_probe
        if not is_probe:
            self.requests.append(body)
            self.traceparents.append(request.headers.get("traceparent", ""))
        if body.get("token_ids_logprob") == [-1]:
            message = (
                "token_ids_logprob contains out-of-vocabulary token id -1; valid range is "
                f"[0, {VOCAB})."
            )
            return web.json_response({"error": {"message": message}}, status=400)
        assert not self.asleep, "an engine without its memory dies of a request"
        ids, params, salt = (
            list(body["input_ids"]),
            body["sampling_params"],
            body.get("cache_salt", ""),
        )
        cached, storage = self._hit(ids, salt)
        if not body.get("stream"):
            await self._goes_on.wait()
            self._keep(ids, salt)
            if body.get("return_logprob"):
                return web.json_response(self._whole(body, (cached, storage)))
            return web.json_response(
                self._answer(body["rid"], [], 0, "", cached, storage, {"type": "length"})
            )
        if body["rid"] in self._running:
            return web.json_response(
                {"error": {"message": f"Duplicate request ID detected: {body['rid']}"}}, status=400
            )
        failure = self.failure if self.fails(body) else None
        if failure is not None and failure.how == "http":
            says = {"error": {"message": "the engine fails"}}
            return web.json_response(says, status=failure.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if failure is not None:
            await self._fail(response, body["rid"], failure)
            return response
        if isinstance(request.transport, asyncio.WriteTransport):
            self._transports.add(request.transport)
        aborted = asyncio.Event()
        if not is_probe:
            self._running[body["rid"]] = aborted
        self.most_running = max(self.most_running, len(self._running))
        try:
            await self._stream(response, body["rid"], ids, params, aborted, (cached, storage))
            self._keep(ids, salt)
        except ConnectionError:  # the caller went away, which ends a request as in SGLang
            self._keep(ids, salt)
        finally:
            self._running.pop(body["rid"], None)
        return response

    async def _fail(self, response: web.StreamResponse, rid: str, failure: Failure) -> None:
        """The only chunk of a stream that fails."""
        message, status = "the engine fails", failure.status
        if failure.how == "event":
            kind = "invalid_request_error" if status < 500 else "internal_server_error"
            answer: dict[str, Any] = {"error": {"message": message, "type": kind, "code": status}}
        else:  # the one token that SGLang samples for it has no logprob
            ending = {"type": "abort", "message": message, "status_code": status, "err_type": None}
            answer = self._answer(rid, [next_token([0])], 1, "", 0, 0, ending)
            answer["meta_info"]["output_token_logprobs"] = []
        await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")

    def _whole(self, body: dict[str, Any], hit: tuple[int, int]) -> dict[str, Any]:
        """An answer in one piece."""
        prompt, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        output = expected(prompt, limit)
        answer = self._answer(
            body["rid"],
            output,
            limit,
            self.text_of(output),
            *hit,
            {"type": "length", "length": limit},
        )
        if body.get("return_routed_experts"):
            count = (len(prompt) + limit - 1) * LAYERS * EXPERTS_PER_TOKEN
            answer["meta_info"]["routed_experts"] = base64.b64encode(
                array("i", range(count)).tobytes()
            ).decode()
        return answer

    async def _stream(
        self,
        response: web.StreamResponse,
        rid: str,
        ids: list[int],
        params: dict[str, Any],
        aborted: asyncio.Event,
        hit: tuple[int, int],
    ) -> None:
        limit, output, late = params["max_new_tokens"], list[int](), 0
        await asyncio.sleep(self.prefill_s)
        while True:
            await asyncio.sleep(self.token_s)
            await self._goes_on.wait()
            await until(lambda: not self.is_mute, math.inf)
            ending: dict[str, Any] | None = None
            if aborted.is_set() and late == self.after_abort:
                ending, fresh = {"type": "abort", "message": "Aborted"}, list[int]()
            else:
                late += aborted.is_set()
                token = self._sample(ids)
                fresh = [token]
                ids.append(token)
                output.append(token)
                self.sampled += not rid.endswith(PROBE)
                ending = self._ending(token, output, params, limit)
            if ending is not None and not self.lose_end:
                # as in SGLang, a request that says its end has left the batch
                self._running.pop(rid, None)
            sent = fresh if self.incremental else output
            answer = self._answer(
                rid, sent, len(output), self.text_of(sent), *hit, None if self.lose_end else ending
            )
            await self.send(response, answer)
            if self.lose_end and ending is not None:
                await aborted.wait()
            if ending is not None:
                await response.write(b"data: [DONE]\n\n")
                return

    def _sample(self, ids: list[int]) -> int:
        if self.script:  # a context that ends within it goes on there, as a model's would
            most = min(len(self.script), len(ids))
            said = next(
                (count for count in range(most, 0, -1) if ids[-count:] == self.script[:count]), 0
            )
            return self.script[said] if said < len(self.script) else END_TOKEN
        return END_TOKEN if self.end_at is not None and len(ids) >= self.end_at else next_token(ids)

    async def send(self, response: web.StreamResponse, answer: dict[str, Any]) -> None:
        """A chunk of a stream."""
        await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")

    def _ending(
        self, token: int, output: list[int], params: dict[str, Any], limit: int
    ) -> dict[str, Any] | None:
        ends = {END_TOKEN, *params.get("stop_token_ids", ())}
        if not params.get("ignore_eos") and token in ends:
            return {"type": "stop", "matched": token}
        text = self.text_of(output)
        for stop in params.get("stop", ()):
            if stop in text:
                return {"type": "stop", "matched": stop}
        return {"type": "length", "length": limit} if len(output) >= limit else None

    def _answer(
        self,
        rid: str,
        sent: list[int],
        count: int,
        text: str,
        cached: int,
        storage: int,
        ending: object,
    ) -> dict[str, Any]:
        meta = {
            "id": rid,
            "finish_reason": ending,
            "weight_version": self.weight_version,
            "completion_tokens": count,
            "cached_tokens": cached + storage,
            "cached_tokens_details": {"device": cached, "host": 0, "storage": storage},
            "output_token_logprobs": [[-1.0 / (1 + token), token, None] for token in sent],
        }
        if ending is not None:
            meta["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": count}]
        return {"text": text, "output_ids": sent, "meta_info": meta}

    def _hit(self, ids: list[int], salt: str) -> tuple[int, int]:
        cached = max((_shared(ids, known) for known in self._cached.get(salt, ())), default=0)
        stored = max((_shared(ids, known) for known in self._stored.get(salt, ())), default=0)
        return cached, max(stored - cached, 0)

    def _keep(self, ids: list[int], salt: str) -> None:
        self._cached.setdefault(salt, []).append(list(ids))
        if self.storage:
            self._stored.setdefault(salt, []).append(list(ids))

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborts.append(rid)
        for running, event in self._running.items():
            if running.startswith(rid):
                event.set()
        return web.Response()

    async def _server_info(self, _: web.Request) -> web.Response:
        await self._goes_on.wait()
        return web.json_response(
            {
                **self.arguments,
                "max_req_input_len": CONTEXT - 6,
                "page_size": PAGE,
                "tp_size": 1,
                "hicache_storage_backend": "file" if self.storage else None,
                "enable_deterministic_inference": True,
                "internal_states": [
                    {
                        "memory_usage": {"token_capacity": 50_000, "kvcache": 1.0},
                        "effective_max_running_requests_per_dp": 6,
                    }
                ],
            }
        )

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": self.model_path, "weight_version": self.weight_version}
        )

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_used_tokens": 16 * len(self._running)}]})

    async def _update_weights(self, request: web.Request) -> web.Response:
        if self.refuse_weights:
            return web.json_response({"success": False, "message": "no such file"}, status=400)
        assert not self._running, "the engine is not idle"
        body = await request.json()
        self.loading = True
        self.loads += 1
        await asyncio.sleep(self.load_s)
        self.loading = False
        self.weight_version = body["weight_version"]
        return _outcome()

    async def _name_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["abort_all_requests"] is False, "it would abort what other callers run"
        self.weight_version = body["new_version"]
        self.called.append(f"name {self.weight_version}")
        return _outcome()

    async def _change_session(self, request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        if self.session == (verb == "begin"):
            return _outcome(
                "a weight-update session is already open" if self.session else "no session is open"
            )
        self.session = not self.session
        self.called.append(verb)
        return _outcome()

    async def _push(self, request: web.Request) -> web.Response:
        way = request.match_info["way"]
        assert not self._running and "weights" not in self.asleep
        if not self.session and way != "ipc":
            return _outcome("must run between begin_weight_update() and end_weight_update()")
        body = await request.json()
        self.pushing, loop = True, asyncio.get_running_loop()
        began = loop.time()
        # which a test may shorten meanwhile
        await until(lambda: loop.time() >= began + self.push_s, 120.0)
        self.pushing = False
        if self.refuse_push:
            return _outcome("the weights are partially updated")
        self.pushes.append((way, body))
        self.called.append(way)
        return _outcome()

    async def _join(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["backend"] == "none":
            return _outcome("Failed to initialize custom process group: no such backend")
        self.groups.append(body)
        return _outcome()

    async def _leave(self, request: web.Request) -> web.Response:
        name = (await request.json())["group_name"]
        left = [group for group in self.groups if group["group_name"] == name]
        self.groups = [group for group in self.groups if group not in left]
        return _outcome("" if left else "The group to be destroyed does not exist.")

    async def _change_memory(self, request: web.Request) -> web.Response:
        verb, tags = request.match_info["verb"], set((await request.json())["tags"])
        if verb == "release":
            assert not self._running and tags.isdisjoint(self.asleep), "SGLang dies of it"
            self.asleep |= tags
        else:
            assert tags <= self.asleep, "SGLang dies of it"
            self.asleep -= tags
        self.called.append(f"{verb} {'+'.join(sorted(tags))}")
        return web.json_response(None)

    async def _flush(self, _: web.Request) -> web.Response:
        if self._running:
            return web.Response(status=400, text="busy")
        self._cached.clear()
        self.called.append("flush")
        return web.Response(text="Cache flushed.")

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"text": self.text_of((await request.json())["tokens"])})


def _outcome(problem: str = "") -> web.Response:
    return web.json_response(
        {"success": not problem, "message": problem or "ok"}, status=400 if problem else 200
    )


def _shared(ids: Sequence[int], known: Sequence[int]) -> int:
    """Whole pages that both begin with, the last token of `ids` aside."""
    count = 0
    for mine, theirs in zip(ids[:-1], known, strict=False):
        if mine != theirs:
            break
        count += 1
    return count // PAGE * PAGE


@asynccontextmanager
async def fake_sglang(**options: Any) -> AsyncIterator[FakeSglang]:
    """A running one for the time of the block."""
    fake = FakeSglang(**options)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()
