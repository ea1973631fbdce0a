"""A fake Kubernetes API server on loopback: the few paths that the service uses; each pod is a
plain process here.

It says what a real one would say as far as the API's documentation goes; no kubelet, scheduler,
network policy or admission stands behind it. `requests`: what it was asked, as (method, path).
"""

import asyncio
import json
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from support.conditions import SHUTDOWN_S
from support.fake_host import start_worker

STDIN, STDOUT = 0, 1
NAMESPACE = "rollouts"
POD = "/api/v1/namespaces/{namespace}/pods/{name}"


@dataclass
class FakePod:
    """What was created, and the process that stands for its container. waiting: why it does not
    start."""

    body: dict[str, Any]
    process: "subprocess.Popen[bytes] | None" = None
    end: socket.socket | None = None
    waiting: str = ""
    resized: list[dict[str, Any]] = field(default_factory=list)

    def show(self) -> dict[str, Any]:
        """As the API gives it."""
        code = None if self.process is None else self.process.poll()
        state: dict[str, Any]
        if self.waiting:
            phase, state = "Pending", {"waiting": {"reason": self.waiting, "message": "told so"}}
        elif code is None:
            phase, state = "Running", {"running": {}}
        else:
            # a test kills so where the kernel would
            reason = "OOMKilled" if code == -signal.SIGTERM else "Error"
            phase, state = (
                "Failed",
                {"terminated": {"exitCode": 128 - code if code < 0 else code, "reason": reason}},
            )
        container = {
            "name": "worker",
            "image": "i",
            "imageID": "i",
            "ready": True,
            "restartCount": 0,
            "state": state,
        }
        return {**self.body, "status": {"phase": phase, "containerStatuses": [container]}}


class FakeApiServer:
    """minor: the minor version that it reports. refuses: HTTP status of the next creations."""

    def __init__(self, paths: Sequence[str], minor: str = "35") -> None:
        self.pods: dict[str, FakePod] = {}
        self.requests: list[tuple[str, str]] = []
        self.minor = minor
        self.refuses: list[int] = []
        self.waiting = ""
        self.url = ""
        self._paths = paths
        self._runner: web.AppRunner | None = None

    async def start(self, folder: Path) -> Path:
        """Listen; the kubeconfig that leads here."""
        application = web.Application(middlewares=[self._note])
        pods = POD.removesuffix("/{name}")
        application.add_routes(
            [
                web.get("/version/", self._version),
                web.get("/version", self._version),
                web.get(pods, self._list),
                web.post(pods, self._create),
                web.get(POD, self._read),
                web.delete(POD, self._delete),
                web.get(f"{POD}/log", self._log),
                web.get(f"{POD}/attach", self._attach),
                web.patch(f"{POD}/resize", self._resize),
            ]
        )
        self._runner = web.AppRunner(application, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return write_kubeconfig(folder, self.url)

    async def stop(self) -> None:
        """End everything."""
        for pod in self.pods.values():
            end(pod)
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        try:
            answer: web.StreamResponse = await handler(request)
        except KeyError:  # no such pod
            return refusal(404, "not found")
        return answer

    async def _version(self, request: web.Request) -> web.Response:
        empty = dict.fromkeys(
            ("gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform"), ""
        )
        return web.json_response(
            {**empty, "major": "1", "minor": self.minor, "gitVersion": f"v1.{self.minor}.0-fake"}
        )

    async def _list(self, request: web.Request) -> web.Response:
        wanted = dict(
            part.split("=") for part in request.query.get("labelSelector", "").split(",") if part
        )
        found = [
            pod.show()
            for pod in self.pods.values()
            if wanted.items() <= pod.body["metadata"]["labels"].items()
        ]
        return web.json_response(
            {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": found}
        )

    async def _create(self, request: web.Request) -> web.Response:
        if self.refuses:
            return refusal(self.refuses.pop(0), "not now")
        body = await request.json()
        pod = FakePod(body, waiting=self.waiting)
        if not self.waiting:
            pod.process, pod.end = start_worker(
                body["spec"]["containers"][0]["command"], self._paths
            )
        self.pods[body["metadata"]["name"]] = pod
        return web.json_response(pod.show(), status=201)

    async def _read(self, request: web.Request) -> web.Response:
        return web.json_response(self.pods[request.match_info["name"]].show())

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self.pods.pop(request.match_info["name"])
        end(pod)
        return web.json_response(pod.body)

    async def _log(self, request: web.Request) -> web.Response:
        return web.Response(text="Traceback\nRuntimeError: the worker's last words\n")

    async def _resize(self, request: web.Request) -> web.Response:
        pod = self.pods[request.match_info["name"]]
        assert request.content_type == "application/strategic-merge-patch+json"
        pod.resized.append(await request.json())
        return web.json_response(pod.show())

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods[request.match_info["name"]]
        assert pod.end is not None
        assert all(request.query[name] == "True" for name in ("stdin", "stdout", "stderr"))
        answer = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await answer.prepare(request)
        with pod.end.dup() as line:
            line.setblocking(False)
            out = asyncio.ensure_future(copy(line, answer))
            async for message in answer:
                if message.type is aiohttp.WSMsgType.BINARY and message.data[0] == STDIN:
                    await asyncio.get_running_loop().sock_sendall(line, message.data[1:])
            out.cancel()
            await asyncio.wait((out,))
        return answer


async def copy(line: socket.socket, answer: web.WebSocketResponse) -> None:
    """What the process says, as the channel of standard output."""
    try:
        while piece := await asyncio.get_running_loop().sock_recv(line, 16 * 1024):
            await answer.send_bytes(bytes([STDOUT]) + piece)
    except ConnectionError:
        pass
    await answer.close()


def end(pod: FakePod) -> None:
    """Kill what stands for it."""
    if pod.process is not None:
        pod.process.kill()
        pod.process.wait()
    if pod.end is not None:
        pod.end.close()


def refusal(status: int, message: str) -> web.Response:
    """As the API refuses."""
    body = {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "message": message,
        "code": status,
    }
    return web.json_response(body, status=status)


def write_kubeconfig(folder: Path, url: str) -> Path:
    """The kubeconfig that leads to this API server."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "contexts": [
            {
                "name": "fake",
                "context": {"cluster": "fake", "user": "nobody", "namespace": NAMESPACE},
            }
        ],
        "users": [{"name": "nobody", "user": {}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path
