"""Puts the service together.

Puts the rewards' part of the service together.

Puts the GPU services' part of the service together."""

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle.tools.v1 import rewards_pb2, rewards_pb2_grpc, tools_pb2, tools_pb2_grpc
from treadle_core.tools.cpu import CpuManager
from treadle_core.tools.dispatcher import Dispatcher, Resources
from treadle_core.tools.gpu import GpuManager
from treadle_core.tools.grants import Manager, Service
from treadle_core.tools.pools import InvalidPoolError
from treadle_runtime.bus import Bus, run_beside
from treadle_runtime.errors import StartError
from treadle_runtime.server import Runtime, Wiring

from treadle_tools.api.convert import BusFacts
from treadle_tools.api.convert_rewards import RewardFacts
from treadle_tools.api.gateway import Gateway
from treadle_tools.api.rewards_servicer import RewardsServicer
from treadle_tools.api.servicer import ToolsServicer
from treadle_tools.background import Background
from treadle_tools.config import ToolsSettings
from treadle_tools.gpu.memory import EngineMemory
from treadle_tools.gpu.residents import BUCKET as GPU_BUCKET
from treadle_tools.gpu.residents import Ledger, Residents
from treadle_tools.gpu.rounds import Rounds, ServiceEndpoints
from treadle_tools.gpu.servers import Gpus
from treadle_tools.registry import RegistrationError, Registry, load
from treadle_tools.remote.caller import Caller
from treadle_tools.remote.declarations import DeclarationError, Declarations, read_functions
from treadle_tools.remote.gate import ProviderGate
from treadle_tools.remote.invocations import Invocations
from treadle_tools.rewards.journal import BUCKET as REWARDS_BUCKET
from treadle_tools.rewards.journal import RewardJournal
from treadle_tools.rewards.judge import Judge
from treadle_tools.rewards.judging import FixedEndpoints, JudgeScorer
from treadle_tools.rewards.pool import Arguments, RewardPool
from treadle_tools.rewards.scorer import Scorer, ToolScorer
from treadle_tools.sandbox.backends import find_pools
from treadle_tools.sandbox.keeper.folder import SNAPSHOTS
from treadle_tools.sandbox.pools import KeptCells
from treadle_tools.scheduling.actions import Actions
from treadle_tools.scheduling.demand import Demands, Durations
from treadle_tools.scheduling.meters import Meters
from treadle_tools.scheduling.node import node_of, settle, warm_up
from treadle_tools.scheduling.providers import ProvidersError, read_providers
from treadle_tools.scheduling.standing import Standing
from treadle_tools.scheduling.turns import Turns
from treadle_tools.sessions.sessions import Sessions
from treadle_tools.sessions.snapshots import Snapshots
from treadle_tools.tool import Tool


@dataclass(frozen=True)
class GpuParts:
    """What runs beside the service, and what is closed with it."""

    rounds: Rounds
    residents: Residents
    memory: EngineMemory


def gpu_managers(gpus: Gpus) -> list[GpuManager]:
    """One, or none where there are no GPUs. Raises InvalidPoolError."""
    services = [
        Service(service.name, degree, count)
        for service in gpus.services
        for degree, count in service.bytes_per_gpu.items()
    ]
    return [GpuManager(gpus.nodes, gpus.gpu_bytes, services)] if gpus.nodes else []


async def gpu_parts(bus: Bus, gpus: Gpus, turns: Turns, background: Background, numbers: Iterator[int]) -> GpuParts:
    """Of the services that a file declares; none where there are none."""
    ledger = Ledger(await bus.key_value(GPU_BUCKET))
    await ledger.load()
    memory = EngineMemory()
    residents = Residents(gpus.servers, memory, ledger)
    return GpuParts(Rounds(gpus, turns, residents, background, numbers), residents, memory)


async def reward_pool(
    bus: Bus,
    source: str,
    gateway: Gateway,
    caller: Caller,
    rounds: Rounds,
    *,
    slots: int,
    most_waiting: int,
    kept_s: float,
) -> RewardPool:
    """The pool, with what an earlier life of the service accepted. slots: rewards in the sandbox at a time."""
    registry = gateway.registry

    def scorer(tool: Tool) -> Scorer:
        if isinstance(tool.remote, Judge):
            judge = tool.remote
            service = ServiceEndpoints(rounds, judge.service) if judge.service else FixedEndpoints(judge.endpoints)
            return JudgeScorer(tool.name, judge, tool.provider, service, caller)
        return ToolScorer(tool, gateway.call, slots)

    journal = RewardJournal(await bus.key_value(REWARDS_BUCKET), bus.jetstream, bus.max_payload_bytes)
    pool = RewardPool(
        {tool.name: scorer(tool) for tool in registry.rewards},
        journal,
        read=lambda name, text: _read(registry, name, text),
        tell=RewardFacts(bus, source).ended,
        most_waiting=most_waiting,
        kept_s=kept_s,
    )
    await pool.load()
    return pool


def _read(registry: Registry, name: str, text: str) -> Arguments:
    return registry.step_arguments(registry.reward(name), text)


SERVICE = tools_pb2.DESCRIPTOR.services_by_name["ToolsService"].full_name
REWARDS_SERVICE = rewards_pb2.DESCRIPTOR.services_by_name["RewardsService"].full_name


async def wire(runtime: Runtime) -> Wiring:
    """The service on `runtime`. Raises StartError for a module of tools that is not usable."""
    settings = runtime.settings
    assert isinstance(settings, ToolsSettings)
    try:
        providers = read_providers(settings.providers_file)
    except ProvidersError as error:
        raise StartError(f"TREADLE_TOOLS_PROVIDERS_FILE={settings.providers_file!r} is refused: {error}") from error
    try:
        declared = _declared(settings)
        builtin = (*settings.builtin_tools, *settings.builtin_rewards)
        registry = load((*builtin, *declared.tools), settings.module_names, providers, settings.network_names)
    except RegistrationError as error:
        raise StartError(f"TREADLE_TOOLS_MODULES={settings.modules!r} is refused: {error}") from error
    pools = await find_pools(settings, registry)
    background = Background()
    source = f"tools/{socket.gethostname()}"
    node = node_of(settings.cores, settings.memory_bytes)
    await asyncio.to_thread(warm_up)
    managers: list[Manager] = [CpuManager([node.machine]), *providers.values(), *_gpu_managers(settings, declared)]
    dispatcher = Dispatcher(Resources(managers), time.monotonic())
    meters = Meters(runtime.metrics.meter())
    standing = Standing(dispatcher, providers)
    turns = Turns(dispatcher, settings.max_waiting, meters.decided)
    durations = Durations()
    numbers = itertools.count()
    pinned = node.real and settings.pin == "auto"
    actions = Actions(
        turns,
        BusFacts(runtime.bus, source),
        Demands(node.cores, node.machine.memory_bytes, providers, durations),
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
        lambda cell: background.spawn(pools.put_away(cell)),
        most=settings.reused_sandboxes,
        kept_s=settings.reused_sandbox_s,
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
        async with run_beside([background.run]), run_beside([rewards.run]):
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
        raise StartError(f"TREADLE_TOOLS_FUNCTIONS={settings.functions!r} is refused: {error}") from error


def _gpu_managers(settings: ToolsSettings, declared: Declarations) -> list[GpuManager]:
    try:
        return gpu_managers(declared.gpus)
    except InvalidPoolError as error:
        raise StartError(f"TREADLE_TOOLS_FUNCTIONS={settings.functions!r} is refused: {error}") from error
