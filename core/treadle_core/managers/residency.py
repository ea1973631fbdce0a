"""Which services are in the memory of which GPUs, and what has to go for another: least recently used first (§5.3).

Invariant: on no GPU do the services that are there take more than its memory. A service's state does not change as it
serves, so evicting one is to release its memory; a copy stays on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle_core.elastic.chunks import Chunk
from treadle_core.managers.grants import Resident, Service

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
