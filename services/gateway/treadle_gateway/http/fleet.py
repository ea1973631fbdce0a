"""Answer what concerns the whole fleet: its engines, models, load and health, and the sessions that
it holds."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from treadle_gateway.engines import Engines
from treadle_gateway.mesh import MeshLink
from treadle_gateway.order import Refused
from treadle_gateway.updates import Updates


class Fleet:
    """Endpoints for the whole fleet. served_model: how models are named; empty: as the engines
    do. stopping: set once the gateway drains."""

    def __init__(
        self,
        mesh: MeshLink,
        engines: Engines,
        updates: Updates,
        served_model: str,
        stopping: asyncio.Event,
    ) -> None:
        self._stopping = stopping
        self._mesh = mesh
        self._engines = engines
        self._updates = updates
        self._served_model = served_model

    async def close_session(self, request: Request) -> Response:
        """End a session's trajectories, which frees what they hold: DELETE /sessions/{session},
        SkyRL's /finish_session?session_id=."""
        session = request.path_params.get("session") or request.query_params.get("session_id") or ""
        if not session:
            raise Refused("session_id: must name the session")
        visit = self._mesh.visit
        closed = await visit.sessions.close(session) if visit is not None else 0
        return JSONResponse({"closed": closed})

    async def workers(self, request: Request) -> Response:
        """List the engines in the form of SGLang's gateway: GET /workers. Each has a URL behind
        this gateway, since a caller who went around it would undo what the mesh has decided."""
        base = str(request.base_url).rstrip("/")
        found = [
            {
                "id": engine.engine_id,
                "url": f"{base}/engines/{engine.engine_id}",
                "model_id": engine.model,
                "is_healthy": self._mesh.visit is not None,
                "worker_type": "regular",
            }
            for engine in self._mesh.engines.values()
        ]
        return JSONResponse(
            {"workers": found, "urls": [each["url"] for each in found], "total": len(found)}
        )

    async def models(self, request: Request) -> Response:
        """List the models: GET /v1/models."""
        names = (
            [self._served_model]
            if self._served_model
            else sorted({e.model for e in self._mesh.engines.values()})
        )
        room = {"max_model_len": self._mesh.context_tokens}
        data = [
            {"id": name, "object": "model", "owned_by": "treadle", "root": name} | room
            for name in names
        ]
        return JSONResponse({"object": "list", "data": data})

    async def model_info(self, request: Request) -> Response:
        """Describe the model: GET /model_info, /get_model_info. Sidecars report which weights are
        served; the scheduler learns it later."""
        engines = list(self._mesh.engines.values())
        try:
            versions = await self._updates.versions_of(engines)
        except Refused:  # the mesh is away
            versions = {engine.weight_version for engine in engines}
        model = engines[0].model if engines else ""
        answer = {
            "model_path": model,
            "is_generation": True,
            "weight_version": ",".join(sorted(versions)),
        }
        return JSONResponse(answer)

    async def loads(self, request: Request) -> Response:
        """Return the load that each engine reports: GET /v1/loads."""
        found = []
        for engine in self._mesh.engines.values():
            if engine.url:
                try:
                    answer = await self._engines.ask(
                        engine.url, lambda client: client.loads("include=core,queues")
                    )
                except Refused as error:
                    found.append({"engine_id": engine.engine_id, "error": str(error)})
                else:
                    found += [{"engine_id": engine.engine_id, **load} for load in answer["loads"]]
        return JSONResponse({"loads": found})

    async def health(self, request: Request) -> Response:
        """Answer 200 while the mesh or engines can serve requests, which they cannot once all have
        refused the wanted weights, nor while this gateway drains: GET /health."""
        await self._mesh.looked.wait()
        here, problem = self._mesh.visit is not None, self._mesh.no_weights
        where = "draining" if self._stopping.is_set() else "there" if here else "away"
        said = {"mesh": where, "engines": len(self._mesh.engines)}
        if here and problem is not None:
            return JSONResponse(said | {"weights": problem.reason}, 503)
        serves = (here or self._engines.urls) and not self._stopping.is_set()
        return JSONResponse(said, 200 if serves else 503)
