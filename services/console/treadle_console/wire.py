"""Assemble the console: the state that facts and answers fill, and an HTTP server beside the gRPC
one for health."""

import time
import uuid
from typing import cast

from treadle.telemetry.v1.facts_pb2 import Fact
from treadle_runtime.config import names_of
from treadle_runtime.http.web import Edge, bind_http, serve_http
from treadle_runtime.server import Runtime, Wiring

from treadle_console import convert
from treadle_console.app import MOST_BODY_BYTES, Feed, Login, Pages, make_app
from treadle_console.config import ConsoleSettings
from treadle_console.control import Control
from treadle_console.state import Mesh
from treadle_console.watch import Watch


async def wire(runtime: Runtime) -> Wiring:
    """Assemble the service, and read all facts that are kept, of about an hour, before the first
    page is served."""
    settings = cast(ConsoleSettings, runtime.settings)
    listener = bind_http("TREADLE_CONSOLE_HTTP_LISTEN", settings.http_listen)
    mesh = Mesh(settings.most_trajectories, settings.most_spans)

    async def hear(fact: Fact) -> None:
        convert.take_fact(mesh, fact)

    await runtime.bus.subscribe(convert.KINDS, hear, replay=True)
    await runtime.bus.catch_up()
    watch = Watch(mesh, runtime.follow(settings.scheduler, "scheduler"), runtime.channel)
    feed = Feed(mesh, uuid.uuid4().hex[:12], runtime.stopping, lambda: round(1e3 * time.time()))
    control = Control(watch.scheduler, runtime.channel, settings.control_key.get_secret_value())
    mesh.set_section("control", {"offered": control.offered})
    login = Login(settings.login_token.get_secret_value(), settings.http_listen)
    app = make_app(Pages(feed, watch.scheduler, control), login)
    hosts = [settings.http_listen.rpartition(":")[0], *names_of(settings.http_hosts)]
    edge = Edge(hosts, "TREADLE_CONSOLE_HTTP_HOSTS", body_bytes=MOST_BODY_BYTES)
    grace_s = settings.drain_grace_s
    serve = serve_http(app, listener, runtime.stopping, edge=edge, grace_s=grace_s)
    return Wiring(services={}, tasks=watch.tasks, servers=[serve])
