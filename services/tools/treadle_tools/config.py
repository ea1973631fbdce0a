"""Settings of the tools service: TREADLE_TOOLS_*."""

import os
import tempfile
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from treadle_runtime.config import Settings

from treadle_tools.builtin import TOOLS
from treadle_tools.builtin_rewards import REWARDS
from treadle_tools.tool import Tool


class ToolsSettings(Settings):
    """Seconds, counts and bytes are in the names."""

    service: ClassVar[str] = "tools"

    listen: str = "127.0.0.1:7405"
    bwrap: str = "bwrap"  # a path, or a name that is looked up on PATH
    builtin: str = ",".join(tool.name for tool in TOOLS)  # which of the tools that come with the service are on
    functions: str = ""  # a file, TOML or JSON, of HTTP functions that are tools or rewards
    function_hosts: str = ""  # where they may be: hosts, host:port or *.domain, separated by commas
    modules: str = ""  # Python modules with a list TOOLS, separated by commas
    cores: int = Field(default=0, ge=0)  # that actions may use at a time; 0: all this process may run on
    pin: Literal["auto", "off"] = "auto"  # auto: an action runs on cores of its own, where control groups can say so
    memory_bytes: int = Field(default=0, ge=0)  # for what tools reserve; 0: all of the machine's
    providers_file: str = ""  # TOML or JSON: the providers that tools call, and what they allow
    max_waiting: int = Field(default=2048, ge=0)  # actions that may wait for their turn
    max_sessions: int = Field(default=256, ge=1)  # open at a time
    session_idle_s: float = Field(default=1800.0, gt=0)  # until an unused session is closed
    max_snapshots: int = Field(default=64, ge=0)  # kept at a time
    snapshot_kept_s: float = Field(default=1800.0, gt=0)  # until a snapshot is dropped
    rewards: str = ",".join(reward.name for reward in REWARDS)  # which of the built-in rewards are on
    reward_slots: int = Field(default=0, ge=0)  # rewards in the sandbox at a time; 0: as many as cores
    max_rewards: int = Field(default=65_536, ge=1)  # that may wait
    reward_kept_s: float = Field(default=3600.0, gt=0)  # how long a reward that has ended can be asked for
    warm_sandboxes: int = Field(default=2, ge=1)  # per tool
    reused_sandboxes: int = Field(default=64, ge=0)  # that wait for the next call of the trajectory that used them
    reused_sandbox_s: float = Field(default=60.0, gt=0)  # how long they wait
    state_dir: str = ""  # where the sandbox daemon is found again; empty: a folder named after `listen`
    keep_s: float = Field(default=60.0, ge=0)  # that sessions wait for the service to come back
    keep_on_exit: bool = False  # also after an orderly end
    backend: Literal["bubblewrap", "docker", "kubernetes"] = "bubblewrap"  # of tools that name none
    image: str = ""  # of containers, for tools that name none
    code_in_image: bool = False  # containers show the worker's code from here, or their image has it
    networks: str = ""  # that tools may name, separated by commas; a container that names none has none
    owner: str = ""  # whose containers they are; empty: this machine's at this port
    docker_hosts: str = "unix:///var/run/docker.sock"  # daemons, separated by commas
    docker_tls: str = ""  # a folder with ca.pem, cert.pem and key.pem, for tcp:// daemons
    docker_mirror: str = ""  # a registry that has the images too, and is asked first
    kubernetes_namespace: str = ""  # empty: the one of this pod, else "default"
    kubernetes_runtime_class: str = ""  # of the pods, such as one for gVisor or Kata Containers
    cgroups: Literal["auto", "off"] = "auto"  # off: memory is watched from outside

    @field_validator("bwrap")
    @classmethod
    def _bwrap_is_named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("a program's path, or a name that is looked up on PATH")
        return value

    @field_validator("modules")
    @classmethod
    def _modules_are_names(cls, value: str) -> str:
        for name in _names(value):
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError("Python module names separated by commas, e.g. my_tools,other.tools")
        return value

    @field_validator("builtin")
    @classmethod
    def _builtin_are_tools(cls, value: str) -> str:
        known = [tool.name for tool in TOOLS]
        if not set(_names(value)) <= set(known):
            raise ValueError(f"names out of {','.join(known)} separated by commas")
        return value

    @field_validator("rewards")
    @classmethod
    def _rewards_are_rewards(cls, value: str) -> str:
        known = [reward.name for reward in REWARDS]
        if not set(_names(value)) <= set(known):
            raise ValueError(f"names out of {','.join(known)} separated by commas")
        return value

    @property
    def builtin_rewards(self) -> tuple[Tool, ...]:
        """`rewards`, one by one."""
        return tuple(reward for reward in REWARDS if reward.name in _names(self.rewards))

    @field_validator("docker_hosts")
    @classmethod
    def _docker_hosts_are_addresses(cls, value: str) -> str:
        if not _names(value) or not all(name.startswith(("unix:///", "tcp://")) for name in _names(value)):
            raise ValueError("addresses such as unix:///var/run/docker.sock or tcp://10.0.0.7:2376, by commas")
        return value

    @field_validator("networks")
    @classmethod
    def _networks_are_walls(cls, value: str) -> str:
        if any(name in ("host", "none") or ":" in name for name in _names(value)):
            raise ValueError("names of networks made for tools; not host, nor another container's")
        return value

    @property
    def docker_addresses(self) -> tuple[str, ...]:
        """`docker_hosts`, one by one."""
        return _names(self.docker_hosts)

    @property
    def network_names(self) -> tuple[str, ...]:
        """`networks`, one by one."""
        return _names(self.networks)

    @property
    def builtin_tools(self) -> tuple[Tool, ...]:
        """`builtin`, one by one."""
        return tuple(tool for tool in TOOLS if tool.name in _names(self.builtin))

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """`function_hosts`, one by one."""
        return _names(self.function_hosts)

    @property
    def module_names(self) -> tuple[str, ...]:
        """`modules`, one by one."""
        return _names(self.modules)

    @property
    def state_folder(self) -> Path:
        """`state_dir`, or a folder of the user's for this address; of this process, where the port is not fixed."""
        if self.state_dir:
            return Path(self.state_dir)
        address = self.listen.replace(":", "-").replace("/", "-")
        owner = f"pid-{os.getpid()}" if self.listen.endswith(":0") else address
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        if runtime:
            return Path(runtime) / f"treadle-tools-{owner}"
        return Path(tempfile.gettempdir()) / f"treadle-tools-{os.geteuid()}-{owner}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))
