"""Start NATS and the services of a mesh as child processes on the loopback interface.

All addresses are chosen before the first service starts, because the scheduler and the migrator
name each other. A service has started once it has written its ready file. Which variable a service
takes stands in its config.py; a wrong value ends the service with one line, which the caller sees.
"""

import asyncio
import contextlib
import functools
import json
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.table import Table
from treadle_runtime.config import DEFAULT_FACTS_BYTES
from treadle_runtime.fork_server import ForkServer

from treadle_cli.certs import DEFAULT_TENANT, NATS, nats_config
from treadle_cli.exits import UsageProblem, cell
from treadle_cli.mesh.checks import nats_server
from treadle_cli.mesh.engines import KEY_VARIABLE, EnginePlan, open_engine_forks
from treadle_cli.mesh.processes import HOST, Child, Ports, ProcessTree, is_free
from treadle_cli.options import write_private

START_TIMEOUT_S = (
    300.0  # about 2 s; a first start compiles for a minute, while engines load on the same cores
)
DRAIN_GRACE_S = 1.0  # when the tree stops, no other client waits for a call in flight
LEASE_TTL_S = 4.0  # shorter than the default, which is made for networks
STAGE = 2  # stopped first
NATS_STAGE = 0  # stopped last: services drain into it
NATS_TIMEOUT_S = 20.0  # it takes 10 ms; a busy disk may delay it
# What JetStream reserves on the disk: the service's default, and its share of what is free. All of
# it must fit into 75% of what is free.
RESERVED = {
    "TREADLE_ROLLOUT_PAYLOAD_BYTES": (8 * 1024**3, 1 / 4),
    "TREADLE_FACTS_BYTES": (DEFAULT_FACTS_BYTES, 1 / 16),
}
# What each service is for, in the order of their ports.
SERVICES = {
    "scheduler": "the one address that a client needs",
    "predictor": "how much is left?",
    "placement": "where?",
    "migrator": "how does the KV get there?",
    "tools": "who runs the tool?",
    "rollout": "which trajectories are worth finishing?",
}
# Services that share a process and an event loop. The tools service runs foreign code, which may
# use all of a core.
TOGETHER = tuple(name for name in SERVICES if name != "tools")
CONTROL_PLANE = "control-plane"  # the name of that process
# Modules that a fork server imports for a mesh: the services share most of what they import.
SERVICE_MODULES = tuple(
    f"treadle_{name}.wire" for name in (*SERVICES, "gateway", "sidecar", "console")
)
RESOURCES = "resources"  # `treadle up` itself answers there
GATEWAY, HTTP = "gateway", "http"  # one process: gRPC for its health, and HTTP for frameworks
GATEWAY_PURPOSE = "SGLang's and OpenAI's HTTP, for any framework"
GATEWAY_FOLDER = (
    f"{GATEWAY}-{DEFAULT_TENANT}"  # folder of its certificate: it calls as a trainer of a tenant
)
API_KEY = "TREADLE_GATEWAY_API_KEY"
LOGIN_TOKEN = "TREADLE_CONSOLE_LOGIN_TOKEN"
TOKEN_BYTES = 16  # of what a terminal shows: nobody guesses 128 random bits
NATS_USER = "treadle"  # of a NATS without certificates
CONSOLE = "console"
CONSOLE_PURPOSE = "what the mesh does, in a browser"
CONSOLE_PORT_OFFSET = -1  # how far the port of its page is from the scheduler's
# from the scheduler's port on, and then the sidecars
IN_PORT_ORDER = (*SERVICES, RESOURCES, GATEWAY, HTTP)


@dataclass(frozen=True)
class Access:
    """How callers reach what is not gRPC. nats_url, page: with the password of NATS and the token
    of the console. front_door: the gateway's URL. api_key: what it requires. All but the first may
    be empty: there is none."""

    nats_url: str
    front_door: str = ""
    page: str = ""
    api_key: str = ""

    def lines(self) -> list[str]:
        """Return lines for a terminal that name what callers must present."""
        found = [f"Console: {self.page}"] if self.page else []
        if self.api_key:
            found.append(f"Gateway: Authorization: Bearer {self.api_key}")
        if urlsplit(self.nats_url).password:
            found.append(f"NATS: export TREADLE_NATS_URL={self.nats_url}")
        return found


@dataclass(frozen=True)
class Addresses:
    """Addresses (host:port) of the services of one mesh, by name; sidecars by engine id, of the
    engines that it starts with. resources: where this process takes resource plans; empty: it takes
    none. gateway, http: of the gateway, for its health and for frameworks; empty: there is none."""

    services: Mapping[str, str]
    sidecars: Mapping[str, str]
    resources: str = ""
    gateway: str = ""
    http: str = ""

    @property
    def scheduler(self) -> str:
        """Return the one address that a client needs."""
        return self.services["scheduler"]

    def named(self, access: Access) -> dict[str, object]:
        """Return what --json prints once all serves, with what a caller must present."""
        found: dict[str, object] = {
            **self.services,
            "sidecars": dict(self.sidecars),
            "nats": access.nats_url,
        }
        more = {GATEWAY: access.front_door, CONSOLE: access.page, "api_key": access.api_key}
        return found | {name: value for name, value in more.items() if value}

    def table(self, access: Access, engines: Mapping[str, str]) -> Table:
        """Return the addresses for a terminal, with what each one is for. engines: what stands
        behind each sidecar, by engine id."""
        rows = [
            (name, self.services[name], SERVICES[name])
            for name in SERVICES
            if name in self.services
        ]
        rows += [
            (GATEWAY, access.front_door, GATEWAY_PURPOSE),
            (RESOURCES, self.resources, "with how many engines? (treadle apply)"),
            *((f"sidecar of {each}", at, engines[each]) for each, at in self.sidecars.items()),
            ("NATS", _without_user(access.nats_url), "facts and state"),
            (CONSOLE, access.page.partition("/?")[0], CONSOLE_PURPOSE),
        ]
        table = Table(
            "service", "address", "what for", box=None, pad_edge=False, padding=(0, 3, 0, 0)
        )
        for name, address, purpose in rows:
            if address:
                table.add_row(cell(name), cell(address), cell(purpose))
        return table


def _without_user(url: str) -> str:
    return re.sub("//.*@", "//", url)


def choose_addresses(ports: Ports, base_port: int, engine_ids: Sequence[str]) -> Addresses:
    """Return all addresses: the scheduler's at `base_port` of the ports' host and the others behind
    it, or all on free ports if it is 0. Raises UsageProblem."""
    names = [*IN_PORT_ORDER, *engine_ids]
    if base_port == 0:
        chosen = ports.choose(len(names))
    else:
        chosen = list(range(base_port, base_port + len(names)))
        taken = [str(port) for port in chosen if not is_free(port, ports.host)]
        if taken:
            raise UsageProblem(
                f"port {', '.join(taken)} is taken: another mesh runs? Pass --port 0 for free "
                "ones, or another --port."
            )
    hosts = dict(zip(names, [f"{ports.host}:{port}" for port in chosen], strict=True))
    return Addresses(
        {name: hosts[name] for name in SERVICES},
        {name: hosts[name] for name in engine_ids},
        *(hosts[name] for name in (RESOURCES, GATEWAY, HTTP)),
    )


class ControlPlane:
    """NATS, the services and the sidecars of one mesh, as children of `tree`; their files go to
    `folder`. lease_ttl_s: of engines. certificates: a folder of theirs (`authority`); None for
    plaintext. engine_key: what the engines require of their callers; empty: that of
    KEY_VARIABLE."""

    def __init__(
        self,
        tree: ProcessTree,
        where: Addresses,
        folder: Path,
        lease_ttl_s: float = LEASE_TTL_S,
        certificates: Path | None = None,
        engine_key: str = "",
    ) -> None:
        self._tree, self._where, self._folder, self._lease_ttl_s = tree, where, folder, lease_ttl_s
        self._certificates = certificates
        self._engine_key = engine_key or os.environ.get(KEY_VARIABLE, "")
        made = "" if certificates is None else secrets.token_urlsafe()
        self.api_key = os.environ.get(API_KEY) or made
        self._login_token = os.environ.get(LOGIN_TOKEN) or secrets.token_urlsafe(TOKEN_BYTES)
        self._children: dict[str, Child] = {}
        self.nats_url = ""

    async def start(self, *, together: Sequence[str] = TOGETHER) -> None:
        """Start NATS, then the services at once; return when all are ready. together: those that
        share a process."""
        await self.start_nats()
        async with asyncio.TaskGroup() as group:
            if together:
                group.create_task(self._start_together(together))
            for name in self._where.services:
                if name not in together:
                    group.create_task(self.start_service(name))

    async def start_nats(self) -> None:
        """Start NATS; at `nats_url` with what it had stored, where it has run before."""
        folder = self._folder / "nats"
        folder.mkdir(parents=True, exist_ok=True)
        at = urlsplit(self.nats_url)
        own = (self._certificates, at.hostname or HOST, at.password or "")
        child, self.nats_url = await start_nats(self._tree, folder, at.port, *own)
        self._children[child.name] = child

    async def start_service(self, name: str) -> None:
        """Start a service in a process of its own; once it has ended, again at the same address."""
        await self._start(name, name, self._where.services[name], self._own_settings(name))

    async def _start_together(self, names: Sequence[str]) -> None:
        """Start several services in one process."""
        variables: dict[str, str] = {}
        for name in names:
            variables |= self._variables(
                name, name, self._where.services[name], self._own_settings(name)
            )
        child = await self._tree.start_service(
            CONTROL_PLANE, "treadle_runtime.start", variables, arguments=names, stage=STAGE
        )
        for name in names:
            self._children[name] = child
            await read_ready_file(child, self._folder, self._ready_file(name).name, START_TIMEOUT_S)

    def _own_settings(self, name: str) -> Mapping[str, str]:
        peers = {
            f"TREADLE_SCHEDULER_{name.upper()}": address
            for name, address in self._where.services.items()
        }
        peers.pop("TREADLE_SCHEDULER_SCHEDULER")
        peers["TREADLE_SCHEDULER_RESOURCES"] = self._where.resources
        own = {
            "scheduler": {**peers, "TREADLE_SCHEDULER_LEASE_TTL_S": str(self._lease_ttl_s)},
            "migrator": {"TREADLE_MIGRATOR_SCHEDULER": self._where.scheduler},
            # Nobody restarts the service here, so its sandboxes end with it.
            "tools": {
                "TREADLE_TOOLS_STATE_DIR": str(self._folder / "tools"),
                "TREADLE_TOOLS_KEEP_S": "0",
            },
        }
        return own.get(name, {})

    def child(self, name: str) -> Child:
        """Return the process of "nats", of a service or of "sidecar-ENGINE_ID", as started last;
        services may share one."""
        return self._children[name]

    @functools.cached_property
    def _reserved(self) -> dict[str, str]:
        return reserve_space(self._folder)  # once: the free space shrinks as services start

    async def start_sidecar(self, engine_id: str, settings: Mapping[str, str]) -> Child:
        """Start the sidecar of one engine and return it when it is ready; `settings` are its own
        variables."""
        address = self._where.sidecars.get(engine_id) or f"{HOST}:{self._tree.ports.choose(1)[0]}"
        own = {
            "TREADLE_SIDECAR_SCHEDULER": self._where.scheduler,
            "TREADLE_SIDECAR_ENGINE_ID": engine_id,
            "TREADLE_SIDECAR_ENGINE_KEY": self._engine_key,
            **settings,
        }
        return await self._start(f"sidecar-{engine_id}", "sidecar", address, own)

    async def start_gateway(self, model_path: str) -> str:
        """Start the gateway, which takes `api_key` from callers, and return its URL. Texts need the
        model's tokenizer; a model that is no folder on this machine has none here, and token ids
        alone are served."""
        known = await asyncio.to_thread(Path(model_path, "tokenizer.json").is_file)
        own = {
            "TREADLE_GATEWAY_SCHEDULER": self._where.scheduler,
            "TREADLE_GATEWAY_HTTP_LISTEN": self._where.http,
            "TREADLE_GATEWAY_TOKENIZER": model_path if known else "",
            "TREADLE_GATEWAY_ENGINE_KEY": self._engine_key,
            API_KEY: self.api_key,
        }
        await self._start(GATEWAY, GATEWAY, self._where.gateway, own)
        return f"{'http' if self._certificates is None else 'https'}://{self._where.http}"

    async def start_console(self, base_port: int) -> str:
        """Start the console and return the URL of its page, with the token that a browser needs: at
        the port before the scheduler's, or another one where that is taken or `base_port` is 0."""
        preferred = base_port + CONSOLE_PORT_OFFSET
        chosen = preferred if base_port and is_free(preferred) else self._tree.ports.choose(1)[0]
        page = f"{HOST}:{chosen}"
        own = {
            "TREADLE_CONSOLE_SCHEDULER": self._where.scheduler,
            "TREADLE_CONSOLE_HTTP_LISTEN": page,
            LOGIN_TOKEN: self._login_token,
        }
        await self._start(CONSOLE, CONSOLE, f"{HOST}:0", own)
        return page_url(page, self._login_token)

    async def stop(self) -> None:
        """Stop the services, then NATS."""
        # services share a process, which gets one signal
        children = list(dict.fromkeys(self._children.values()))
        await self._tree.stop([child for child in children if child.stage == STAGE])
        await self._tree.stop(children)

    async def _start(self, name: str, service: str, address: str, own: Mapping[str, str]) -> Child:
        variables = self._variables(name, service, address, own)
        child = await self._tree.start_service(name, f"treadle_{service}", variables, stage=STAGE)
        self._children[name] = child
        await read_ready_file(child, self._folder, self._ready_file(name).name, START_TIMEOUT_S)
        return child

    def _variables(
        self, name: str, service: str, address: str, own: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the settings of a service that listens at `address`. A ready file of an earlier
        process is removed."""
        self._ready_file(name).unlink(missing_ok=True)
        folder = GATEWAY_FOLDER if service == GATEWAY else service
        certificates = "" if self._certificates is None else str(self._certificates / folder)
        return {
            "TREADLE_NATS_URL": self.nats_url,
            "TREADLE_DRAIN_GRACE_S": str(DRAIN_GRACE_S),
            f"TREADLE_{service.upper()}_LISTEN": address,
            f"TREADLE_{service.upper()}_READY_FILE": str(self._ready_file(name)),
            f"TREADLE_{service.upper()}_TLS_FOLDER": certificates,
            **self._reserved,
            **own,
        }

    def _ready_file(self, name: str) -> Path:
        return self._folder / f"{name}.ready.json"


@asynccontextmanager
async def open_tree(
    logs: Path, hurry: asyncio.Event, plan: EnginePlan | None = None
) -> AsyncIterator[ProcessTree]:
    """Open a process tree whose services are forks of one process that has imported them, and
    engines on a CPU forks of another one.

    logs, hurry: as ProcessTree's. plan: of the engines, where there are any.
    """
    engine_forks = None if plan is None else open_engine_forks(plan, logs / "sglang.log")
    with ForkServer(SERVICE_MODULES) as fork_server, engine_forks or nullcontext():
        async with ProcessTree(
            logs, hurry=hurry, fork_server=fork_server, engine_forks=engine_forks
        ) as tree:
            yield tree


def reserve_space(folder: Path) -> dict[str, str]:
    """Return what JetStream may keep on the disk of `folder`, as variables that all services of a
    mesh must have alike."""
    free_bytes = shutil.disk_usage(folder).free
    bounds = {name: min(most, int(share * free_bytes)) for name, (most, share) in RESERVED.items()}
    return {name: os.environ.get(name, str(bound)) for name, bound in bounds.items()}


async def start_nats(
    tree: ProcessTree,
    folder: Path,
    port: int | None = None,
    certificates: Path | None = None,
    host: str = HOST,
    password: str = "",
) -> tuple[Child, str]:
    """Start nats-server on `port` of `host`, or any free one, with its store in `folder`; return it
    and its URL once it listens. certificates: a folder of theirs (`authority`); None for plaintext,
    where the URL has a user and a password (empty: a new one): other users of the machine reach the
    port too, and read command lines."""
    command = [
        str(nats_server()),
        "-a",
        host,
        "-p",
        str(port or -1),
        "-js",
        "-sd",
        str(folder / "jetstream"),
    ]
    user, password = "", password or secrets.token_urlsafe(TOKEN_BYTES)
    if certificates is None:
        user = f"{NATS_USER}:{password}@"
        content = f"authorization {{ user: {NATS_USER}, password: {json.dumps(password)} }}\n"
    else:
        content = nats_config(certificates / NATS)
    config = folder / "nats.conf"
    write_private(config, content)
    command += ["-c", str(config)]
    child = tree.start("nats", [*command, "--ports_file_dir", str(folder)], stage=NATS_STAGE)
    ports = await read_ready_file(child, folder, f"*_{child.pid}.ports", NATS_TIMEOUT_S)
    return child, f"nats://{user}{urlsplit(ports['nats'][0]).netloc}"


def page_url(listen: str, login_token: str) -> str:
    """Return the URL with which a browser opens the console at host:port."""
    return f"http://{listen}/?token={login_token}"


async def read_ready_file(child: Child, folder: Path, pattern: str, timeout_s: float) -> Any:
    """Return the JSON file that the child writes once it serves. Raises ProcessError."""

    async def read() -> Any:
        return _read_json(folder, pattern)

    return await child.until(read, "ready file", timeout_s)


def _read_json(folder: Path, pattern: str) -> Any:
    for path in folder.glob(pattern):
        with contextlib.suppress(json.JSONDecodeError):  # it is being written
            return json.loads(path.read_text())
    return None
