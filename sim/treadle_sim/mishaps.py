"""What happens to simulated engines: they register, fail, come back, and get other weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from treadle_core.events import EngineDeregistered, EngineRegistered, Event, WeightsUpdated

from treadle_sim.batch import EngineStep
from treadle_sim.cluster import Cluster, engine_id, specs
from treadle_sim.engine import SimEngine
from treadle_sim.events import Timeline


class Mishaps:
    """Owner of who is dead. `tell` takes an event to the controller, `lost` the steps that an engine took with it."""

    def __init__(
        self,
        cluster: Cluster,
        engines: Sequence[SimEngine],
        timeline: Timeline,
        lease_ttl_s: float,
        tell: Callable[[Event], None],
        lost: Callable[[Sequence[EngineStep]], None],
    ) -> None:
        self._cluster = cluster
        self._engines = engines
        self._timeline = timeline
        self._lease_ttl_s = lease_ttl_s
        self._tell = tell
        self._lost = lost
        self._specs = specs(cluster.engines)
        self._dead: set[int] = set()
        self._lives = [0] * len(engines)
        self._weight_version = 0

    def begin(self) -> None:
        """All engines register; what is to happen to them is put on the timeline."""
        for index in range(len(self._engines)):
            self._register(index)
        for failure in self._cluster.failures:
            self._timeline.at(failure.at_s, self._fail, failure.engine)
            self._timeline.at(failure.back_s, self._back, failure.engine)
        for update in self._cluster.weight_updates:
            self._timeline.at(update.at_s, self._update_weights, update.pause_s)

    def dead(self, engine: int) -> bool:
        """Whether a call to the engine is refused."""
        return engine in self._dead

    def _register(self, index: int) -> None:
        life = self._lives[index]
        spec = replace(self._specs[index], weight_version=str(self._weight_version))  # it loads what is served now
        self._tell(EngineRegistered(f"r{index}.{life}", f"l{index}.{life}", spec))

    def _fail(self, index: int) -> None:
        self._dead.add(index)
        self._timeline.after(self._lease_ttl_s, self._lease_over, index, self._lives[index])
        self._lost(self._engines[index].fail())

    def _lease_over(self, index: int, life: int) -> None:
        if index in self._dead and life == self._lives[index]:
            self._tell(EngineDeregistered(f"l{index}.{life}", engine_id(index)))

    def _back(self, index: int) -> None:
        self._dead.discard(index)
        self._lives[index] += 1
        self._register(index)

    def _update_weights(self, pause_s: float) -> None:
        self._weight_version += 1
        for engine in self._engines:
            engine.pause(pause_s)
            self._tell(WeightsUpdated(engine.engine_id, str(self._weight_version)))
