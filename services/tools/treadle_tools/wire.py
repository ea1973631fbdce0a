"""Assemble the tools service from its parts."""

import asyncio
import functools
import itertools
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from treadle.telemetry.v1 import facts_pb2
from treadle.tools.v1 import rewards_pb2, rewards_pb2_grpc, tools_pb2, tools_pb2_grpc
from treadle_core.tools.cpu import CpuManager
from treadle_core.tools.dispatcher import Dispatcher, Resources
from treadle_core.tools.gpu import GpuManager
from treadle_core.tools.grants import Manager, Service
from treadle_core.tools.pools import InvalidPoolError
from treadle_runtime.bus import run_beside
from treadle_runtime.errors import StartError
from treadle_runtime.server import Runtime, Wiring

from treadle_tools.actions import Actions, ActionScheduler, Background
from treadle_tools.backends import start_backends
from treadle_tools.config import ToolsSettings
from treadle_tools.convert import FactPublisher
from treadle_tools.metrics import Meters
from treadle_tools.registry import RegistrationError, load_registry
from treadle_tools.remote import (
    DeclarationError,
    Declarations,
    Judge,
    read_declarations,
    read_providers,
)
from treadle_tools.remote.functions import Caller, FunctionTools
from treadle_tools.remote.gpus import BUCKET as GPU_BUCKET
from treadle_tools.remote.gpus import EngineMemory, Ledger, Residents, Rounds
from treadle_tools.resources import Demands, compile_kernels, find_node
from treadle_tools.rewards.judges import JudgeScorer
from treadle_tools.rewards.pool import RewardPool, Scorer, ToolScorer
from treadle_tools.rewards.reward import BUCKET as REWARDS_BUCKET
from treadle_tools.rewards.reward import RewardJournal
from treadle_tools.sandbox.sandboxes import ReusedSandboxes
from treadle_tools.servicer import Gateway, RewardsServicer, ToolsServicer
from treadle_tools.sessions import Sessions
from treadle_tools.tool import Tool

SERVICE = tools_pb2.DESCRIPTOR.services_by_name["ToolsService"].full_name
# Of answers to repeated calls: sixty of the longest, a hundred thousand usual ones
RECORDS_BYTES = 256 * 1024 * 1024
REWARDS_SERVICE = rewards_pb2.DESCRIPTOR.services_by_name["RewardsService"].full_name


async def wire(runtime: Runtime) -> Wiring:
    """Assemble the service on `runtime`.

    Raises StartError for a file or module that is not usable.
    """
    settings = runtime.settings
    assert isinstance(settings, ToolsSettings)
    bus = runtime.bus
    with _naming("PROVIDERS_FILE", settings.providers_file):
        providers = read_providers(settings.providers_file)
    with _naming("FUNCTIONS", settings.functions):
        declared = read_declarations(settings.functions, settings.function_hosts, os.environ)
        gpu_managers = _gpu_managers(declared)
    with _naming("MODULES", ",".join(settings.modules)):
        tools = (*settings.builtin_tools, *declared.tools)
        registry = load_registry(tools, settings.modules, providers, settings.networks)
    backends = await start_backends(settings, registry)
    background = Background()
    facts = FactPublisher(bus, f"tools/{socket.gethostname()}")
    node = find_node(settings.cores, settings.memory_bytes)
    await asyncio.to_thread(compile_kernels)
    managers: list[Manager] = [CpuManager([node.machine]), *providers.values(), *gpu_managers]
    dispatcher = Dispatcher(Resources(managers), time.monotonic())
    meters = Meters(runtime.metrics)
    meters.watch(dispatcher)
    scheduler = ActionScheduler(dispatcher, settings.max_waiting, meters.record_decision)
    numbers = itertools.count()
    actions = Actions(
        scheduler,
        facts,
        Demands(node.cores, node.machine.memory_bytes, providers),
        pinned=node.real and settings.pin == "auto",
        providers=providers,
        meters=meters,
        numbers=numbers,
    )
    sessions = Sessions(
        actions, backends, most=settings.max_sessions, idle_s=settings.session_idle_s
    )
    caller = Caller(scheduler, providers, numbers, os.environ)
    reused = ReusedSandboxes(most=settings.reused_sandboxes, kept_s=settings.reused_sandbox_s)
    gateway = Gateway(
        registry,
        backends,
        actions,
        dispatcher,
        providers,
        sessions,
        FunctionTools(caller, facts, meters),
        reused,
    )

    ledger = Ledger(await bus.key_value(GPU_BUCKET))
    await ledger.load()
    memory = EngineMemory()
    residents = Residents(declared.servers, memory, ledger)
    rounds = Rounds(declared, scheduler, residents, background, numbers)

    def scorer_of(tool: Tool) -> Scorer:
        if isinstance(tool.remote, Judge):
            return JudgeScorer(tool.remote, rounds, caller)
        return ToolScorer(tool, gateway.call, settings.reward_slots or node.cores)

    journal = RewardJournal(
        await bus.key_value(REWARDS_BUCKET), bus.jetstream, bus.max_payload_bytes
    )
    rewards = RewardPool(
        {tool.name: scorer_of(tool) for tool in registry.rewards},
        journal,
        await journal.secret(),
        read=lambda name, text: registry.step_arguments(registry.reward(name), text),
        publish=facts.reward_ended,
        most_waiting=settings.max_rewards,
        kept_s=settings.reward_kept_s,
    )
    await rewards.load()

    async def run() -> None:
        # Rewards that are cut at the drain may still start background work, so they end first.
        async with run_beside([background.run]), run_beside([rewards.run]):
            await asyncio.Event().wait()

    async def close() -> None:
        await caller.close()
        await memory.close()
        for backend in backends:
            await backend.close()

    sessions.restore(registry)

    async def end_sessions(fact: facts_pb2.Fact) -> None:
        await sessions.end(fact.trajectory_closed.trajectory_id)

    await bus.subscribe(("trajectory_closed",), end_sessions)

    tasks = [run, scheduler.run, sessions.expire, sessions.recall, reused.expire]
    if declared.gpus is not None:
        tasks.append(functools.partial(residents.watch, declared.gpus.watch_s))
    records = await runtime.open_records()
    await records.bound(RECORDS_BYTES)
    tools_servicer = ToolsServicer(gateway, records, background)
    rewards_servicer = RewardsServicer(registry, rewards, records)
    return Wiring(
        services={
            SERVICE: functools.partial(
                tools_pb2_grpc.add_ToolsServiceServicer_to_server, tools_servicer
            ),
            REWARDS_SERVICE: functools.partial(
                rewards_pb2_grpc.add_RewardsServiceServicer_to_server, rewards_servicer
            ),
        },
        tasks=(*tasks, *(backend.run for backend in backends)),
        close=close,
    )


@contextmanager
def _naming(setting: str, value: str) -> Iterator[None]:
    """Raise StartError with the setting's name where a file or module that it names is not
    usable."""
    try:
        yield
    except (DeclarationError, InvalidPoolError, RegistrationError) as error:
        raise StartError(f"TREADLE_TOOLS_{setting}={value!r} is refused: {error}") from error


def _gpu_managers(declared: Declarations) -> list[GpuManager]:
    if declared.gpus is None:
        return []
    services = [
        Service(service.name, degree, count)
        for service in declared.gpu_service
        for degree, count in service.bytes_per_gpu.items()
    ]
    return [GpuManager(declared.gpus.nodes, declared.gpus.gpu_bytes, services)]
