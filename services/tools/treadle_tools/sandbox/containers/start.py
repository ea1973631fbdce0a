"""Starts a fleet of containers from the settings, or says what is missing.

The libraries of Docker and Kubernetes are imported only where they are asked for.
"""

from collections.abc import Sequence
from pathlib import Path

import structlog

from treadle_tools.config import ToolsSettings
from treadle_tools.sandbox.containers.fleet import Fleet, Ware, default_owner
from treadle_tools.sandbox.containers.hosts import Hosts
from treadle_tools.sandbox.containers.ledger import Ledger
from treadle_tools.sandbox.containers.recipe import Host, HostFailed, recipe_of
from treadle_tools.sandbox.keeper.folder import StateFolder
from treadle_tools.tool import Tool

log = structlog.get_logger()

SILENCE_GRACE_S = 600.0  # over what a session may be idle: a container must not end before it is closed
NO_IMAGE = "no image: set TREADLE_TOOLS_IMAGE to one with Python 3.11 or later and what the tools import"


class BackendMissing(Exception):  # noqa: N818 - a state of the machine more than an error
    """There is no such backend here; the message says why and what to do."""


async def start_fleet(kind: str, settings: ToolsSettings, tools: Sequence[Tool]) -> tuple[Fleet, str]:
    """The containers of `tools` on a backend, "docker" or "kubernetes", and its version.

    Raises BackendMissing, FolderRefused (the state folder is another service's).
    """
    if not settings.image and not all(tool.image for tool in tools):
        raise BackendMissing(NO_IMAGE)
    owner = settings.owner or default_owner(settings.listen)
    hosts = _docker(settings, owner) if kind == "docker" else _kubernetes(settings, owner)
    version = await _checked(kind, hosts)
    wares, failures = [], {}
    silence_s = settings.session_idle_s + settings.keep_s + SILENCE_GRACE_S
    for tool in tools:
        try:
            recipe = recipe_of(
                tool,
                image=settings.image,
                code_in_image=settings.code_in_image or kind == "kubernetes",
                silence_s=silence_s,
            )
        except ModuleNotFoundError as error:
            log.error("a tool cannot be started", tool=tool.name, error=str(error))
            failures[tool.name] = str(error)
        else:
            wares.append(Ware(recipe, tool.limits))
    folder = StateFolder.take(ledger_folder(settings.state_folder, kind))
    fleet = Fleet(
        Hosts(hosts),
        Ledger(folder.path),
        wares,
        owner=owner,
        spares=settings.warm_sandboxes,
        failures=failures,
        keep_on_exit=settings.keep_on_exit,
        release=lambda: folder.release(keep=settings.keep_on_exit),
    )
    await fleet.connect()
    return fleet, version


def ledger_folder(state_folder: Path, kind: str) -> Path:
    """Beside the keeper's, which that one removes."""
    return state_folder.with_name(f"{state_folder.name}-{kind}")


async def _checked(kind: str, hosts: Sequence[Host]) -> str:
    """The version of the first host that answers; those that do not are tried again when they are needed."""
    versions, problems = [], []
    for host in hosts:
        try:
            versions.append(await host.check())
        except HostFailed as failure:
            problems.append(str(failure))
            log.error("a host of containers does not answer", host=host.name, error=str(failure))
    if not versions:
        for host in hosts:
            await host.close()
        what = "start the Docker daemon, or set TREADLE_TOOLS_DOCKER_HOSTS"
        if kind == "kubernetes":
            what = "run in a pod whose service account may make pods (k8s/components/tools-pods), or set KUBECONFIG"
        raise BackendMissing(f"{'; '.join(problems)}: {what}")
    return versions[0]


def _docker(settings: ToolsSettings, owner: str) -> Sequence[Host]:
    try:
        from treadle_tools.sandbox.containers.docker import DockerHost
    except ModuleNotFoundError as error:
        raise BackendMissing(f"{error}: pip install aiodocker") from error
    return [
        DockerHost(url, owner=owner, mirror=settings.docker_mirror, tls=settings.docker_tls)
        for url in settings.docker_hosts
    ]


def _kubernetes(settings: ToolsSettings, owner: str) -> Sequence[Host]:
    try:
        from treadle_tools.sandbox.containers.kubernetes import KubernetesHost
    except ModuleNotFoundError as error:
        raise BackendMissing(f"{error}: pip install kubernetes-asyncio") from error
    namespace, runtime_class = settings.kubernetes_namespace, settings.kubernetes_runtime_class
    return [KubernetesHost(owner=owner, namespace=namespace, runtime_class=runtime_class)]
