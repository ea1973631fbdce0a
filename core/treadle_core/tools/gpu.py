"""GPUs as buddy chunks with services in their memory, evicted on execution (ARL-Tangram §5.3).

At most one action executes on a GPU at any time. The size of its chunk is the paper's rule, the
smallest that holds it; which of those is decided here, by the services that are resident. So a
grant may name another chunk of the same size than the decision did. A service's state does not
change as it serves: to evict it is to release its GPU memory, and a copy stays on the host.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from treadle_core.tools.action import GPUS, Action, InvalidActionError, key_units
from treadle_core.tools.arrangement import NODE_GPUS, Chunk, free_chunks, level_of
from treadle_core.tools.decision import Executing, Start
from treadle_core.tools.grants import (
    NEVER_S,
    End,
    Ended,
    GpuGrant,
    InvalidHoldingError,
    Manager,
    Resident,
    Service,
    Usage,
)
from treadle_core.tools.pools import GpuNodes, InvalidPoolError

Gpu = tuple[str, int]  # node, number


@dataclass
class _Running:
    grant: GpuGrant
    ends_at_s: float
    scalable: bool


class GpuManager(Manager):
    """Owner of the GPUs. Invariant: on no GPU do the resident services take more than its
    memory."""

    dimensions: ClassVar[tuple[str, ...]] = (GPUS,)

    def __init__(
        self,
        node_ids: Sequence[str] | Mapping[str, Collection[int]],
        gpu_bytes: int,
        services: Sequence[Service] = (),
    ) -> None:
        """Create the manager. gpu_bytes: memory of each GPU. node_ids: nodes of 8 GPUs; for a node
        with fewer, the numbers of its GPUs.

        Raises InvalidPoolError for a node or a service twice, a degree that no node has, or one
        that never fits.
        """
        if len(set(node_ids)) < len(node_ids):
            raise InvalidPoolError("node_ids", "has a node twice")
        if not isinstance(node_ids, Mapping):
            node_ids = dict.fromkeys(node_ids, range(NODE_GPUS))
        self._free = {node_id: frozenset(numbers) for node_id, numbers in node_ids.items()}
        for node_id, numbers in self._free.items():
            if not numbers <= frozenset(range(NODE_GPUS)):
                raise InvalidPoolError(f"node_ids[{node_id!r}]", f"must be of 0 to {NODE_GPUS - 1}")
        self._capacity = sum(map(len, self._free.values()))
        self._services: dict[tuple[str, int], Service] = {}
        for index, service in enumerate(services):
            if (service.name, service.degree) in self._services:
                raise InvalidPoolError(
                    f"services[{index}]", f"{service.name!r} with {service.degree} GPUs twice"
                )
            if not 1 <= service.degree <= NODE_GPUS:
                raise InvalidPoolError(
                    f"services[{index}].degree", f"must be from 1 to {NODE_GPUS}"
                )
            if not 0 < service.bytes_per_gpu <= gpu_bytes:
                raise InvalidPoolError(
                    f"services[{index}].bytes_per_gpu", f"must be from 1 to {gpu_bytes}"
                )
            self._services[service.name, service.degree] = service
        self._gpu_bytes = gpu_bytes
        self._used_s: dict[Resident, float] = {}  # when each resident was last used
        self._on: dict[Gpu, dict[Resident, None]] = {}  # the residents of each GPU
        self._running: dict[str, _Running] = {}

    def check(self, action: Action) -> None:
        """Raise InvalidActionError for a service, or a number of its GPUs, that is not served."""
        if action.service is None:
            return
        if GPUS not in action.cost:
            raise InvalidActionError(
                "service", f"{action.service!r} needs GPUs; give {GPUS} a demand in cost"
            )
        for degree in key_units(action.cost[GPUS]):
            if (action.service, degree) not in self._services:
                raise InvalidActionError(
                    f"cost[{GPUS}]",
                    f"{action.service!r} is not served on {degree} GPUs; ask for a UnitSet of "
                    "those it is",
                )

    def pools(self, now_s: float) -> tuple[GpuNodes, ...]:
        return (GpuNodes(dict(self._free)),)

    def executing(self, now_s: float) -> list[Executing]:
        return [
            Executing(GPUS, each.grant.chunk.size, each.ends_at_s - now_s, None, each.scalable)
            for each in self._running.values()
        ]

    def take(
        self, start: Start, units: Mapping[str, int], now_s: float, expected_s: float
    ) -> GpuGrant:
        action, degree = start.action, units[GPUS]
        service = None if action.service is None else self._services[action.service, degree]
        grant = self._best_grant(1 << level_of(degree), service)
        chunk = grant.chunk
        for resident in grant.evicted:
            self._evict(resident)
        if service is not None:
            self._use(Resident(service, chunk), now_s)
        self._free[chunk.node_id] -= frozenset(range(chunk.first, chunk.first + chunk.size))
        self._running[action.action_id] = _Running(grant, now_s + expected_s, action.scalable)
        return grant

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        """Give the GPUs of an ended action back. A service whose action failed is no longer taken
        to be resident."""
        grant = self._running.pop(action_id).grant
        chunk, service = grant.chunk, grant.service
        self._free[chunk.node_id] |= frozenset(range(chunk.first, chunk.first + chunk.size))
        if service is not None and ended.end is End.FAILED:
            self._evict(Resident(service, chunk))
        elif service is not None:
            self._use(Resident(service, chunk), now_s)

    def forget(self, trajectory_id: str) -> None:
        """Do nothing, as only actions hold GPUs."""

    def usage(self, now_s: float) -> tuple[Usage, ...]:
        free = sum(map(len, self._free.values()))
        return (Usage(GPUS, self._capacity, self._capacity - free, free),)

    def _best_grant(self, size: int, service: Service | None) -> GpuGrant:
        """Return the best run of `size` GPUs in the smallest free chunks that hold one: where the
        service is resident, else where nothing is to be evicted, else where the evicted services
        were used least recently; the first of equals."""
        free = [
            chunk for node_id, gpus in self._free.items() for chunk in free_chunks(node_id, gpus)
        ]
        least = min((chunk.size for chunk in free if chunk.size >= size), default=None)
        if least is None:
            raise InvalidHoldingError("start.units", f"no chunk of {size} GPUs is free")
        grants = [
            self._grant(Chunk(chunk.node_id, first, size), service)
            for chunk in free
            if chunk.size == least
            for first in range(chunk.first, chunk.first + chunk.size, size)
        ]
        return min(
            grants,
            key=lambda grant: (
                grant.restore,
                max((self._used_s[each] for each in grant.evicted), default=-NEVER_S),
            ),
        )

    def _grant(self, chunk: Chunk, service: Service | None) -> GpuGrant:
        if service is None:
            return GpuGrant(chunk, None, 0, self._residents_of(chunk))
        if Resident(service, chunk) in self._used_s:
            return GpuGrant(chunk, service, 0, ())
        return GpuGrant(
            chunk, service, service.bytes_per_gpu * service.degree, self._to_evict(chunk, service)
        )

    def _residents_of(self, chunk: Chunk) -> tuple[Resident, ...]:
        return tuple(
            {resident: None for gpu in gpus_of(chunk) for resident in self._on.get(gpu, ())}
        )

    def _to_evict(self, chunk: Chunk, service: Service) -> tuple[Resident, ...]:
        """Return the residents that have to go before `service` fits on `chunk`, least recently
        used first on each GPU."""
        going: dict[Resident, None] = {}
        for gpu in gpus_of(chunk, service):
            there = [resident for resident in self._on.get(gpu, ()) if resident not in going]
            free = self._gpu_bytes - sum(resident.service.bytes_per_gpu for resident in there)
            for resident in sorted(there, key=self._used_s.__getitem__):
                if free >= service.bytes_per_gpu:
                    break
                going[resident] = None
                free += resident.service.bytes_per_gpu
        return tuple(going)

    def _use(self, resident: Resident, now_s: float) -> None:
        if resident not in self._used_s:
            for gpu in gpus_of(resident.chunk, resident.service):
                self._on.setdefault(gpu, {})[resident] = None
        self._used_s[resident] = now_s

    def _evict(self, resident: Resident) -> None:
        if self._used_s.pop(resident, None) is not None:
            for gpu in gpus_of(resident.chunk, resident.service):
                del self._on[gpu][resident]


def gpus_of(chunk: Chunk, service: Service | None = None) -> list[Gpu]:
    """Return the GPUs of a chunk, or those of them that a service is on: the first `degree`."""
    count = chunk.size if service is None else service.degree
    return [(chunk.node_id, number) for number in range(chunk.first, chunk.first + count)]
