"""Puts the service together."""

import asyncio
import itertools
import os
import socket
import time
from pathlib import Path

from treadle.tools.v1 import rewards_pb2, rewards_pb2_grpc, tools_pb2, tools_pb2_grpc
from treadle_core.elastic.pools import InvalidPoolError
from treadle_core.managers.cpu import CpuManager
from treadle_core.managers.dispatcher import Dispatcher
from treadle_core.managers.gpu import GpuManager
from treadle_core.managers.protocol import Manager
from treadle_core.managers.resources import Resources
from treadle_runtime.background import beside
from treadle_runtime.lifecycle import ServerStartError
from treadle_runtime.server import Runtime, Wiring

from treadle_tools.backends import find_pools
from treadle_tools.background import Background
from treadle_tools.config import ToolsSettings
from treadle_tools.convert import BusFacts
from treadle_tools.dispatch.actions import Actions
from treadle_tools.dispatch.demand import Demands
from treadle_tools.dispatch.durations import Durations
from treadle_tools.dispatch.meters import Meters
from treadle_tools.dispatch.node import node_of
from treadle_tools.dispatch.providers import ProvidersError, read_providers
from treadle_tools.dispatch.standing import Standing
from treadle_tools.dispatch.turns import Turns
from treadle_tools.dispatch.warm_up import settle, warm_up
from treadle_tools.functions.caller import Caller
from treadle_tools.functions.declarations import DeclarationError, Declarations, read_functions
from treadle_tools.functions.gate import ProviderGate
from treadle_tools.functions.invocations import Invocations
from treadle_tools.gateway import Gateway
from treadle_tools.gpu.wiring import gpu_managers, gpu_parts
from treadle_tools.keeper.folder import SNAPSHOTS
from treadle_tools.kept_cells import KeptCells
from treadle_tools.registry import RegistrationError, load
from treadle_tools.rewards.servicer import RewardsServicer
from treadle_tools.rewards.wiring import reward_pool
from treadle_tools.servicer import ToolsServicer
from treadle_tools.sessions.sessions import Sessions
from treadle_tools.sessions.snapshots import Snapshots

SERVICE = tools_pb2.DESCRIPTOR.services_by_name["ToolsService"].full_name
REWARDS_SERVICE = rewards_pb2.DESCRIPTOR.services_by_name["RewardsService"].full_name


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
        declared = _declared(settings)
        builtin = (*settings.builtin_tools, *settings.builtin_rewards)
        registry = load((*builtin, *declared.tools), settings.module_names, providers, settings.network_names)
    except RegistrationError as error:
        raise ServerStartError(f"TREADLE_TOOLS_MODULES={settings.modules!r} is refused: {error}") from error
    pools = await find_pools(settings, registry)
    background = Background()
    source = f"tools/{socket.gethostname()}"
    node = node_of(settings.cores, settings.memory_bytes)
    await asyncio.to_thread(warm_up)
    managers: list[Manager] = [CpuManager([node.machine]), *providers.values(), *_gpu_managers(settings, declared)]
    dispatcher = Dispatcher(Resources(managers), time.monotonic())
    meters = Meters(runtime.metering.meter())
    standing = Standing(dispatcher, providers)
    turns = Turns(dispatcher, settings.max_waiting, meters.decided)
    durations = Durations()
    numbers = itertools.count()
    pinned = node.real and settings.pin == "auto"
    actions = Actions(
        turns,
        BusFacts(runtime.bus, source),
        Demands(
            node.cores,
            node.machine.memory_bytes,
            providers,
            durations,
            moves_cores=lambda tool: pinned and pools.moves_cores(tool),
        ),
        durations,
        pinned=pinned,
        providers=providers,
        meters=meters,
        numbers=numbers,
    )
    snapshots = Snapshots(
        (pools.folder or settings.state_folder) / SNAPSHOTS,
        most=settings.max_snapshots,
        kept_s=settings.snapshot_kept_s,
    )
    sessions = Sessions(
        actions,
        pools.take,
        most=settings.max_sessions,
        idle_s=settings.session_idle_s,
        release=lambda cell: background.spawn(pools.put_away(cell)),
        memory=pools,
        snapshots=snapshots,
    )
    caller = Caller(ProviderGate(turns, providers, numbers), os.environ)
    invocations = Invocations(caller, BusFacts(runtime.bus, source), meters)
    kept = KeptCells(
        lambda cell: background.spawn(pools.put_away(cell)), most=settings.kept_cells, kept_s=settings.kept_cell_s
    )
    gateway = Gateway(registry, pools, actions, sessions, background, standing, snapshots, invocations, kept)
    servicer = ToolsServicer(gateway, runtime.records, background)
    gpu = await gpu_parts(runtime.bus, declared.gpus, turns, background, numbers)
    rewards = await reward_pool(
        runtime.bus,
        source,
        gateway,
        caller,
        gpu.rounds,
        slots=settings.reward_slots or node.cores,
        most_waiting=settings.max_rewards,
        kept_s=settings.reward_kept_s,
    )
    rewards_servicer = RewardsServicer(registry, rewards, runtime.records)

    async def run() -> None:
        # Rewards that are cut at the drain still put their cells away, so they end first.
        async with beside([background.run]), beside([rewards.run]):
            await asyncio.Event().wait()

    async def close() -> None:
        await caller.close()
        await gpu.memory.close()
        for backend in pools.backends:
            await backend.close()

    async def watch() -> None:
        await meters.watch(standing)

    if pools.folder is not None:
        snapshots.load(registry)
    sessions.restore(pools.found, registry, pools.closed)
    own = [run, turns.run, watch, sessions.reap, sessions.recall, kept.reap, gpu.residents.watch]

    settle()
    return Wiring(
        services={
            SERVICE: lambda server: tools_pb2_grpc.add_ToolsServiceServicer_to_server(servicer, server),
            REWARDS_SERVICE: lambda server: rewards_pb2_grpc.add_RewardsServiceServicer_to_server(
                rewards_servicer, server
            ),
        },
        tasks=(*own, *(backend.run for backend in pools.backends)),
        close=close,
    )


def _declared(settings: ToolsSettings) -> Declarations:
    if not settings.functions:
        return Declarations()
    try:
        return read_functions(Path(settings.functions), settings.allowed_hosts, os.environ)
    except DeclarationError as error:
        raise ServerStartError(f"TREADLE_TOOLS_FUNCTIONS={settings.functions!r} is refused: {error}") from error


def _gpu_managers(settings: ToolsSettings, declared: Declarations) -> list[GpuManager]:
    try:
        return gpu_managers(declared.gpus)
    except InvalidPoolError as error:
        raise ServerStartError(f"TREADLE_TOOLS_FUNCTIONS={settings.functions!r} is refused: {error}") from error
