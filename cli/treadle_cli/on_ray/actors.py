"""Define the actors of a mesh on a Ray cluster: `treadle`, which keeps all others there, and one
for each service and sidecar.

An actor starts the process of its service as `treadle up` does, and has no other work: the process
ends with the actor, and the actor with its process. Ray starts the actor again, which is the one
way of healing; what a service has to remember stands in NATS. `treadle`, NATS and the services run
on the head node, whose loss is that of the cluster. A sidecar runs in the placement group and
bundle of its engine's actor, and goes with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from treadle_runtime.config import is_loopback

from treadle_cli.certs import make_certificates
from treadle_cli.doctor.findings import OK, PROBLEM, WARNING, Finding, as_json
from treadle_cli.doctor.servers import Server, check_servers, read_servers
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.checks import nats_server, require_bubblewrap
from treadle_cli.mesh.processes import HOST, Child, Ports, ProcessError, ProcessTree
from treadle_cli.mesh.services import (
    API_KEY,
    CONSOLE,
    CONSOLE_PORT_OFFSET,
    GATEWAY,
    LOGIN_TOKEN,
    NATS_USER,
    START_TIMEOUT_S,
    TOKEN_BYTES,
    Addresses,
    ControlPlane,
    choose_addresses,
    page_url,
    reserve_space,
)
from treadle_cli.on_ray.engines import KNOWN, Engine, EngineActors, find_engines
from treadle_cli.options import PRIVATE_UMASK, make_private_folder, write_private

NAMESPACE = STEWARD = "treadle"  # of all actors, and the name of the one that keeps them
NATS, SIDECAR = "nats", "sidecar-"
LEASE_TTL_S = 10.0  # lease of engines, whose sidecars may be on other machines
LOOK_EVERY_S = 5.0  # for engines that are new, and for those that are gone
# an actor whose process has not started stays so long, to report the reason; then Ray tries again
REPORT_S = 2.0
READY_S = START_TIMEOUT_S + 20.0  # the longest start of a service, and of its actor
STOP_S = 20.0  # a service drains in about one second
# exit code of an actor whose process has ended: Ray heals any exit that nobody requested
ENDED = 1
TEMPORARY = f"treadle-ray-{os.getuid()}-"  # the actor's pid and random letters follow
ON_HEAD = {"node:__internal_head__": 0.001}  # Ray's own name of that node


@dataclass(frozen=True)
class RayPlan:
    """Plan of a mesh on a cluster. base_port: of the scheduler, 0: free ports. alone: the mesh
    serves the head node on its loopback interface. secure: with certificates. folder: on each node,
    for logs, and on the head node the state; None: one of the node's user among the temporary
    files. cpus: how many Ray reserves for each service.
    settings: of each sidecar. actors, urls: engines beside those of `engines.KNOWN`."""

    base_port: int
    alone: bool
    secure: bool
    folder: Path | None
    settings: Mapping[str, str]
    cpus: float = 0.0
    actors: tuple[EngineActors, ...] = ()
    urls: tuple[str, ...] = ()


@dataclass(frozen=True)
class RayMesh:
    """Addresses and folder of a mesh on a cluster. environment: variables that all services get."""

    where: Addresses
    nats_url: str
    console: str
    folder: Path
    secure: bool
    environment: Mapping[str, str]

    @property
    def state(self) -> Path:
        """Return the folder for the state of NATS and the services, on the head node."""
        return self.folder / "state"

    @property
    def is_local(self) -> bool:
        """Return whether the mesh serves the head node alone."""
        return is_loopback(self.where.scheduler)


class Process:
    """Actor that is one service of the mesh. name: of the service, or of a sidecar. settings: its
    own variables."""

    def __init__(self, name: str, mesh: RayMesh, settings: Mapping[str, str]) -> None:
        self._name, self._mesh, self._settings = name, mesh, settings
        self._stopping = False
        self._temporary = _keep_temporary_files()
        loop = asyncio.get_running_loop()
        self._pid: asyncio.Future[int] = loop.create_future()
        self._serving = loop.create_task(self._serve())
        self._serving.add_done_callback(self._end)

    async def until_ready(self) -> int:
        """Return the pid of the process, once it serves. Raises RuntimeError with the end of its
        log."""
        return await asyncio.shield(self._pid)

    async def stop(self) -> None:
        """Let the process drain and end; the actor stays, without a process."""
        self._stopping = True
        self._serving.cancel()
        await asyncio.wait([self._serving])
        await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    async def _serve(self) -> None:
        os.environ |= self._mesh.environment
        try:
            make_private_folder(self._mesh.folder)
            async with ProcessTree(make_private_folder(self._mesh.folder / "logs")) as tree:
                child = await self._start(tree)
                self._pid.set_result(child.pid)
                await child.exited.wait()
        except (ProcessError, UsageProblem, OSError, RayError) as error:
            self._pid.set_exception(RuntimeError(str(error)))
            await asyncio.sleep(REPORT_S)

    async def _start(self, tree: ProcessTree) -> Child:
        engine_id = self._name.removeprefix(SIDECAR) if self._name.startswith(SIDECAR) else ""
        folder = tree.make_folder(Path(tempfile.gettempdir())) if engine_id else self._mesh.state
        certificates = folder / "certificates" if self._mesh.secure else None
        if certificates is not None and engine_id:
            await _fetch_certificate("sidecar", certificates)
        control = ControlPlane(tree, self._mesh.where, folder, LEASE_TTL_S, certificates)
        control.nats_url = self._mesh.nats_url
        if engine_id:
            host = HOST if self._mesh.is_local else ray.util.get_node_ip_address()
            listen = f"{host}:{Ports(host).choose(1)[0]}"
            return await control.start_sidecar(
                engine_id, {**self._settings, "TREADLE_SIDECAR_LISTEN": listen}
            )
        if self._name == NATS:
            await control.start_nats()
        elif self._name == GATEWAY:
            await control.start_gateway(self._settings["model_path"])
        elif self._name == CONSOLE:
            await control.start_console(
                int(self._mesh.console.rpartition(":")[2]) - CONSOLE_PORT_OFFSET
            )
        else:
            await control.start_service(self._name)
        return control.child(self._name)

    def _end(self, serving: asyncio.Task[None]) -> None:
        if not self._stopping:
            _end_process(serving)


class Steward:
    """The actor `treadle`, which reports where the mesh is, and keeps an actor for each service and
    each engine's sidecar."""

    def __init__(self, plan: RayPlan) -> None:
        self._plan, self._folder = plan, plan.folder or default_folder()
        self._options = {"namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        self._options |= {"max_restarts": -1, "num_cpus": plan.cpus}
        self._stopping, self._again = (
            False,
            ray.get_runtime_context().was_current_actor_reconstructed,
        )
        self._servers: dict[str, Server] = {}  # by engine id, of those that have a sidecar
        self._engines: dict[str, Engine] = {}
        self._refused: dict[str, str] = {}  # by label, why an engine has none
        self._findings: dict[str, list[Finding]] = {}  # by label, what could be better
        loop = asyncio.get_running_loop()
        self._mesh: asyncio.Future[RayMesh] = loop.create_future()
        self._serves: asyncio.Future[None] = loop.create_future()
        self._keeping = loop.create_task(self._keep())
        self._keeping.add_done_callback(self._end)

    async def until_serving(self) -> str:
        """Wait until all services serve and the present engines have sidecars, and return ""; else
        return why that cannot be."""
        try:
            await asyncio.shield(self._serves)
        except UsageProblem as problem:
            return str(problem)
        return ""

    async def describe(self) -> dict[str, Any]:
        """Return all addresses. A framework needs `scheduler` (host:port) or `gateway` (a URL, with
        `api_key`)."""
        mesh = await asyncio.shield(self._mesh)
        scheme = "https" if mesh.secure else "http"
        return {
            **mesh.where.services,
            "gateway": f"{scheme}://{mesh.where.http}",
            "console": page_url(mesh.console, mesh.environment[LOGIN_TOKEN]),
            "nats": mesh.nats_url,
            "secure": mesh.secure,
            "api_key": mesh.environment.get(API_KEY, ""),
            "folder": str(mesh.folder),
            "engines": {
                engine_id: _described(engine) for engine_id, engine in self._engines.items()
            },
            "refused": self._refused,
            "findings": as_json([each for some in self._findings.values() for each in some])[
                "findings"
            ],
        }

    async def credentials(self, name: str) -> dict[str, bytes]:
        """Return the files of a certificate by the name of its folder, e.g. trainer-default; none
        without certificates."""
        mesh = await asyncio.shield(self._mesh)
        folder = mesh.state / "certificates"
        named = (
            [path for path in folder.glob("*/*") if path.parent.name == name] if mesh.secure else []
        )
        return {path.name: path.read_bytes() for path in named}

    async def stop(self) -> None:
        """Stop sidecars, services and NATS in this order, and remove what they have stored; logs
        stay."""
        self._stopping = True
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        names = _names()
        last = [
            [name for name in names if name.startswith(SIDECAR)],
            [GATEWAY, CONSOLE],
            names - {NATS},
            [NATS],
        ]
        for some in last:
            await asyncio.gather(*[_stop(name) for name in names.intersection(some)])
        if self._mesh.done():  # else the folder may be another user's
            await asyncio.to_thread(shutil.rmtree, self._folder / "state", ignore_errors=True)

    async def _keep(self) -> None:
        try:
            mesh = await asyncio.to_thread(self._place_mesh)
            self._mesh.set_result(mesh)
            problems = await asyncio.gather(
                *[self._keep_process(mesh, name) for name in self._names(mesh)]
            )
            if any(problems):
                raise UsageProblem("; ".join(filter(None, problems)))
        except (UsageProblem, OSError) as problem:
            if self._again:
                raise  # and Ray tries again
            self._serves.set_exception(UsageProblem(str(problem)))
            await asyncio.sleep(REPORT_S)
            return
        while True:
            await self._look(mesh)
            if not self._serves.done():
                self._serves.set_result(None)
            await asyncio.sleep(LOOK_EVERY_S)
            for name in {*self._names(mesh)} - _names():
                await self._keep_process(mesh, name)

    def _names(self, mesh: RayMesh) -> Sequence[str]:
        return (NATS, *mesh.where.services, CONSOLE)

    def _place_mesh(self) -> RayMesh:
        """Return where the mesh is to be; as before where Ray has started this actor again. Raises
        UsageProblem, OSError."""
        plan, folder = self._plan, self._folder
        os.umask(PRIVATE_UMASK)
        make_private_folder(folder)
        state = make_private_folder(folder / "state")
        file = state / "mesh.json"
        if self._again and file.exists():
            found = json.loads(file.read_text())
            return RayMesh(**{**found, "where": Addresses(**found["where"]), "folder": folder})
        nats_server()
        ports = Ports(HOST if plan.alone else ray.util.get_node_ip_address())
        where = replace(choose_addresses(ports, plan.base_port, []), resources="")
        try:
            require_bubblewrap()
        except UsageProblem as problem:
            wrong, _, do = str(problem).partition("\n")
            self._findings["tools"] = [
                Finding("tools", "sandbox", WARNING, f"no service for tools: {wrong}", do)
            ]
            where = replace(
                where, services={name: at for name, at in where.services.items() if name != "tools"}
            )
        nats, console = ports.choose(2)
        environment = {**reserve_space(state), LOGIN_TOKEN: secrets.token_urlsafe(TOKEN_BYTES)}
        if not (plan.alone or plan.secure):
            environment["TREADLE_INSECURE_PLAINTEXT"] = "true"
        if plan.secure:
            make_certificates(state / "certificates")
            environment[API_KEY] = secrets.token_urlsafe()
        user = "" if plan.secure else f"{NATS_USER}:{secrets.token_urlsafe(TOKEN_BYTES)}@"
        nats_url, page = f"nats://{user}{ports.host}:{nats}", f"{HOST}:{console}"
        mesh = RayMesh(where, nats_url, page, folder, plan.secure, environment)
        write_private(file, json.dumps(asdict(mesh), default=str))
        return mesh

    async def _keep_process(
        self,
        mesh: RayMesh,
        name: str,
        settings: Mapping[str, str] = {},
        where: Mapping[str, Any] = {"resources": ON_HEAD},
    ) -> str:
        """Let Ray keep an actor of this name; return "" once its process serves, else why it does
        not."""
        options = {**self._options, "name": name, **where}
        actor = ray.remote(Process).options(**options).remote(name, mesh, settings)
        try:
            async with asyncio.timeout(READY_S):
                await actor.until_ready.remote()
        except RayTaskError as error:
            return f"{name}: {error.cause}"
        except (RayError, TimeoutError) as error:
            return f"{name}: {error or f'did not start within {READY_S:.0f} s'}"
        return ""

    async def _look(self, mesh: RayMesh) -> None:
        """Start sidecars of engines that are new, and stop those of engines that are gone."""
        found = await find_engines((*KNOWN, *self._plan.actors), self._plan.urls)
        servers = await read_servers([engine.url for engine in found.engines])
        host = mesh.where.scheduler.rpartition(":")[0]
        there = {
            server.name(host): (engine, server)
            for engine, server in zip(found.engines, servers, strict=True)
        }
        self._refused = dict(found.problems)
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for engine_id in (self._running() | set(self._engines)) - set(there):
            engine = self._engines.get(engine_id)
            if found.silent and (
                engine is None or (engine.label in found.silent and engine.place.node_id in nodes)
            ):
                continue  # it may be there: its actor is busy
            await _stop(f"{SIDECAR}{engine_id}")
            if engine is not None:
                self._findings.pop(engine.label, None)
            self._engines.pop(engine_id, None)
            self._servers.pop(engine_id, None)
        running = self._running()
        for engine_id in running & set(there):
            self._engines[engine_id] = there[engine_id][0]
            if not there[engine_id][1].problem:
                self._servers.setdefault(engine_id, there[engine_id][1])
        await asyncio.gather(
            *[self._attach(mesh, each, *there[each]) for each in set(there) - running]
        )
        if self._servers and GATEWAY not in _names():
            await self._keep_gateway(mesh, next(iter(self._servers.values())))

    async def _attach(self, mesh: RayMesh, engine_id: str, engine: Engine, server: Server) -> None:
        """Put a sidecar beside an engine, unless it cannot be one of the mesh."""
        problem = self._check(mesh, engine, server)
        if not problem:
            settings = {**self._plan.settings, "TREADLE_SIDECAR_ENGINE_URL": engine.url}
            beside = {"scheduling_strategy": engine.place.strategy, "num_cpus": 0}
            problem = await self._keep_process(mesh, f"{SIDECAR}{engine_id}", settings, beside)
        if problem:
            self._refused[engine.label] = problem
        else:
            self._engines[engine_id], self._servers[engine_id] = engine, server

    def _running(self) -> set[str]:
        """Return the ids of the engines that have a sidecar."""
        return {name.removeprefix(SIDECAR) for name in _names() if name.startswith(SIDECAR)}

    def _check(self, mesh: RayMesh, engine: Engine, server: Server) -> str:
        """Return why an engine cannot be one of the mesh; empty where it can. Keep what could be
        better."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        if addresses.get(engine.place.node_id) != ray.util.get_node_ip_address():
            if mesh.is_local:
                return (
                    "is on another node, and this mesh is of one machine: treadle down, then "
                    "up with --secure"
                )
            if is_loopback(engine.url.rpartition("/")[2]):
                return (
                    f"is on another node and says {engine.url}: it must listen at the address "
                    "of its node"
                )
        findings = list(check_servers([*list(self._servers.values())[:1], server]))
        ours = [
            each
            for each in findings
            if each.level != OK and each.subject in (server.url, "all servers")
        ]
        self._findings[engine.label] = [replace(each, subject=engine.label) for each in ours]
        return "; ".join(
            f"{each.check}: {each.says}. {each.do}" for each in ours if each.level == PROBLEM
        )

    async def _keep_gateway(self, mesh: RayMesh, server: Server) -> None:
        """Start the gateway with the first engine, since texts need the model's tokenizer."""
        settings = {"model_path": str(server.model.get("model_path", ""))}
        problem = await self._keep_process(mesh, GATEWAY, settings)
        if problem:
            self._findings[GATEWAY] = [
                Finding(GATEWAY, "start", WARNING, problem, f"See {mesh.folder / 'logs'}.")
            ]

    def _end(self, keeping: asyncio.Task[None]) -> None:
        if not (self._stopping or (self._serves.done() and self._serves.exception())):
            _end_process(keeping)


def _end_process(work: asyncio.Task[None]) -> None:
    """End this actor in a way that Ray heals, after the work of its life has ended."""
    if not work.cancelled() and work.exception() is not None:
        traceback.print_exception(work.exception())
    os._exit(ENDED)


def default_folder() -> Path:
    """Return the folder of this user's meshes on a node of Ray, unless --ray-folder names one."""
    return Path(tempfile.gettempdir()) / f"treadle-mesh-{os.getuid()}"


def _keep_temporary_files() -> Path:
    """Return a folder for temporary files of this actor, which lasts until the actor's end. A later
    actor here removes what is left: Ray kills children with an actor, and so the guardian, which
    else removes such files."""
    os.umask(PRIVATE_UMASK)
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        pid = folder.name.removeprefix(TEMPORARY).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    # another user may have made a folder of any name that can be foreseen
    tempfile.tempdir = tempfile.mkdtemp(prefix=f"{TEMPORARY}{os.getpid()}-")
    return Path(tempfile.tempdir)


def _names() -> set[str]:
    """Return the names of all actors of the mesh but the steward."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return {str(each["name"]) for each in named if each["namespace"] == NAMESPACE} - {STEWARD}


async def _stop(name: str) -> None:
    """Drain and end an actor for good; do nothing where there is none of that name."""
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return
    try:
        async with asyncio.timeout(STOP_S):
            await actor.stop.remote()
    except (RayError, TimeoutError):
        pass
    ray.kill(actor, no_restart=True)


async def _fetch_certificate(name: str, folder: Path) -> None:
    """Write the files of a certificate to FOLDER/NAME. Raises ValueError where no mesh is,
    RayError."""
    files = await ray.get_actor(STEWARD, namespace=NAMESPACE).credentials.remote(name)
    (folder / name).mkdir(parents=True)
    for file, content in files.items():
        (folder / name / file).write_bytes(content)


def _described(engine: Engine) -> dict[str, Any]:
    group = engine.place.group
    return {
        "url": engine.url,
        "actor": engine.label,
        "node": engine.place.node_id,
        "placement_group": "" if group is None else group.id.hex(),
        "bundle": engine.place.bundle,
    }
