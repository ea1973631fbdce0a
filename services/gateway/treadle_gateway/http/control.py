"""Answer what trainers request of engines: pause, continue, flush, abort, new weights, memory,
state.

At the root a call is for all engines, which then look like one large engine; below
/engines/{engine_id} it is for one, as slime and SGLang's gateway call each of their workers.
Requests have SGLang's form, or vLLM's where that differs: a pause with `mode=abort`, SGLang's
default, ends running steps with the tokens that they have (verl, slime, AReaL, ROLL); `keep`
(SkyRL, prime-rl) and `in_place` leave them where they are.

What changes an engine goes through its sidecar, so that the mesh knows which weights each engine
serves. While the mesh is away such calls are refused.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import PurePosixPath
from typing import Any, cast, get_args

import treadle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from treadle.engine.v1 import engine_pb2
from treadle_runtime.http.sglang import EngineClient

from treadle_gateway.calls import Calls
from treadle_gateway.engines import Engines, Proxy
from treadle_gateway.mesh import KnownEngine, MeshLink
from treadle_gateway.order import Count, Fields, Many, Refused, read_body
from treadle_gateway.updates import Updates, Way

ENDS_STEPS = {"abort": True, "keep": False, "in_place": False, "retract": False, "wait": False}
# Paths that an engine answers itself, by GET and by POST: none changes its weights or what it runs.
READ = frozenset(
    {"server_info", "get_server_info", "model_info", "get_model_info", "v1/models", "get_load"}
    | {"metrics"}
)
RUN = frozenset({"weights_checker", "start_profile", "stop_profile", "freeze_gc", "tokenize"})


class TokenizeFields(Fields):
    """Fields of SGLang's /tokenize and /detokenize."""

    tokens: Many[Count] | Many[Many[Count]] | None = None


class Control:
    """Endpoints for trainers, which call all engines, or one."""

    def __init__(
        self, link: MeshLink, engines: Engines, calls: Calls, proxy: Proxy, updates: Updates
    ) -> None:
        self._link = link
        self._engines = engines
        self._calls = calls
        self._proxy = proxy
        self._updates = updates

    async def pause(self, request: Request) -> Response:
        """Pause the engines: POST /pause_generation, /pause?mode=."""
        mode = request.query_params.get("mode") or (await _body(request)).get("mode") or "abort"
        if not isinstance(mode, str) or mode not in ENDS_STEPS:
            raise Refused(f"mode: must be one of {', '.join(ENDS_STEPS)}, is {mode!r:.100}")
        engines = self._scope(request)
        self._updates.forget_failed(engines)
        message = engine_pb2.PauseRequest(
            request_id=_request_id(), mode=_pause_mode(ENDS_STEPS[mode])
        )

        async def work() -> dict[str, str]:
            async with self._proxy.keep_off(_urls(engines), abort=ENDS_STEPS[mode]):
                errors = await self._updates.call(engines, "Pause", lambda _: message)
            if request.query_params.get("clear_cache") == "true":
                errors |= await self._flush(engines)
            return errors

        return await _said(work(), "paused")

    async def go_on(self, request: Request) -> Response:
        """Let the engines generate: POST /continue_generation, /resume. What was pushed to them is
        whole."""
        engines = self._scope(request)

        async def work() -> dict[str, str]:
            # An engine with parts of weights runs nothing, so that it may be resumed before it has
            # the last one.
            message = engine_pb2.ResumeRequest(request_id=_request_id())
            errors = await self._updates.call(engines, "Resume", lambda _: message)
            return errors | await self._updates.finish(engines)

        return await _said(work(), "continued")

    async def flush(self, request: Request) -> Response:
        """Empty the engines' caches: POST /flush_cache, /reset_prefix_cache. An engine that runs
        something refuses. A GET changes nothing, as any web page may cause one: it answers whether
        the engines run nothing, which is what slime waits for."""
        engines = self._scope(request)
        if request.method == "POST":
            return await _said(self._flush(engines), "flushed")
        return await _said(self._busy(engines), "the engines run nothing; POST flushes")

    async def abort(self, request: Request) -> Response:
        """End calls of this gateway with the tokens that they have: POST /abort_request. For one
        engine: those that are on it, or on none yet."""
        body = await _body(request)
        rid = "" if body.get("abort_all") else str(body.get("rid") or "")
        if not rid and not body.get("abort_all"):
            raise Refused("rid: must name a request, or abort_all be true")
        engine = self._one(request) if "engine_id" in request.path_params else None
        aborted = self._calls.abort(rid, engine.engine_id if engine is not None else "")
        aborted += await self._proxy.abort(rid, engine.url if engine is not None else None)
        return JSONResponse({"success": True, "message": f"{aborted} ended", "aborted": aborted})

    async def load_weights(self, request: Request) -> Response:
        """Load weights from a folder: POST /update_weights_from_disk; prime-rl's /update_weights,
        where the folder's name is the version's."""
        body = await _body(request)
        folder = body.get("weight_dir")
        path = body.get("model_path") or folder
        if not isinstance(path, str) or not path:
            raise Refused(
                "model_path, weight_dir: must be a folder or file that the engines can read"
            )
        version = body.get("weight_version") or (PurePosixPath(path).name if folder else None)
        engines = self._scope(request)

        async def work() -> dict[str, str]:
            async with self._proxy.keep_off(_urls(engines), abort=False):
                return (await self._updates.load(engines, path, version))[1]

        return await _said(work(), "loaded")

    async def push_weights(self, request: Request) -> Response:
        """Push one part of new weights: POST /update_weights_from_distributed, _tensor, _ipc."""
        engines, body = self._scope(request), await _body(request)
        way: str = request.path_params["way"]
        if way not in get_args(Way):
            raise Refused(
                f"/update_weights_from_{way}: must be disk, {', '.join(get_args(Way))}", 404
            )

        async def work() -> dict[str, str]:
            async with self._proxy.keep_off(_urls(engines), abort=False):
                return await self._updates.take(engines, cast(Way, way), body)

        return await _said(work(), "this part is there")

    async def begin_update(self, request: Request) -> Response:
        """Begin an update: POST /begin_weight_update. Sidecars open the session with the first
        part."""
        self._updates.forget_failed(self._scope(request))
        return JSONResponse({"success": True, "message": "push the parts"})

    async def end_update(self, request: Request) -> Response:
        """End an update: POST /end_weight_update. What was pushed is whole."""
        return await _said(
            self._updates.finish(self._scope(request)), "the pushed weights are served"
        )

    async def join_group(self, request: Request) -> Response:
        """Join a process group: POST /init_weights_update_group. Answers once all ranks are
        there."""
        return await _said(self._updates.join(self._scope(request), await _body(request)), "joined")

    async def leave_group(self, request: Request) -> Response:
        """Leave a process group: POST /destroy_weights_update_group."""
        name = str((await _body(request)).get("group_name") or "weight_update_group")
        message = engine_pb2.LeaveWeightsGroupRequest(request_id=_request_id(), group_name=name)
        return await _said(
            self._updates.call(self._scope(request), "LeaveWeightsGroup", lambda _: message), "left"
        )

    async def sleep(self, request: Request) -> Response:
        """Give memory to the trainer: POST /release_memory_occupation; vLLM's /sleep?tags=, whose
        levels the mesh does not distinguish."""
        tags, engines = await _tags(request), self._scope(request)
        message = engine_pb2.SleepRequest(
            request_id=_request_id(), mode=_pause_mode(ends_steps=False), tags=tags
        )

        async def work() -> dict[str, str]:
            async with self._proxy.keep_off(_urls(engines), abort=False):
                return await self._updates.call(engines, "Sleep", lambda _: message)

        return await _said(work(), "asleep")

    async def wake(self, request: Request) -> Response:
        """Take memory back: POST /resume_memory_occupation; vLLM's /wake_up?tags=."""
        message = engine_pb2.WakeRequest(request_id=_request_id(), tags=await _tags(request))
        return await _said(
            self._updates.call(self._scope(request), "Wake", lambda _: message), "awake"
        )

    async def weight_version(self, request: Request) -> Response:
        """Return the weight version, several with commas between: GET /get_weight_version."""
        versions = await self._updates.versions_of(self._scope(request))
        return JSONResponse({"weight_version": ",".join(sorted(versions))})

    async def health(self, request: Request) -> Response:
        """Answer 200 while the engine's sidecar reports it healthy: GET
        /engines/{engine_id}/health, health_generate. No token is sampled: an engine whose memory is
        with a trainer would die of it."""
        engine = self._one(request)
        if self._link.visit is None:
            return await self._pass_on(engine, "GET", "/health", b"")
        load = await self._updates.load_of(engine)
        return JSONResponse(
            {"healthy": load.engine_healthy, "paused": load.paused},
            200 if load.engine_healthy else 503,
        )

    async def load(self, request: Request) -> Response:
        """Return the load that the engine reports, and count the calls that wait in its sidecar:
        GET /engines/{engine_id}/v1/loads."""
        engine = self._one(request)
        answer = await self._engines.ask(
            _url_of(engine), lambda client: client.loads(request.url.query)
        )
        here = self._calls.running_on(engine.engine_id)
        for load in answer["loads"][:1]:
            load["num_total_reqs"] = max(here, load.get("num_total_reqs") or 0)
        return JSONResponse(answer)

    async def server_info(self, request: Request) -> Response:
        """Describe the fleet as one engine with the accelerators of all: GET /server_info,
        /get_server_info."""
        engines = self._scope(request)
        answer = await self._engines.ask(_url_of(engines[0]), lambda client: client.server_info())
        ranks = sum(engine.ranks for engine in engines)
        place = {"host": request.url.hostname, "port": request.url.port}
        return JSONResponse(
            answer | place | {"tp_size": ranks, "pp_size": 1, "dp_size": 1, "num_gpus": ranks}
        )

    async def world_size(self, request: Request) -> Response:
        """Return the number of ranks in vLLM's form: GET /get_world_size."""
        return JSONResponse({"world_size": sum(engine.ranks for engine in self._scope(request))})

    async def tokenize(self, request: Request) -> Response:
        """Forward to an engine: POST /tokenize, /detokenize. vLLM's clients name a text
        `prompt`."""
        path, body = request.url.path, await _body(request)
        TokenizeFields.check(body)
        answer: Any = await self._engines.ask_any(lambda client: client.ask("POST", path, body))
        return JSONResponse({"prompt": answer["text"]} | answer if "text" in answer else answer)

    async def add_worker(self, request: Request) -> Response:
        """Accept a worker: POST /workers, /add_worker. An engine whose sidecar has registered it is
        known already, and so is the gateway itself, as which the fleet is one engine."""
        url = str(
            request.query_params.get("url") or (await _body(request)).get("url") or ""
        ).rstrip("/")
        if url == str(request.base_url).rstrip("/"):
            return JSONResponse({"status": "accepted", "worker_id": "fleet"}, 202)
        for engine in self._link.engines.values():
            if engine.url == url:
                return JSONResponse({"status": "accepted", "worker_id": engine.engine_id}, 202)
        raise Refused(
            f"url: no sidecar has told of an engine at {url!r:.100}; start one beside it and ask "
            "again",
            409,
        )

    async def remove_worker(self, request: Request) -> Response:
        """Change nothing, as the mesh leaves out an engine that does not answer: DELETE
        /workers/{engine_id}."""
        return JSONResponse({"status": "accepted", "worker_id": self._one(request).engine_id}, 202)

    def pass_on(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint below /engines/{engine_id} that forwards what an engine answers
        itself."""

        async def endpoint(request: Request) -> Response:
            if path in ("server_info", "get_server_info"):
                url = _url_of(self._one(request))
                ask = self._engines.ask(url, lambda client: client.server_info())
                return JSONResponse(await ask)
            query = f"?{request.url.query}" if request.url.query else ""
            return await self._pass_on(
                self._one(request), request.method, f"/{path}{query}", await request.body()
            )

        return endpoint

    def _scope(self, request: Request) -> list[KnownEngine]:
        """Return the engines that a call is for. Raises Refused, also while the mesh is away."""
        if self._link.visit is None:
            raise Refused("the mesh is away: ask again when /health says that it is there", 503)
        if "engine_id" in request.path_params:
            return [self._one(request)]
        return sorted(self._link.engines.values(), key=lambda engine: engine.engine_id)

    def _one(self, request: Request) -> KnownEngine:
        engine_id = request.path_params["engine_id"]
        engine = self._link.engines.get(engine_id)
        if engine is None:
            raise Refused(
                f"engine_id: no engine {engine_id!r:.100} is registered; see /workers", 404
            )
        return engine

    async def _flush(self, engines: list[KnownEngine]) -> dict[str, str]:
        """Empty the engines' caches; return errors by engine id."""
        errors: dict[str, str] = {}

        async def one(engine: KnownEngine) -> None:
            try:
                await self._engines.ask(_url_of(engine), lambda client: client.flush_cache())
            except Refused as error:
                errors[engine.engine_id] = str(error)

        async with asyncio.TaskGroup() as group:
            for engine in engines:
                group.create_task(one(engine))
        return errors

    async def _busy(self, engines: list[KnownEngine]) -> dict[str, str]:
        """Return how much engines run, by their ids, without those that run nothing."""
        loads = await asyncio.gather(*map(self._updates.load_of, engines))
        steps = {
            engine.engine_id: load.running_steps + load.waiting_steps
            for engine, load in zip(engines, loads, strict=True)
        }
        return {engine_id: f"has {count} steps" for engine_id, count in steps.items() if count}

    async def _pass_on(self, engine: KnownEngine, method: str, path: str, raw: bytes) -> Response:
        async def forward(client: EngineClient) -> Response:
            async with client.forward(method, path, raw) as response:
                kind = response.headers.get("content-type")
                return Response(await response.read(), response.status, media_type=kind)

        return await self._engines.ask(_url_of(engine), forward)


def refuse(what: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that refuses all requests with a reason."""

    async def endpoint(request: Request) -> Response:
        raise Refused(f"{request.url.path}: {what}", 501)

    return endpoint


def _url_of(engine: KnownEngine) -> str:
    """Return the URL of an engine's HTTP server. Raises Refused."""
    if not engine.url:
        raise Refused(
            f"the sidecar of {engine.engine_id} does not tell where its engine's HTTP server is",
            503,
        )
    return engine.url


def _urls(engines: Collection[KnownEngine]) -> set[str]:
    return {engine.url for engine in engines}


async def _body(request: Request) -> dict[str, Any]:
    return await read_body(request)


async def _tags(request: Request) -> list[str]:
    """Return the tags of memory that a request names; none: all."""
    tags = request.query_params.getlist("tags") or (await _body(request)).get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise Refused(f"tags: must be a list of texts, is {tags!r:.100}")
    return tags


async def _said(work: Awaitable[Mapping[str, str]], done: str) -> Response:
    """Return the answer to `work`, which returns errors by engine id."""
    try:
        errors = await work
    except treadle.TreadleError as error:
        raise Refused(str(error), 400 if error.refused else 503) from error
    message = "; ".join(f"{engine_id}: {error}" for engine_id, error in errors.items()) or done
    answer: dict[str, Any] = {
        "success": not errors,
        "message": message,
        "status": "error" if errors else "ok",
    }
    return JSONResponse(answer, 400 if errors else 200)


def _pause_mode(ends_steps: bool) -> "engine_pb2.PauseMode.ValueType":
    return engine_pb2.PAUSE_MODE_ABORT if ends_steps else engine_pb2.PAUSE_MODE_KEEP


def _request_id() -> str:
    return uuid.uuid4().hex
