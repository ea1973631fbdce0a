"""GPUs as buddy chunks with services in their memory, evicted on execution (ARL-Tangram §5.3).

At most one action executes on a GPU at any time. Which size of chunk an action gets is the paper's rule, the smallest
that holds it; which of those is decided here, by what is in their memory. So a grant may name another chunk of the same
size than the decision did.

Which services are in the memory of which GPUs, and what has to go for another: least recently used first (§5.3).

Invariant: on no GPU do the services that are there take more than its memory. A service's state does not change as it
serves, so evicting one is to release its memory; a copy stays on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from treadle_core.tools.action import GPUS, Action, InvalidActionError, key_units
from treadle_core.tools.chunks import NODE_GPUS, Chunk, free_chunks, level_of
from treadle_core.tools.completions import Executing
from treadle_core.tools.decision import Start
from treadle_core.tools.grants import NEVER_S, End, Ended, GpuGrant, InvalidHoldingError, Resident, Service, Usage
from treadle_core.tools.pools import GpuNode, GpuNodes, InvalidPoolError

Gpu = tuple[str, int]  # node, number


class Residency:
    """See the module. gpu_bytes: of each GPU."""

    def __init__(self, gpu_bytes: int) -> None:
        self._gpu_bytes = gpu_bytes
        self._used_s: dict[Resident, float] = {}  # when each was last used
        self._on: dict[Gpu, dict[Resident, None]] = {}

    def __iter__(self) -> Iterator[Resident]:
        return iter(self._used_s)

    def used_s(self, resident: Resident) -> float | None:
        """When it was last used; None: it is not there."""
        return self._used_s.get(resident)

    def to_evict(self, chunk: Chunk, service: Service | None) -> tuple[Resident, ...]:
        """What has to go before `service` is on `chunk`; for no service all that is on one of its GPUs."""
        if service is None:
            return tuple({resident: None for gpu in gpus(chunk) for resident in self._on.get(gpu, ())})
        if Resident(service, chunk) in self._used_s:
            return ()
        going: dict[Resident, None] = {}
        for gpu in gpus(chunk, service):
            there = [resident for resident in self._on.get(gpu, ()) if resident not in going]
            free = self._gpu_bytes - sum(resident.service.bytes_per_gpu for resident in there)
            for resident in sorted(there, key=self._used_s.__getitem__):
                if free >= service.bytes_per_gpu:
                    break
                going[resident] = None
                free += resident.service.bytes_per_gpu
        return tuple(going)

    def use(self, resident: Resident, now_s: float) -> None:
        """It is there, or restored now, and used. What has to go for it must have gone."""
        if resident not in self._used_s:
            for gpu in gpus(resident.chunk, resident.service):
                self._on.setdefault(gpu, {})[resident] = None
        self._used_s[resident] = now_s

    def drop(self, resident: Resident) -> None:
        """It is there no longer. One that was not is no error."""
        if self._used_s.pop(resident, None) is not None:
            for gpu in gpus(resident.chunk, resident.service):
                del self._on[gpu][resident]


def gpus(chunk: Chunk, service: Service | None = None) -> list[Gpu]:
    """Those of a chunk that a service is on: its first `degree`."""
    count = chunk.size if service is None else service.degree
    return [(chunk.node_id, number) for number in range(chunk.first, chunk.first + count)]


@dataclass
class _Held:
    grant: GpuGrant
    ends_at_s: float
    scalable: bool


class GpuManager:
    """See the module. GPUs have `gpu_bytes` each. services: their bytes per GPU by name and degree.

    node_ids: nodes of 8 GPUs; of a node that has, or lends, fewer: the numbers of those that it does.
    """

    dimensions: ClassVar[tuple[str, ...]] = (GPUS,)

    def __init__(
        self,
        node_ids: Sequence[str] | Mapping[str, Collection[int]],
        gpu_bytes: int,
        services: Sequence[Service] = (),
    ) -> None:
        """Raises InvalidPoolError for a node or a service twice, a degree that no node has, or one that never fits."""
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
                raise InvalidPoolError(f"services[{index}]", f"{service.name!r} with {service.degree} GPUs twice")
            if not 1 <= service.degree <= NODE_GPUS:
                raise InvalidPoolError(f"services[{index}].degree", f"must be from 1 to {NODE_GPUS}")
            if not 0 < service.bytes_per_gpu <= gpu_bytes:
                raise InvalidPoolError(f"services[{index}].bytes_per_gpu", f"must be from 1 to {gpu_bytes}")
            self._services[service.name, service.degree] = service
        self._resident = Residency(gpu_bytes)
        self._held: dict[str, _Held] = {}

    @property
    def residents(self) -> tuple[Resident, ...]:
        """The services that are in the memory of GPUs."""
        return tuple(self._resident)

    def check(self, action: Action) -> None:
        """Raises InvalidActionError for a service, or a number of its GPUs, that is not served."""
        if action.service is None:
            return
        if GPUS not in action.cost:
            raise InvalidActionError("service", f"{action.service!r} needs GPUs; give {GPUS} a demand in cost")
        for degree in key_units(action.cost[GPUS]):
            if (action.service, degree) not in self._services:
                raise InvalidActionError(
                    f"cost[{GPUS}]",
                    f"{action.service!r} is not served on {degree} GPUs; ask for a UnitSet of those it is",
                )

    def pools(self, now_s: float) -> tuple[GpuNodes, ...]:
        return (GpuNodes(tuple(GpuNode(node_id, free) for node_id, free in self._free.items())),)

    def executing(self, now_s: float) -> list[Executing]:
        return [
            Executing(GPUS, held.grant.chunk.size, held.ends_at_s - now_s, None, held.scalable)
            for held in self._held.values()
        ]

    def take(self, start: Start, units: Mapping[str, int], now_s: float, expected_s: float) -> GpuGrant:
        action, degree = start.action, units[GPUS]
        if action.action_id in self._held:
            raise InvalidHoldingError("start.action.action_id", f"{action.action_id!r} holds GPUs already")
        service = None
        if action.service is not None:
            service = self._services.get((action.service, degree))
            if service is None:
                raise InvalidHoldingError("start.action.service", f"{action.service!r} is not served on {degree} GPUs")
        chunk = self._best(1 << level_of(degree), service)
        grant = self._granted(chunk, service)
        for resident in grant.evicted:
            self._resident.drop(resident)
        if service is not None:
            self._resident.use(Resident(service, chunk), now_s)
        self._free[chunk.node_id] -= frozenset(range(chunk.first, chunk.first + chunk.size))
        self._held[action.action_id] = _Held(grant, now_s + expected_s, action.scalable)
        return grant

    def give_back(self, action_id: str, ended: Ended, now_s: float) -> None:
        """A service that failed is taken to be lost from memory."""
        held = self._held.pop(action_id, None)
        if held is None:
            raise InvalidHoldingError("action_id", f"{action_id!r} holds no GPUs")
        chunk, service = held.grant.chunk, held.grant.service
        self._free[chunk.node_id] |= frozenset(range(chunk.first, chunk.first + chunk.size))
        if service is not None and ended.end is End.FAILED:
            self._resident.drop(Resident(service, chunk))
        elif service is not None:
            self._resident.use(Resident(service, chunk), now_s)

    def forget(self, trajectory_id: str) -> None:
        """GPUs are held by actions alone."""

    def next_change_s(self, now_s: float) -> float:
        return NEVER_S

    def usage(self, now_s: float) -> tuple[Usage, ...]:
        free = sum(map(len, self._free.values()))
        return (Usage(GPUS, self._capacity, self._capacity - free, free),)

    def _granted(self, chunk: Chunk, service: Service | None) -> GpuGrant:
        there = service is None or self._resident.used_s(Resident(service, chunk)) is not None
        restore_bytes = 0 if service is None or there else service.bytes_per_gpu * service.degree
        return GpuGrant(chunk, service, restore_bytes, self._resident.to_evict(chunk, service))

    def _best(self, size: int, service: Service | None) -> Chunk:
        """Of the runs of `size` in the smallest free chunks that hold one: where the service is, else where nothing
        has to go, else where what has to go was used least recently; the first of equals."""
        free = [chunk for node_id, gpus in self._free.items() for chunk in free_chunks(node_id, gpus)]
        least = min((chunk.size for chunk in free if chunk.size >= size), default=None)
        if least is None:
            raise InvalidHoldingError("start.units", f"no chunk of {size} GPUs is free")
        runs = [
            Chunk(chunk.node_id, first, size)
            for chunk in free
            if chunk.size == least
            for first in range(chunk.first, chunk.first + chunk.size, size)
        ]

        def worth(run: Chunk) -> tuple[bool, float]:
            grant = self._granted(run, service)
            used_s = [self._resident.used_s(resident) for resident in grant.evicted]
            return grant.restore, max((at for at in used_s if at is not None), default=-NEVER_S)

        return min(runs, key=worth)
