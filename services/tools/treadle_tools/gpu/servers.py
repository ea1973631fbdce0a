"""The nouns: a GPU service, and the servers that run it, one for each chunk of GPUs that it may be on."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_core.tools.chunks import level_of


@dataclass(frozen=True)
class Server:
    """An SGLang server on `degree` GPUs, the first of which is `first` of `node`. url: http://host:port."""

    service: str
    degree: int
    node: str
    first: int
    url: str

    @property
    def gpus(self) -> frozenset[tuple[str, int]]:
        """Those it is on."""
        return frozenset((self.node, self.first + index) for index in range(self.degree))


@dataclass(frozen=True)
class GpuService:
    """A model that is served on any of `bytes_per_gpu`'s numbers of GPUs, each a service of its own (§5.3).

    serial_share: of the work, in [0, 1], what more GPUs do not make faster. at_once: requests under way at one server,
    which runs them as a batch.
    """

    name: str
    bytes_per_gpu: Mapping[int, int]
    servers: tuple[Server, ...]
    serial_share: float = 0.1
    at_once: int = 64


@dataclass(frozen=True)
class Gpus:
    """All there is. nodes: the GPUs of each. gpu_bytes: of each GPU. turn_s: how long a service may keep GPUs that
    another one waits for.
    """

    nodes: Mapping[str, tuple[int, ...]]
    gpu_bytes: int
    services: tuple[GpuService, ...]
    turn_s: float = 30.0

    @property
    def servers(self) -> tuple[Server, ...]:
        """Of all services."""
        return tuple(server for service in self.services for server in service.servers)


NO_GPUS = Gpus({}, 0, ())


def places(nodes: Mapping[str, tuple[int, ...]], degree: int) -> list[tuple[str, int]]:
    """(node, first GPU) of each chunk that `degree` GPUs may be given: aligned runs of the next power of two."""
    size = 1 << level_of(degree)
    return [
        (node, first)
        for node, numbers in nodes.items()
        for first in range(0, max(numbers, default=-1) + 1, size)
        if all(number in numbers for number in range(first, first + size))
    ]
