"""Start the backends that the tools need, and find the backend of each tool.

Invariant: no tool runs outside a sandbox. A backend that is missing is missing for its own tools
only: their calls are refused with what to do, and the service starts all the same. Libraries of
Docker and Kubernetes are imported on demand.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog
from treadle_runtime.errors import FailedPrecondition, StartError

from treadle_tools.config import ToolsSettings
from treadle_tools.sandbox.bubblewrap import BubblewrapMissing, find_bubblewrap
from treadle_tools.sandbox.containers.fleet import Fleet, default_owner
from treadle_tools.sandbox.containers.hosts import Host, HostFailed, Hosts, Recipe
from treadle_tools.sandbox.daemon_client import DaemonClient, DaemonFailed
from treadle_tools.sandbox.sandboxes import Backend
from treadle_tools.sandbox.state_folder import FolderRefused, StateFolder
from treadle_tools.tool import Kind, Tool

log = structlog.get_logger()

BUBBLEWRAP = "bubblewrap"
# Over what a session may be idle: a container must not end before its session is closed
SILENCE_GRACE_S = 600.0
NO_IMAGE = (
    "no image: set TREADLE_TOOLS_IMAGE to one with Python 3.11 or later and what the tools import"
)
REMEDIES = {
    "docker": "start the Docker daemon, or set TREADLE_TOOLS_DOCKER_HOSTS",
    "kubernetes": "run in a pod whose service account may make pods (k8s/components/tools-pods), "
    "or set KUBECONFIG",
}


class BackendMissing(Exception):  # noqa: N818 - a state of the machine more than an error
    """There is no such backend here; the message gives the reason and the remedy."""


@dataclass
class Backends:
    """Started backends, and which backend each tool runs on.

    of_tool: the name of each tool's backend.

    started: backends by name, and versions: theirs. missing: why others are not started.
    """

    of_tool: Mapping[str, str]
    started: dict[str, Backend] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    versions: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Backend]:
        return iter(self.started.values())

    def require(self, tool: Tool) -> Backend:
        """Return the backend of `tool`.

        Raises FailedPrecondition SANDBOX_UNAVAILABLE where it is missing.
        """
        name = self.of_tool[tool.name]
        if name not in self.started:
            raise FailedPrecondition(
                "SANDBOX_UNAVAILABLE",
                f"tools run in a sandbox only: {self.missing[name]}; then start the service again",
            )
        return self.started[name]


async def start_backends(settings: ToolsSettings, registered: Iterable[Tool]) -> Backends:
    """Start each backend that some tool runs on.

    Raises StartError where a state folder cannot be used.
    """
    here = [tool for tool in registered if tool.remote is None]
    of_tool = {tool.name: tool.backend or settings.backend for tool in here}
    backends = Backends(of_tool)
    for name in dict.fromkeys(of_tool.values()):
        tools = [tool for tool in here if of_tool[tool.name] == name]
        start = (
            _start_daemon(settings, tools)
            if name == BUBBLEWRAP
            else _start_fleet(name, settings, tools)
        )
        try:
            backends.started[name], version = await start
        except (BubblewrapMissing, BackendMissing) as why:
            log.error(
                "no sandbox: every call of these tools will be refused", backend=name, why=str(why)
            )
            backends.missing[name] = str(why)
        except (FolderRefused, DaemonFailed) as refused:
            raise StartError(
                f"TREADLE_TOOLS_STATE_DIR={settings.state_dir!r}: {refused}"
            ) from refused
        else:
            backends.versions.append(version)
            log.info("sandbox", backend=version, sessions=len(backends.started[name].found))
    return backends


def _folder_of(backend: str, settings: ToolsSettings) -> Path:
    """Return the state folder of a backend.

    The folders of containers stand beside the daemon's, because the daemon removes its own.
    """
    folder = settings.state_folder
    return folder if backend == BUBBLEWRAP else folder.with_name(f"{folder.name}-{backend}")


R = TypeVar("R")


def _make_recipes(
    tools: Sequence[Tool], make: Callable[[Tool], R]
) -> tuple[list[R], dict[str, str]]:
    """Return the recipes of those tools whose modules are here, and why the others have none."""
    recipes, failures = [], {}
    for tool in tools:
        try:
            recipes.append(make(tool))
        except ModuleNotFoundError as error:
            log.error("a tool cannot be started", tool=tool.name, error=str(error))
            failures[tool.name] = str(error)
    return recipes, failures


async def _start_daemon(settings: ToolsSettings, tools: Sequence[Tool]) -> tuple[DaemonClient, str]:
    """Start a client of the sandbox daemon; return it and bubblewrap's version.

    Raises BubblewrapMissing, FolderRefused, DaemonFailed.
    """
    bubblewrap = find_bubblewrap(settings.bwrap)
    recipes, failures = _make_recipes(tools, bubblewrap.recipe)
    client = DaemonClient(
        StateFolder.take(settings.state_folder),
        recipes,
        failures,
        warm=settings.warm_sandboxes,
        cgroups=settings.cgroups == "auto",
        keep_s=settings.keep_s,
        keep_on_exit=settings.keep_on_exit,
        lazy=frozenset(tool.name for tool in tools if tool.kind is Kind.REWARD),
    )
    await client.connect()
    cgroups = client.root and client.root.version
    log.info("bubblewrap", user=bubblewrap.user, drop_root=bubblewrap.drop_root, cgroups=cgroups)
    return client, f"{BUBBLEWRAP} {bubblewrap.version}"


async def _start_fleet(
    kind: str, settings: ToolsSettings, tools: Sequence[Tool]
) -> tuple[Fleet, str]:
    """Start a fleet of containers on "docker" or "kubernetes"; return it and the host's version.

    Raises BackendMissing, FolderRefused.
    """
    if not settings.image and not all(tool.image for tool in tools):
        raise BackendMissing(NO_IMAGE)
    owner = settings.owner or default_owner(settings.listen)
    hosts = _find_hosts(kind, settings, owner)
    version = await _check(kind, hosts)

    def make(tool: Tool) -> Recipe:
        code_in_image = settings.code_in_image or kind == "kubernetes"
        silence_s = settings.session_idle_s + settings.keep_s + SILENCE_GRACE_S
        return Recipe.for_tool(
            tool, image=settings.image, code_in_image=code_in_image, silence_s=silence_s
        )

    recipes, failures = _make_recipes(tools, make)
    fleet = Fleet(
        Hosts(hosts),
        StateFolder.take(_folder_of(kind, settings)),
        recipes,
        failures,
        owner=owner,
        warm=settings.warm_sandboxes,
        keep_on_exit=settings.keep_on_exit,
    )
    await fleet.connect()
    return fleet, version


def _find_hosts(kind: str, settings: ToolsSettings, owner: str) -> Sequence[Host]:
    """Return the hosts that the settings name.

    Raises BackendMissing without the library that talks to them.
    """
    try:
        if kind == "docker":
            from treadle_tools.sandbox.containers.docker import DockerHost

            mirror, tls = settings.docker_mirror, settings.docker_tls
            return [
                DockerHost(url, owner=owner, mirror=mirror, tls=tls)
                for url in settings.docker_hosts
            ]
        from treadle_tools.sandbox.containers.kubernetes import KubernetesHost
    except ModuleNotFoundError as error:
        library = "aiodocker" if kind == "docker" else "kubernetes-asyncio"
        raise BackendMissing(f"{error}: pip install {library}") from error
    namespace, runtime_class = settings.kubernetes_namespace, settings.kubernetes_runtime_class
    return [KubernetesHost(owner=owner, namespace=namespace, runtime_class=runtime_class)]


async def _check(kind: str, hosts: Sequence[Host]) -> str:
    """Return the version of the first host that answers; others are checked when they are needed.

    Raises BackendMissing.
    """
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
        raise BackendMissing(f"{'; '.join(problems)}: {REMEDIES[kind]}")
    return versions[0]
