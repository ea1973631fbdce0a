"""Assemble the gateway: the link to the mesh, the engines, and an HTTP server beside the gRPC one
that reports health."""

import random
import time
from pathlib import Path
from typing import cast

import treadle
from treadle.adapters.sessions import Sessions
from treadle.certificates import Certificates
from treadle.connection import Mesh
from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from treadle_runtime.calls import Channels
from treadle_runtime.config import names_of
from treadle_runtime.errors import StartError
from treadle_runtime.http.web import Edge, bind_http, serve_http
from treadle_runtime.server import Runtime, Wiring, receive_limit_bytes

from treadle_gateway.calls import Calls
from treadle_gateway.config import GatewaySettings
from treadle_gateway.engines import Engines, Proxy
from treadle_gateway.http.app import make_app, write_refusal
from treadle_gateway.http.chat import Chat
from treadle_gateway.http.control import Control
from treadle_gateway.http.fleet import Fleet
from treadle_gateway.http.openai_api import OpenaiApi
from treadle_gateway.http.sglang_api import SglangApi
from treadle_gateway.http.vllm_api import VllmApi
from treadle_gateway.mesh import MeshLink
from treadle_gateway.order import Refused
from treadle_gateway.text import TextModel
from treadle_gateway.updates import Updates

GIVE_UP_S = 600.0  # how long a request waits for an engine that answers
# A drain waits for the aborts and closes at its end; an engine that is late with them is busy.
TIMEOUTS = treadle.Timeouts(cleanup_s=5.0)
TOKEN_INTERVAL_S = 0.02  # a person reads streams of tokens; frameworks read whole answers


async def wire(runtime: Runtime) -> Wiring:
    settings = cast(GatewaySettings, runtime.settings)
    try:
        model = TextModel(Path(settings.tokenizer)) if settings.tokenizer else None
    except FileNotFoundError as error:
        raise StartError(str(error)) from error
    listener = bind_http("TREADLE_GATEWAY_HTTP_LISTEN", settings.http_listen)
    # This client has no spans and metrics: it makes two calls a second.
    channels = Channels(receive_limit_bytes(settings), [], runtime.certificates)
    scheduler = SchedulerServiceStub(channels.follow(settings.scheduler, "scheduler"))

    def make_client() -> treadle.Client:
        return treadle.Client(
            settings.scheduler,
            tls_folder=settings.tls_folder or None,
            token_interval_s=TOKEN_INTERVAL_S,
            job=settings.job,
            timeouts=TIMEOUTS,
        )

    def make_sessions(client: treadle.Client) -> Sessions:
        limits = settings.idle_s, settings.unnamed_idle_s
        return Sessions(client, *limits, time.monotonic, idle_tokens=settings.idle_tokens)

    def make_connection() -> Mesh:
        folder = settings.tls_folder
        certificates = Certificates(folder) if folder else Certificates.of_environment()
        limits = (treadle.Timeouts(), treadle.RetryPolicy(), random.Random())
        return Mesh(
            settings.scheduler,
            certificates,
            (),
            *limits,
            call_tokens=0,
            token_interval_s=0.0,
            job=settings.job,
        )

    updates = Updates(make_connection())
    mesh = MeshLink(
        scheduler,
        make_client,
        make_sessions,
        updates.failed_pushes,
        settings.away_after_s,
        settings.no_weights_s,
    )
    engines = Engines(mesh, settings.engine_key.get_secret_value())
    gauge, total = runtime.metrics.gauge, runtime.metrics.total
    requests = total("requests", "request", "Requests, by the way that they took")
    calls = Calls(mesh, engines, model, GIVE_UP_S, lambda way: requests(1, {"way": way}))

    async def until_runs(url: str) -> None:
        for engine in list(mesh.engines.values()):
            if engine.url == url and mesh.visit is not None:
                await updates.until_runs(engine, lambda: mesh.no_weights)

    proxy = Proxy(engines, until_runs, lambda: requests(1, {"way": "forwarded"}))
    chat = Chat(engines, mesh, model, (settings.tool_parser, settings.reasoning_parser))
    app = make_app(
        SglangApi(calls, proxy, mesh, model),
        OpenaiApi(calls, proxy, mesh, chat, model),
        VllmApi(
            calls,
            proxy,
            mesh,
            settings.served_model,
            Path(settings.tokenizer) if settings.tokenizer else None,
        ),
        Fleet(mesh, engines, updates, settings.served_model, runtime.stopping),
        Control(mesh, engines, calls, proxy, updates),
        settings.api_key.get_secret_value(),
    )
    changed = "Turns whose text did not go on from the tokens of their session"
    gauge("retokenised", "turn", changed, lambda: chat.retokenised)
    gauge("running", "request", "Requests that generate", lambda: calls.running)
    gauge(
        "mesh",
        "mesh",
        "1 while the mesh answers, 0 while requests go straight to engines",
        mesh.visits,
    )

    async def close() -> None:
        await calls.finish()
        await updates.close()
        await engines.close()
        await channels.close()

    edge = Edge(
        [settings.http_listen.rpartition(":")[0], *names_of(settings.http_hosts)],
        "TREADLE_GATEWAY_HTTP_HOSTS",
        settings.max_message_bytes,
        settings.held_bytes,
        lambda status, words: write_refusal(Refused(words, status)),
    )
    serve = serve_http(
        app,
        listener,
        runtime.stopping,
        edge=edge,
        tls_folder=settings.tls_folder,
        grace_s=settings.drain_grace_s,
    )
    return Wiring(services={}, tasks=[mesh.watch], servers=[serve], close=close)
