"""Run pods on a Kubernetes cluster, which chooses the node and caches images.

This module owns the connection to the API server. A pod obeys Kubernetes' `restricted` security
standard, and a little more; its label names its owner, who finds it again by that. Its
specification cannot limit processes (the kubelet has one limit for all pods, `podPidsLimit`) nor
refuse a network (a NetworkPolicy does, by the label `treadle.tools/network`, on clusters that
enforce policies). The cores of each action are set by in-place resize where the server has it (on
by default from 1.33, stable from 1.35): the kubelet does so a little after the action's start, and
knows no core numbers.
"""

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import structlog
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config.config_exception import ConfigException
from kubernetes_asyncio.stream import WsApiClient
from tenacity import AsyncRetrying, retry_if_result, wait_exponential

from treadle_tools.sandbox.containers.hosts import (
    Allotment,
    ContainerLost,
    Ending,
    HostFailed,
    Pipe,
    Recipe,
)
from treadle_tools.sandbox.sandboxes import NOBODY, VARIABLES

log = structlog.get_logger()

OWNER, TOOL, NETWORK = "treadle.tools/owner", "treadle.tools/tool", "treadle.tools/network"
NO_NETWORK = "none"
CONTAINER = "worker"
# What the cluster's scheduler counts for a container that mostly waits; the service itself
# schedules actions.
REQUESTED_CPU = "50m"
PIECE_BYTES = 32 * 1024  # of a message to a pod: what the kubelet itself sends at a time
STDIN, STDOUT, STDERR = 0, 1, 2
RESIZE_MINOR = 33  # of version 1: the first that resizes pods in place by default
START_TIMEOUT_S = 120.0  # an image may have to be fetched first
UNTIL_STARTED = AsyncRetrying(
    retry=retry_if_result(lambda started: not started),
    wait=wait_exponential(multiplier=0.2, max=2.0),  # seconds between two looks at a pod
)
CALL_TIMEOUT_S = 60.0
LOG_LINES = 20
HOPELESS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
)
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def make_pod(recipe: Recipe, *, name: str, owner: str, runtime_class: str) -> dict[str, Any]:
    """Return the Pod object of a recipe, as the API takes it."""
    memory = str(recipe.memory_bytes)
    user = {"runAsNonRoot": True, "runAsUser": NOBODY, "runAsGroup": NOBODY, "fsGroup": NOBODY}
    security = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    limits = {"cpu": str(recipe.tool.limits.cpu_cores), "memory": memory}
    worker = {
        "name": CONTAINER,
        "image": recipe.image,
        "command": list(recipe.argv),
        "env": [{"name": name, "value": value} for name, value in VARIABLES.items()],
        "workingDir": "/tmp",
        "stdin": True,
        "stdinOnce": False,  # the input stays open for the service's next run
        "securityContext": security,
        "resources": {"requests": {"cpu": REQUESTED_CPU, "memory": memory}, "limits": limits},
        "resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "hostname": "sandbox",
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [worker],
        # In memory, because the kernel enforces its size; on disk the kubelet looks every few
        # minutes, and evicts.
        "volumes": [
            {
                "name": "tmp",
                "emptyDir": {"medium": "Memory", "sizeLimit": str(recipe.tool.work_bytes)},
            }
        ],
    }
    if runtime_class:
        spec["runtimeClassName"] = runtime_class
    labels = {
        "app.kubernetes.io/part-of": "treadle",
        "app.kubernetes.io/component": "tools-sandbox",
        OWNER: make_label(owner),
        TOOL: make_label(recipe.tool.name),
        NETWORK: make_label(recipe.tool.network) if recipe.tool.network else NO_NETWORK,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def make_label(text: str) -> str:
    """Make a label's value: letters, digits, '-', '_', '.', with a letter or digit first and
    last."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.")


class PodPipe:
    """A `Pipe` to a pod's init over a web socket; the first byte of a message names an input or
    output.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def write(self, data: bytes) -> None:
        try:
            for start in range(0, len(data), PIECE_BYTES):
                await self._socket.send_bytes(bytes([STDIN]) + data[start : start + PIECE_BYTES])
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise ConnectionError(str(error) or "the connection is gone") from error

    async def read(self) -> tuple[bool, bytes] | None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            while (message := await self._socket.receive()).type is aiohttp.WSMsgType.BINARY:
                channel, data = message.data[0], bytes(message.data[1:])
                if channel in (STDOUT, STDERR) and data:
                    return channel == STDERR, data
        return None

    async def close(self) -> None:
        await self._socket.close()


class KubernetesHost:
    """`Host` that is a Kubernetes cluster.

    namespace: of its pods; empty: the one of this pod, or "default". runtime_class: of its pods;
    empty: the cluster's default.
    """

    def __init__(self, *, owner: str, namespace: str = "", runtime_class: str = "") -> None:
        self.name = "kubernetes"
        self._owner = owner
        self._namespace = namespace
        self._runtime_class = runtime_class
        # CoreV1Api; the library's types are those of a client that is not asynchronous
        self._api: Any = None
        self._streams: Any = None
        self._resizes = False

    async def check(self) -> str:
        api = await self._connect()
        with _failures("the API server"):
            about = await client.VersionApi(api.api_client).get_code(
                _request_timeout=CALL_TIMEOUT_S
            )
            await api.list_namespaced_pod(self._namespace, limit=1, _request_timeout=CALL_TIMEOUT_S)
        self._resizes = can_resize(about.major, about.minor)
        if not self._resizes:
            why = "this Kubernetes does not resize pods in place: cores stay as a pod was made"
            log.warning(why, version=about.git_version)
        return f"kubernetes {about.git_version}"

    async def make(self, recipe: Recipe, name: str) -> None:
        """Make a pod and wait until it runs, or has ended; leave nothing of it where this fails."""
        pod = make_pod(recipe, name=name, owner=self._owner, runtime_class=self._runtime_class)
        try:
            await self._call(f"pod {name}", "create_namespaced_pod", body=pod)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await UNTIL_STARTED.copy()(self._has_started, name)
            except BaseException:
                await self.remove(name)
                raise
        except ContainerLost as lost:
            raise HostFailed(str(lost)) from lost
        except TimeoutError:
            raise HostFailed(f"pod {name} did not run within {START_TIMEOUT_S:g} s") from None

    async def attach(self, name: str) -> Pipe:
        """Return a pipe to a pod.

        This does not use `exec`, which would start a process that foreign code in the pod can
        reach. A pod that has ended raises ContainerLost with the last line of its output.
        """
        await self._connect()
        if not (await self.ending(name)).runs:
            raise ContainerLost(await self._read_last_line(name))
        with _failures(f"pod {name}"):
            opening = await self._streams.connect_get_namespaced_pod_attach(
                name,
                self._namespace,
                container=CONTAINER,
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
            )
            return PodPipe(await opening)

    async def allot(self, name: str, allotment: Allotment) -> None:
        """Have the kubelet change a pod's limit of cores, without waiting until it has.

        The pod keeps the memory that it was made with, and its resource requests, so that the
        cluster's scheduler has nothing to decide.
        """
        if self._resizes:
            limits = {"limits": {"cpu": str(allotment.cpu_cores)}}
            patch = {"spec": {"containers": [{"name": CONTAINER, "resources": limits}]}}
            await self._call_pod("patch_namespaced_pod_resize", name, body=patch)

    async def ending(self, name: str) -> Ending:
        try:
            pod = await self._call_pod("read_namespaced_pod", name)
        except ContainerLost:
            return Ending()
        for status in pod.status.container_statuses or ():
            if (ended := status.state.terminated) is not None:
                return Ending(exit_code=ended.exit_code, out_of_memory=ended.reason == "OOMKilled")
        return Ending(runs=pod.status.phase == "Running")

    async def remove(self, name: str) -> None:
        with contextlib.suppress(ContainerLost):
            await self._call_pod("delete_namespaced_pod", name, grace_period_seconds=0)

    async def list_names(self, *, running: bool = False) -> Sequence[str]:
        owned = f"{OWNER}={make_label(self._owner)}"
        found = await self._call("the API server", "list_namespaced_pod", label_selector=owned)
        return [
            pod.metadata.name for pod in found.items if not running or pod.status.phase == "Running"
        ]

    async def close(self) -> None:
        for api in (self._api, self._streams):
            if api is not None:
                await api.api_client.close()

    async def _has_started(self, name: str) -> bool:
        """Return whether a pod runs, or has ended. Raises HostFailed where it will never run."""
        pod = await self._call_pod("read_namespaced_pod", name)
        if pod.status.phase in ("Running", "Succeeded", "Failed"):
            return True
        for status in pod.status.container_statuses or ():
            if (waiting := status.state.waiting) is not None and waiting.reason in HOPELESS:
                raise HostFailed(f"pod {name}: {waiting.reason}: {waiting.message or ''}")
        return False

    async def _read_last_line(self, name: str) -> str:
        try:
            output = await self._call_pod("read_namespaced_pod_log", name, tail_lines=LOG_LINES)
        except ContainerLost as lost:
            return str(lost)
        lines = str(output).strip().splitlines()
        return lines[-1] if lines else f"pod {name} has ended"

    async def _call_pod(self, method: str, name: str, **arguments: Any) -> Any:
        return await self._call(f"pod {name}", method, name=name, **arguments)

    async def _call(self, what: str, method: str, **arguments: Any) -> Any:
        """Call a method of the API in this namespace.

        what: what the caller does, for the message of HostFailed or ContainerLost.
        """
        api = await self._connect()
        with _failures(what):
            return await getattr(api, method)(
                namespace=self._namespace, _request_timeout=CALL_TIMEOUT_S, **arguments
            )

    async def _connect(self) -> Any:
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
            self._namespace = self._namespace or _own_namespace()
            self._api = client.CoreV1Api(client.ApiClient(settings))
            self._streams = client.CoreV1Api(WsApiClient(settings))
        return self._api


def _own_namespace() -> str:
    """Return the namespace of this pod; outside of a pod, the API's default."""
    return OWN_NAMESPACE.read_text().strip() if OWN_NAMESPACE.exists() else "default"


def can_resize(major: str, minor: str) -> bool:
    """Return whether servers of a version resize pods in place by default.

    minor: as the server reports it, such as "33+".
    """
    digits = re.match(r"\d+", minor)
    return int(major) > 1 or (digits is not None and int(digits[0]) >= RESIZE_MINOR)


@contextlib.contextmanager
def _failures(what: str) -> Iterator[None]:
    """Raise failures of the API as ContainerLost or HostFailed."""
    try:
        yield
    except ApiException as error:
        if error.status == 404:
            raise ContainerLost(f"{what}: {_reason(error)}") from error
        raise HostFailed(f"{what}: {error.status} {_reason(error)}") from error
    except aiohttp.WSServerHandshakeError as error:
        if error.status == 404:
            raise ContainerLost(f"{what}: it is gone") from error
        raise HostFailed(f"{what}: {error.status} {error.message}") from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise HostFailed(
            f"{what} does not answer ({str(error) or type(error).__name__})"
        ) from error


def _reason(error: ApiException) -> str:
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return str(json.loads(error.body or b"")["message"])
    return str(error.reason)
