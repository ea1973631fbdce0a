"""Pods of a Kubernetes cluster. The cluster chooses the node, and has the caches of images.

Owns: the connection to the API server. Invariants: as `pod.py` says; a pod is labelled with its owner, who finds it
again. Cores follow each action by in-place resize where the server has it (on by default from 1.33, stable from 1.35):
the kubelet carries it out a little after the action has begun, and knows no cores by number.

The pod of a recipe, as the API takes it: Kubernetes' `restricted` security standard, and a little more.

What a pod cannot be told: a limit on processes (the kubelet has one for all, `podPidsLimit`), and to have no network (a
NetworkPolicy does it, by the label `treadle.tools/network`, where the cluster's network carries it out).

The line to process 1 of a pod, over a web socket of the API server."""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config.config_exception import ConfigException
from kubernetes_asyncio.stream import WsApiClient

from treadle_tools.sandbox.containers.recipe import USER, Allotment, Ending, HostFailed, Pipe, Recipe, VesselLost

OWNER, TOOL, NETWORK = "treadle.tools/owner", "treadle.tools/tool", "treadle.tools/network"
NO_NETWORK = "none"
CONTAINER = "worker"
# What the cluster's scheduler counts for a container that mostly waits; the service itself decides who runs when.
REQUESTED_CPU = "50m"


def pod_of(recipe: Recipe, *, name: str, owner: str, runtime_class: str) -> dict[str, Any]:
    """A Pod object."""
    memory = str(recipe.memory_bytes)
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "hostname": "sandbox",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": recipe.image,
                "command": list(recipe.argv),
                "env": [{"name": name, "value": value} for name, value in recipe.variables.items()],
                "workingDir": "/tmp",
                "stdin": True,
                "stdinOnce": False,  # the input stays open for the service's next life
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": {
                    "requests": {"cpu": REQUESTED_CPU, "memory": memory},
                    "limits": {"cpu": str(recipe.cpu_cores), "memory": memory},
                },
                "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        # In memory its size is the kernel's to hold; on disk the kubelet would look every few minutes, and evict.
        "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": str(recipe.work_bytes)}}],
    }
    if runtime_class:
        spec["runtimeClassName"] = runtime_class
    labels = {
        "app.kubernetes.io/part-of": "treadle",
        "app.kubernetes.io/component": "tools-sandbox",
        OWNER: label(owner),
        TOOL: label(recipe.tool),
        NETWORK: label(recipe.network) if recipe.network else NO_NETWORK,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


def resized(cpu_cores: int) -> dict[str, Any]:
    """The patch of a pod's resize subresource. What is requested stays: no scheduler need be asked."""
    return {"spec": {"containers": [{"name": CONTAINER, "resources": {"limits": {"cpu": str(cpu_cores)}}}]}}


def label(text: str) -> str:
    """A label's value may hold letters, digits, '-', '_', '.', and begin and end with the first two."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.")


PIECE_BYTES = 32 * 1024  # of a message to a pod: what the kubelet itself sends at a time
COMPLAINTS_BYTES = 8192  # of what it wrote to stderr, the newest
STDIN, STDOUT, STDERR = 0, 1, 2


class PodPipe:
    """Bytes to and from process 1, attached over a web socket; its first byte names the channel."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._complaints = b""

    async def write(self, piece: bytes) -> None:
        """See `vessel.Pipe`."""
        try:
            for start in range(0, len(piece), PIECE_BYTES):
                await self._socket.send_bytes(bytes([STDIN]) + piece[start : start + PIECE_BYTES])
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise ConnectionError(str(error) or "the connection is gone") from error

    async def read(self) -> bytes:
        """See `vessel.Pipe`."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            while (message := await self._socket.receive()).type is aiohttp.WSMsgType.BINARY:
                channel, data = message.data[0], message.data[1:]
                if channel == STDOUT and data:
                    return bytes(data)
                if channel == STDERR:
                    self._complaints = (self._complaints + data)[-COMPLAINTS_BYTES:]
        return b""

    @property
    def complaints(self) -> str:
        """See `vessel.Pipe`."""
        return self._complaints.decode(errors="replace").strip()

    async def close(self) -> None:
        """See `vessel.Pipe`."""
        await self._socket.close()


log = structlog.get_logger()

RESIZE_MINOR = 33  # of version 1: the first whose servers resize pods in place unasked
START_TIMEOUT_S = 120.0  # an image may have to be fetched first
LOOK_PAUSE_S = 0.2
LONGEST_LOOK_PAUSE_S = 2.0
CALL_TIMEOUT_S = 60.0
LOG_LINES = 20
HOPELESS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
}
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class PodVessel:
    """One pod."""

    def __init__(self, host: "KubernetesHost", name: str) -> None:
        self.name = name
        self._host = host

    async def attach(self) -> Pipe:
        """See `vessel.Vessel`."""
        return await self._host.attached(self.name)

    async def allot(self, allotment: Allotment) -> None:
        """See `vessel.Vessel`. Memory stays as it was made with."""
        await self._host.resize(self.name, allotment.cpu_cores)

    async def ending(self) -> Ending:
        """See `vessel.Vessel`."""
        return await self._host.ending(self.name)

    async def remove(self) -> None:
        """See `vessel.Vessel`."""
        await self._host.remove(self.name)


class KubernetesHost:
    """See the module. namespace: empty: of this pod, or "default". runtime_class: of the pods; empty: the cluster's."""

    def __init__(self, *, owner: str, namespace: str = "", runtime_class: str = "") -> None:
        self.name = "kubernetes"
        self._owner = owner
        self._namespace = namespace
        self._runtime_class = runtime_class
        self._api: Any = None  # CoreV1Api; the library's types are those of a client that is not asynchronous
        self._streams: Any = None
        self._resizes = False

    async def check(self) -> str:
        """See `vessel.Host`."""
        api = await self._connected()
        with _failures("the API server"):
            about = await client.VersionApi(api.api_client).get_code(_request_timeout=CALL_TIMEOUT_S)
            await api.list_namespaced_pod(self._namespace, limit=1, _request_timeout=CALL_TIMEOUT_S)
        self._resizes = resizes(about.major, about.minor)
        if not self._resizes:
            log.warning(
                "this Kubernetes does not resize pods in place: cores stay as a pod was made", version=about.git_version
            )
        return f"kubernetes {about.git_version}"

    async def make(self, recipe: Recipe, name: str) -> PodVessel:
        """See `vessel.Host`. Returns once the pod runs, or has ended already."""
        api = await self._connected()
        pod = pod_of(recipe, name=name, owner=self._owner, runtime_class=self._runtime_class)
        try:
            with _failures(f"pod {name}"):
                await api.create_namespaced_pod(self._namespace, pod, _request_timeout=CALL_TIMEOUT_S)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._started(name)
            except BaseException:
                await self.remove(name)
                raise
        except VesselLost as lost:
            raise HostFailed(str(lost)) from lost
        except TimeoutError:
            raise HostFailed(f"pod {name} did not run within {START_TIMEOUT_S:g} s") from None
        return PodVessel(self, name)

    async def running(self) -> Sequence[PodVessel]:
        """See `vessel.Host`."""
        return [PodVessel(self, pod.metadata.name) for pod in await self._ours() if pod.status.phase == "Running"]

    async def sweep(self, kept: Collection[str]) -> int:
        """See `vessel.Host`."""
        swept = [pod.metadata.name for pod in await self._ours() if pod.metadata.name not in kept]
        for name in swept:
            await self.remove(name)
        return len(swept)

    async def close(self) -> None:
        """See `vessel.Host`."""
        for api in (self._api, self._streams):
            if api is not None:
                await api.api_client.close()

    async def attached(self, name: str) -> PodPipe:
        """A pipe to the pod's process 1. Not `exec`, which would be a process that foreign code in the pod can reach.

        Raises VesselLost, with the last line that it has said, where it has ended.
        """
        await self._connected()
        assert self._streams is not None
        if not (await self.ending(name)).runs:
            raise VesselLost(await self._last_words(name))
        with _failures(f"pod {name}"):
            opening = await self._streams.connect_get_namespaced_pod_attach(
                name, self._namespace, container=CONTAINER, stdin=True, stdout=True, stderr=True, tty=False,
                _preload_content=False,
            )  # fmt: skip
            return PodPipe(await opening)

    async def resize(self, name: str, cpu_cores: int) -> None:
        """Have the kubelet change the pod's limit of cores. It does so soon; nobody waits for it."""
        if not self._resizes:
            return
        api = await self._connected()
        with _failures(f"pod {name}"):
            await api.patch_namespaced_pod_resize(
                name, self._namespace, resized(cpu_cores), _request_timeout=CALL_TIMEOUT_S
            )

    async def ending(self, name: str) -> Ending:
        """How it stands with a pod."""
        api = await self._connected()
        try:
            with _failures(f"pod {name}"):
                pod = await api.read_namespaced_pod(name, self._namespace, _request_timeout=CALL_TIMEOUT_S)
        except VesselLost:
            return Ending()
        for status in pod.status.container_statuses or ():
            if status.state.terminated is not None:
                ended = status.state.terminated
                return Ending(exit_code=ended.exit_code, out_of_memory=ended.reason == "OOMKilled")
        return Ending(runs=pod.status.phase == "Running")

    async def remove(self, name: str) -> None:
        """Kill and delete it."""
        api = await self._connected()
        with contextlib.suppress(VesselLost), _failures(f"pod {name}"):
            await api.delete_namespaced_pod(
                name, self._namespace, grace_period_seconds=0, _request_timeout=CALL_TIMEOUT_S
            )

    async def _started(self, name: str) -> None:
        api, pause_s = await self._connected(), LOOK_PAUSE_S
        while True:
            with _failures(f"pod {name}"):
                pod = await api.read_namespaced_pod(name, self._namespace, _request_timeout=CALL_TIMEOUT_S)
            if pod.status.phase in ("Running", "Succeeded", "Failed"):
                return
            for status in pod.status.container_statuses or ():
                waiting = status.state.waiting
                if waiting is not None and waiting.reason in HOPELESS:
                    raise HostFailed(f"pod {name}: {waiting.reason}: {waiting.message or ''}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_PAUSE_S)

    async def _last_words(self, name: str) -> str:
        api = await self._connected()
        try:
            with _failures(f"pod {name}"):
                said = await api.read_namespaced_pod_log(
                    name, self._namespace, tail_lines=LOG_LINES, _request_timeout=CALL_TIMEOUT_S
                )
        except VesselLost as lost:
            return str(lost)
        lines = str(said).strip().splitlines()
        return lines[-1] if lines else f"pod {name} has ended"

    async def _ours(self) -> Sequence[Any]:
        api = await self._connected()
        with _failures("the API server"):
            found = await api.list_namespaced_pod(
                self._namespace, label_selector=f"{OWNER}={label(self._owner)}", _request_timeout=CALL_TIMEOUT_S
            )
        return list(found.items)

    async def _connected(self) -> Any:
        if self._api is None:
            settings: Any = client.Configuration()
            settings.connection_pool_maxsize = None  # a connection for each pod that is attached
            try:
                if IN_CLUSTER in os.environ:
                    config.load_incluster_config(client_configuration=settings)
                else:
                    await config.load_kube_config(client_configuration=settings)
            except (ConfigException, OSError) as error:
                raise HostFailed(f"no cluster is known ({error})") from error
            self._namespace = self._namespace or own_namespace()
            self._api = client.CoreV1Api(client.ApiClient(settings))
            self._streams = client.CoreV1Api(WsApiClient(settings))
        return self._api


def own_namespace() -> str:
    """Of this pod; outside of one, the API's default."""
    return OWN_NAMESPACE.read_text().strip() if OWN_NAMESPACE.exists() else "default"


def resizes(major: str, minor: str) -> bool:
    """Whether servers of a version resize pods in place unasked. minor: as they tell it, such as "33+"."""
    digits = re.match(r"\d+", minor)
    return int(major) > 1 or (digits is not None and int(digits[0]) >= RESIZE_MINOR)


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    """The API's failures in our own words."""
    try:
        yield
    except ApiException as error:
        if error.status == 404:
            raise VesselLost(f"{what}: {_reason(error)}") from error
        raise HostFailed(f"{what}: {error.status} {_reason(error)}") from error
    except aiohttp.WSServerHandshakeError as error:
        if error.status == 404:
            raise VesselLost(f"{what}: it is gone") from error
        raise HostFailed(f"{what}: {error.status} {error.message}") from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise HostFailed(f"{what} does not answer ({str(error) or type(error).__name__})") from error


def _reason(error: ApiException) -> str:
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(error.body or b"")["message"])
    return str(error.reason)
