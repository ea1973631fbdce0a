"""A fake Kubernetes API server on loopback with StatefulSets of engines: the few paths that a
resource plan uses.

It says what a real one would say as far as the API's documentation goes; no controller, scheduler
or kubelet stands behind it. Where a scale changes, `come` and `go` are called with the names of
pods, for the test to do what they would.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from support.conditions import SHUTDOWN_S
from support.fake_api_server import NAMESPACE, refusal, write_kubeconfig

SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
CRASHED = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}


class FakeEngineCluster:
    """replicas: by StatefulSet; each is of the degree at the end of its name. crashing: sets whose
    pods do not start. forbids: refuses to scale. scaled: (name, replicas, whether it was a dry run)
    in the order of the requests."""

    def __init__(self, replicas: dict[str, int]) -> None:
        self.replicas = replicas
        self.crashing: set[str] = set()
        self.forbids = False
        self.scaled: list[tuple[str, int, bool]] = []
        self.come: Callable[[str], Awaitable[object]]
        self.go: Callable[[str], Awaitable[object]]

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Path]:
        """Listen; yields the kubeconfig that leads here."""
        application = web.Application()
        application.add_routes(
            [
                web.get(SETS, self._list_sets),
                web.patch(f"{SETS}/{{name}}/scale", self._scale),
                web.get(PODS, self._list_pods),
                web.get(f"{PODS}/{{name}}/log", self._log),
            ]
        )
        runner = web.AppRunner(application, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield write_kubeconfig(folder, f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    async def _list_sets(self, request: web.Request) -> web.Response:
        assert request.query["labelSelector"] == "app.kubernetes.io/component=engine"
        items = []
        for name, replicas in self.replicas.items():
            own = {"accelerator": "H200", "degree": name[-1], "slots": "100"}
            labels = {f"treadle.engines/{key}": value for key, value in own.items()}
            template: dict[str, Any] = {"metadata": {}, "spec": {"containers": []}}
            spec = {
                "replicas": replicas,
                "serviceName": "engine",
                "selector": {},
                "template": template,
            }
            items.append({"metadata": {"name": name, "labels": labels}, "spec": spec})
        return web.json_response(
            {"apiVersion": "apps/v1", "kind": "StatefulSetList", "metadata": {}, "items": items}
        )

    async def _scale(self, request: web.Request) -> web.Response:
        name, dry_run = request.match_info["name"], request.query.get("dryRun") == "All"
        if self.forbids:
            return refusal(403, f"may not patch the scale of {name}")
        wanted = (await request.json())["spec"]["replicas"]
        self.scaled.append((name, wanted, dry_run))
        if not dry_run:
            before, self.replicas[name] = self.replicas[name], wanted
            for index in range(wanted, before):
                await self.go(f"{name}-{index}")
            for index in range(before, wanted):
                if name not in self.crashing:
                    await self.come(f"{name}-{index}")
        return web.json_response(
            {"apiVersion": "autoscaling/v1", "kind": "Scale", "spec": {"replicas": wanted}}
        )

    async def _list_pods(self, request: web.Request) -> web.Response:
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        state = CRASHED if name.rpartition("-")[0] in self.crashing else {"running": {}}
        container = {
            "name": "engine",
            "image": "i",
            "imageID": "i",
            "ready": False,
            "restartCount": 2,
            "state": state,
        }
        pod = {
            "metadata": {"name": name},
            "status": {"phase": "Pending", "containerStatuses": [container]},
        }
        return web.json_response(
            {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [pod]}
        )

    async def _log(self, request: web.Request) -> web.Response:
        assert request.query["container"] == "engine"
        return web.Response(text="RuntimeError: no such model\n")
