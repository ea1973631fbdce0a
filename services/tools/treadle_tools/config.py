"""Read the settings of the tools service once, from TREADLE_TOOLS_<NAME>."""

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from treadle_runtime.config import Settings

from treadle_tools.builtin import TOOLS
from treadle_tools.rewards import REWARDS
from treadle_tools.tool import Tool


def _split(text: Any) -> Any:
    return tuple(filter(None, map(str.strip, text.split(",")))) if isinstance(text, str) else text


def _each(is_valid: Callable[[str], bool], expected: str) -> AfterValidator:
    def check(names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(map(is_valid, names)):
            raise ValueError(expected)
        return names

    return AfterValidator(check)


def _names_of(tools: Iterable[Tool]) -> AfterValidator:
    known = [tool.name for tool in tools]
    return _each(known.__contains__, f"names out of {','.join(known)} separated by commas")


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]  # separated by commas
ModuleNames = Annotated[
    Names,
    _each(
        lambda name: all(part.isidentifier() for part in name.split(".")),
        "Python module names separated by commas, e.g. my_tools,other.tools",
    ),
]
NetworkNames = Annotated[
    Names,
    _each(
        lambda name: name not in ("host", "none") and ":" not in name,
        "names of networks made for tools; not host, nor another container's",
    ),
]
DockerHosts = Annotated[
    Names,
    Field(min_length=1),
    _each(
        lambda name: name.startswith(("unix:///", "tcp://")),
        "addresses such as unix:///var/run/docker.sock or tcp://10.0.0.7:2376, by commas",
    ),
]


class ToolsSettings(Settings):
    """Settings of the tools service.

    Seconds, counts and bytes are in the names.
    """

    service: ClassVar[str] = "tools"

    listen: str = "127.0.0.1:7405"
    # A path or a name; see `locate_bubblewrap`
    bwrap: Annotated[str, Field(min_length=1)] = "bwrap"
    # which of the tools that come with the service are on
    builtin: Annotated[Names, _names_of(TOOLS)] = tuple(tool.name for tool in TOOLS)
    functions: str = ""  # a file, TOML or JSON, of HTTP functions that are tools or rewards
    # Where they may be: hosts, host:port or *.domain, separated by commas
    function_hosts: Names = ()
    modules: ModuleNames = ()  # Python modules with a list TOOLS, separated by commas
    # That actions may use at a time; 0: all this process may run on
    cores: int = Field(default=0, ge=0)
    # auto: an action runs on cores of its own, where control groups can pin it
    pin: Literal["auto", "off"] = "auto"
    memory_bytes: int = Field(default=0, ge=0)  # for what tools reserve; 0: all of the machine's
    providers_file: str = ""  # TOML or JSON: the providers that tools call, and what they allow
    max_waiting: int = Field(default=2048, ge=0)  # actions that may wait for their turn
    max_sessions: int = Field(default=256, ge=1)  # open at a time
    session_idle_s: float = Field(default=1800.0, gt=0)  # until an unused session is closed
    # Which of them are on
    rewards: Annotated[Names, _names_of(REWARDS)] = tuple(reward.name for reward in REWARDS)
    # Rewards in the sandbox at a time; 0: as many as cores
    reward_slots: int = Field(default=0, ge=0)
    max_rewards: int = Field(default=65_536, ge=1)  # that may wait
    # How long a reward that has ended is kept for its callers
    reward_kept_s: float = Field(default=3600.0, gt=0)
    warm_sandboxes: int = Field(default=2, ge=1)  # per tool
    # That wait for the next call of the trajectory that used them
    reused_sandboxes: int = Field(default=64, ge=0)
    reused_sandbox_s: float = Field(default=60.0, gt=0)  # how long they wait
    # Where the sandbox daemon is found again; empty: a folder named after `listen`
    state_dir: str = ""
    keep_s: float = Field(default=60.0, ge=0)  # that sessions wait for the service to come back
    keep_on_exit: bool = False  # also after an orderly end
    backend: Literal["bubblewrap", "docker", "kubernetes"] = "bubblewrap"  # of tools that name none
    image: str = ""  # of containers, for tools that name none
    # Containers show the worker's code from here, or their image has it
    code_in_image: bool = False
    # That tools may name, separated by commas; a container that names none has none
    networks: NetworkNames = ()
    owner: str = ""  # whose containers they are; empty: this machine's at this port
    docker_hosts: DockerHosts = ("unix:///var/run/docker.sock",)  # daemons, separated by commas
    docker_tls: str = ""  # a folder with ca.pem, cert.pem and key.pem, for tcp:// daemons
    docker_mirror: str = ""  # a registry that has the images too, and is tried first
    kubernetes_namespace: str = ""  # empty: the one of this pod, else "default"
    kubernetes_runtime_class: str = ""  # of the pods, such as one for gVisor or Kata Containers
    cgroups: Literal["auto", "off"] = "auto"  # off: memory is watched from outside

    @property
    def builtin_tools(self) -> tuple[Tool, ...]:
        """Return the tools and rewards that are on, in the order of TOOLS and REWARDS."""
        return tuple(
            tool for tool in (*TOOLS, *REWARDS) if tool.name in {*self.builtin, *self.rewards}
        )

    @property
    def state_folder(self) -> Path:
        """Return `state_dir`, or a folder of the user's for this address; where the port is not
        fixed, for this process."""
        if self.state_dir:
            return Path(self.state_dir)
        address = self.listen.replace(":", "-").replace("/", "-")
        owner = f"pid-{os.getpid()}" if self.listen.endswith(":0") else address
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        if runtime:
            return Path(runtime) / f"treadle-tools-{owner}"
        return Path(tempfile.gettempdir()) / f"treadle-tools-{os.geteuid()}-{owner}"
