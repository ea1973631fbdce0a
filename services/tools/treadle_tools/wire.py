"""Puts the service together."""

import asyncio
import socket
import time

import structlog
from treadle.tools.v1 import tools_pb2, tools_pb2_grpc
from treadle_core.managers.cpu import CpuManager
from treadle_core.managers.dispatcher import Dispatcher
from treadle_core.managers.resources import Resources
from treadle_runtime.lifecycle import ServerStartError
from treadle_runtime.server import Runtime, Wiring

from treadle_tools.actions import Actions
from treadle_tools.background import Background
from treadle_tools.config import ToolsSettings
from treadle_tools.convert import BusFacts
from treadle_tools.demand import Demands
from treadle_tools.durations import Durations
from treadle_tools.gateway import Gateway, Pools
from treadle_tools.keeper.client import KeeperClient, KeeperFailed, Terms
from treadle_tools.keeper.folder import SNAPSHOTS, FolderRefused, StateFolder
from treadle_tools.meters import Meters
from treadle_tools.node import node_of
from treadle_tools.providers import ProvidersError, read_providers
from treadle_tools.registry import RegistrationError, Registry, load
from treadle_tools.sandbox.bubblewrap import Bubblewrap, SandboxMissing, find_sandbox
from treadle_tools.servicer import ToolsServicer
from treadle_tools.sessions import Sessions
from treadle_tools.snapshots import Snapshots
from treadle_tools.standing import Standing
from treadle_tools.turns import Turns
from treadle_tools.warm_up import settle, warm_up

log = structlog.get_logger()

SERVICE = tools_pb2.DESCRIPTOR.services_by_name["ToolsService"].full_name


async def wire(runtime: Runtime) -> Wiring:
    """The service on `runtime`. Raises ServerStartError for a module of tools that is not usable."""
    settings = runtime.settings
    assert isinstance(settings, ToolsSettings)
    try:
        providers = read_providers(settings.providers_file)
    except ProvidersError as error:
        raise ServerStartError(
            f"TREADLE_TOOLS_PROVIDERS_FILE={settings.providers_file!r} is refused: {error}"
        ) from error
    try:
        registry = load(settings.builtin_tools, settings.module_names, providers)
    except RegistrationError as error:
        raise ServerStartError(f"TREADLE_TOOLS_MODULES={settings.modules!r} is refused: {error}") from error
    pools = await _pools(settings, registry)
    background = Background()
    node = node_of(settings.cores, settings.memory_bytes)
    await asyncio.to_thread(warm_up)
    dispatcher = Dispatcher(Resources([CpuManager([node.machine]), *providers.values()]), time.monotonic())
    meters = Meters(runtime.metering.meter())
    standing = Standing(dispatcher, providers)
    turns = Turns(dispatcher, settings.max_waiting, meters.decided)
    durations = Durations()
    actions = Actions(
        turns,
        BusFacts(runtime.bus, f"tools/{socket.gethostname()}"),
        Demands(node.cores, node.machine.memory_bytes, providers, durations),
        durations,
        pinned=node.real and settings.pin == "auto",
        providers=providers,
        meters=meters,
    )
    snapshots = Snapshots(
        settings.state_folder / SNAPSHOTS, most=settings.max_snapshots, kept_s=settings.snapshot_kept_s
    )
    sessions = Sessions(
        actions,
        pools.take,
        most=settings.max_sessions,
        idle_s=settings.session_idle_s,
        release=lambda cell: background.spawn(pools.put_away(cell)),
        memory=pools.keeper,
        snapshots=snapshots,
    )

    async def watch() -> None:
        await meters.watch(standing)

    tasks = [background.run, turns.run, watch, sessions.reap]
    if pools.keeper is not None:
        snapshots.load(registry)
        sessions.restore(pools.keeper.found, registry, pools.keeper.closed)
        tasks += [pools.keeper.run, sessions.recall]
    gateway = Gateway(registry, pools, actions, sessions, background, standing, snapshots)
    servicer = ToolsServicer(gateway, runtime.records, background)

    async def close() -> None:
        if pools.keeper is not None:
            await pools.keeper.close()

    settle()
    return Wiring(
        services={SERVICE: lambda server: tools_pb2_grpc.add_ToolsServiceServicer_to_server(servicer, server)},
        tasks=tasks,
        close=close,
    )


async def _pools(settings: ToolsSettings, registry: Registry) -> Pools:
    try:
        sandbox = await find_sandbox(settings.bwrap)
    except SandboxMissing as missing:
        log.error("no sandbox: every tool call will be refused", why=str(missing))
        return Pools(None, version="", missing=str(missing))
    keeper = await _keeper(settings, registry, sandbox)
    log.info(
        "sandbox", bubblewrap=sandbox.version, as_user=sandbox.user, drop_root=sandbox.drop_root,
        cgroups=keeper.cgroups_version, sessions=len(keeper.found),
    )  # fmt: skip
    return Pools(keeper, version=f"bubblewrap {sandbox.version}", missing="")


async def _keeper(settings: ToolsSettings, registry: Registry, sandbox: Bubblewrap) -> KeeperClient:
    recipes, failures = [], {}
    for tool in registry:
        try:
            recipes.append(sandbox.recipe(tool))
        except ModuleNotFoundError as error:
            log.error("a tool cannot be started", tool=tool.name, error=str(error))
            failures[tool.name] = str(error)
    terms = Terms(
        tuple(recipes), failures, spares=settings.warm_cells, cgroups=settings.cgroups == "auto",
        keep_s=settings.keep_s, keep_on_exit=settings.keep_on_exit,
    )  # fmt: skip
    try:
        keeper = KeeperClient(StateFolder.take(settings.state_folder), terms)
        await keeper.connect()
    except (FolderRefused, KeeperFailed) as refused:
        raise ServerStartError(f"TREADLE_TOOLS_STATE_DIR={settings.state_dir!r}: {refused}") from refused
    return keeper
