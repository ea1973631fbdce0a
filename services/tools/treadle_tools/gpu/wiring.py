"""Puts the GPU services' part of the service together."""

from collections.abc import Iterator
from dataclasses import dataclass

from treadle_core.managers.gpu import GpuManager
from treadle_core.managers.grants import Service
from treadle_runtime.bus import Bus

from treadle_tools.background import Background
from treadle_tools.dispatch.turns import Turns
from treadle_tools.gpu.ledger import BUCKET, Ledger
from treadle_tools.gpu.memory import EngineMemory
from treadle_tools.gpu.residents import Residents
from treadle_tools.gpu.rounds import Rounds
from treadle_tools.gpu.servers import Gpus


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
    ledger = Ledger(await bus.key_value(BUCKET))
    await ledger.load()
    memory = EngineMemory()
    residents = Residents(gpus.servers, memory, ledger)
    return GpuParts(Rounds(gpus, turns, residents, background, numbers), residents, memory)
