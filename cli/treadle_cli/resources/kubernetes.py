"""Run the engines of a Kubernetes cluster: a StatefulSet for each class, whose replicas are its
engines.

A StatefulSet belongs to a mesh's engines by the label app.kubernetes.io/component=engine, and has
its class in the labels ACCELERATOR, DEGREE and SLOTS; the namespace has each class once. A pod's
name is its engine's id (k8s/base/engine). Kubernetes removes the pods with the highest numbers
first, which are the last of `running`. This process may have to list StatefulSets and patch their
scale, list pods, and get their logs (k8s/components/gpu).
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config.config_exception import ConfigException
from treadle_runtime.errors import InvalidArgument

from treadle_cli.exits import UsageProblem
from treadle_cli.resources.plan import EngineClass, EngineFailed, ResourcePlan

ENGINES = "app.kubernetes.io/component=engine"
ACCELERATOR, DEGREE, SLOTS = (
    f"treadle.engines/{name}" for name in ("accelerator", "degree", "slots")
)
CONTAINER = "engine"
CALL_TIMEOUT_S = 30.0
LOG_LINES = 12
# Waiting does not start a container that waits for one of these.
HOPELESS = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName"),
    *("CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError"),
)


@dataclass(frozen=True, slots=True)
class _Set:
    """A StatefulSet of engines. labels: of itself, not of its pods."""

    name: str
    replicas: int
    labels: dict[str, str]

    @property
    def kind(self) -> EngineClass:
        """Return the class of its engines. Raises UsageProblem where a label is missing or no
        number."""
        try:
            return EngineClass(
                self.labels[ACCELERATOR], int(self.labels[DEGREE]), int(self.labels[SLOTS])
            )
        except (KeyError, ValueError) as error:
            wanted = f"{ACCELERATOR}, {DEGREE} and {SLOTS}, the last two whole numbers"
            raise UsageProblem(
                f"StatefulSet {self.name} needs the labels {wanted}: {error}"
            ) from None


class KubernetesEngines:
    """`Engines` of one namespace; made by `connect`. Calls raise UsageProblem where the API server
    refuses them."""

    accelerator = ""
    accelerators = 0  # the cluster's own scheduler counts them

    def __init__(self, namespace: str, api: Any) -> None:
        self._namespace = namespace
        self._apps, self._core = client.AppsV1Api(api), client.CoreV1Api(api)

    @classmethod
    @asynccontextmanager
    async def connect(cls, namespace: str) -> AsyncIterator["KubernetesEngines"]:
        """Connect with the service account of the pod that this runs in, else by KUBECONFIG. Raises
        UsageProblem."""
        settings: Any = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=settings)
        except ConfigException:
            try:
                await config.load_kube_config(client_configuration=settings)
            except (ConfigException, OSError) as error:
                raise UsageProblem(
                    f"--kubernetes {namespace}: no cluster is known ({error}): set KUBECONFIG"
                ) from None
        async with client.ApiClient(settings) as api:
            yield cls(namespace, api)

    async def running(self) -> dict[str, EngineClass]:
        return {
            f"{each.name}-{index}": each.kind
            for each in await self._sets()
            for index in range(each.replicas)
        }

    async def check(self, plan: ResourcePlan) -> None:
        """Let the API server run every change dry, so that a missing right shows before anything
        stops."""
        sets = {each.kind: each for each in await self._sets()}
        for index, kind in enumerate(plan):
            if kind.flags:
                said = "must be empty on Kubernetes: a class has the arguments of its StatefulSet"
                raise InvalidArgument(f"plan.engines[{index}].flags", said)
            if kind not in sets:
                known = "; ".join(str(each) for each in sets) or "none"
                said = (
                    f"no StatefulSet has this class ({kind}); there are: {known}. Add one "
                    "(k8s/components/gpu)"
                )
                raise InvalidArgument(f"plan.engines[{index}]", said)
        for each in sets.values():
            await self._scale(each.name, plan.get(each.kind, 0), dry_run="All")

    async def stop(self, engine_ids: Sequence[str]) -> None:
        fewer = Counter(engine_id.rpartition("-")[0] for engine_id in engine_ids)
        for each in await self._sets():
            if fewer[each.name]:
                await self._scale(each.name, each.replicas - fewer[each.name])

    async def start(self, kind: EngineClass) -> str:
        engine_id = str(kind)
        try:
            (own,) = (each for each in await self._sets() if each.kind == kind)
            engine_id = f"{own.name}-{own.replicas}"
            await self._scale(own.name, own.replicas + 1)
        except UsageProblem as error:
            raise EngineFailed(engine_id, str(error)) from error
        return engine_id

    async def until_up(self, engine_id: str) -> None:
        """Return at once: the engine's registration reports that it is up."""

    async def look_for_failure(self, engine_id: str) -> None:
        try:
            pod = await self._pod(engine_id)
        except UsageProblem:  # the API server is away for a moment: look again next time
            return
        for status in (pod and pod.status.container_statuses) or ():
            waiting = status.state.waiting
            if waiting is not None and waiting.reason in HOPELESS:
                problem = (
                    f"container {status.name}: {waiting.reason} {waiting.message or ''}".rstrip()
                )
                raise EngineFailed(
                    engine_id, "\n".join((problem, await self.describe(engine_id))).rstrip()
                )

    async def describe(self, engine_id: str) -> str:
        """Return why the pod has no node, or the end of the engine's log, of the run before where
        it began again."""
        try:
            pod = await self._pod(engine_id)
        except UsageProblem as error:
            return str(error)
        if pod is None:
            return "its pod does not exist"
        reasons = [
            each.message
            for each in pod.status.conditions or ()
            if each.status == "False" and each.message
        ]
        for previous in (True, False):
            try:
                said = await self._call(
                    self._core.read_namespaced_pod_log,
                    engine_id,
                    container=CONTAINER,
                    tail_lines=LOG_LINES,
                    previous=previous,
                )
            except UsageProblem:  # no log: the container has not started, or not twice
                continue
            if said:
                return "\n".join((*reasons, str(said).rstrip()))
        return "\n".join(reasons)

    async def _sets(self) -> list[_Set]:
        found = await self._call(self._apps.list_namespaced_stateful_set, label_selector=ENGINES)
        sets = [
            _Set(each.metadata.name, each.spec.replicas, each.metadata.labels)
            for each in found.items
        ]
        names: dict[EngineClass, str] = {}
        for each in sets:
            if names.setdefault(each.kind, each.name) != each.name:
                raise UsageProblem(
                    f"StatefulSets {names[each.kind]} and {each.name} are of one class: {each.kind}"
                )
        return sorted(sets, key=lambda each: each.name)

    async def _pod(self, name: str) -> Any:
        """Return the pod of this name; None where there is none."""
        found = await self._call(
            self._core.list_namespaced_pod, field_selector=f"metadata.name={name}"
        )
        return found.items[0] if found.items else None

    async def _scale(self, name: str, replicas: int, **options: Any) -> None:
        body = {"spec": {"replicas": replicas}}
        await self._call(self._apps.patch_namespaced_stateful_set_scale, name, body=body, **options)

    async def _call(self, method: Any, *names: str, **arguments: Any) -> Any:
        what = " ".join((method.__name__.replace("_", " "), *names))
        try:
            return await method(
                *names, self._namespace, _request_timeout=CALL_TIMEOUT_S, **arguments
            )
        except ApiException as error:
            try:
                reason = json.loads(error.body or "")["message"]
            except (ValueError, TypeError, KeyError):
                reason = error.reason
            raise UsageProblem(f"{what}: {error.status} {reason}") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UsageProblem(f"{what}: the API server does not answer ({error!r})") from None
