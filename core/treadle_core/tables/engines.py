"""The table of engines and their leases.

Owns every EngineRecord. An engine is here while its lease runs; it has one lease, which only the lease's own id renews.
`revision` grows with every change, `membership` when an engine comes, goes, changes its spec or whether it is usable:
callers keep what they derive from the table until these change. Whoever owns the table removes what `expired` names.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from treadle_core.events import EngineRegistered, LeaseRenewed
from treadle_core.model import INCOMPLETE, EngineRecord, EngineSpec, WeightsRecord
from treadle_core.refusals import LeaseNotFound, RequestIdReused


class EngineTable:
    """Engines by id, in the order of their ids."""

    def __init__(self, lease_ttl_s: float) -> None:
        self._lease_ttl_s = lease_ttl_s
        self._engines: dict[str, EngineRecord] = {}
        self._sorted: tuple[EngineRecord, ...] | None = ()
        self.desired: WeightsRecord | None = None  # None: each engine serves what it has
        self._drained: set[str] = set()  # ids; an engine that registers again is drained still
        self.revision = 0
        self.membership = 0

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[EngineRecord]:
        if self._sorted is None:
            self._sorted = tuple(self._engines[engine_id] for engine_id in sorted(self._engines))
        return iter(self._sorted)

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._engines

    def get(self, engine_id: str) -> EngineRecord | None:
        return self._engines.get(engine_id)

    def spec(self, engine_id: str) -> EngineSpec | None:
        record = self._engines.get(engine_id)
        return record.spec if record is not None else None

    def restore(self, records: Iterable[EngineRecord], now: float) -> None:
        """Take over stored engines, each with a whole lease, as none could renew while the scheduler was away."""
        for record in records:
            self._put(replace(record, lease_expires_s=now + self._lease_ttl_s))

    def find_repeat(self, event: EngineRegistered) -> EngineRecord | None:
        """The record of the same request made before. Raises RequestIdReused where its other values differ now."""
        record = self._engines.get(event.spec.engine_id)
        if record is None or record.register_request_id != event.request_id:
            return None
        now = record.spec  # weights and curve may have changed since
        if replace(event.spec, weight_version=now.weight_version, decode_curve=now.decode_curve) != now:
            raise RequestIdReused(
                "request_id", f"{event.request_id} has registered {event.spec.engine_id} with another description"
            )
        return record

    def register(self, event: EngineRegistered, now: float) -> EngineRecord:
        """Add an engine, in place of an older one of that id."""
        record = EngineRecord(
            spec=event.spec,
            lease_id=event.lease_id,
            lease_expires_s=now + self._lease_ttl_s,
            register_request_id=event.request_id,
        )
        self._put(record)
        return record

    def renew(self, event: LeaseRenewed, now: float) -> EngineRecord:
        """Extend a lease and store load and curve; the engine is not suspect any more. Raises LeaseNotFound."""
        record = self.require_lease(event.lease_id, event.engine_id)
        spec, load = record.spec, record.load
        if event.load is not None:
            load = event.load
            if load.weight_version and load.weight_version != spec.weight_version:
                spec = replace(spec, weight_version=load.weight_version)
        if event.decode_curve is not None and event.decode_curve != spec.decode_curve:
            spec = replace(spec, decode_curve=event.decode_curve)
        renewed = replace(record, spec=spec, load=load, lease_expires_s=now + self._lease_ttl_s, suspect_s=None)
        self._put(renewed)
        return renewed

    def extend_leases(self, seconds: float) -> None:
        """Let all leases end later."""
        for record in self:
            self._put(replace(record, lease_expires_s=record.lease_expires_s + seconds))

    def suspect(self, engine_id: str, now: float) -> None:
        """Send no new steps there until the next renewal, as a client has lost a stream."""
        record = self._engines.get(engine_id)
        if record is not None:
            self._put(replace(record, suspect_s=now))

    def set_weight_version(self, engine_id: str, weight_version: str) -> EngineRecord | None:
        """Store a weight version; None where the engine is not here or has it already."""
        record = self._engines.get(engine_id)
        if record is None or record.spec.weight_version == weight_version:
            return None
        updated = replace(record, spec=replace(record.spec, weight_version=weight_version))
        self._put(updated)
        return updated

    def desire(self, weights: WeightsRecord | None) -> None:
        """Set the weights that all engines are to serve."""
        self.desired = weights
        for record in list(self._engines.values()):
            self._put(replace(record, load_error=""))

    def note_load_error(self, engine_id: str, message: str) -> None:
        """Store why an engine could not load the desired weights."""
        self._put(replace(self._engines[engine_id], load_error=message))

    @property
    def drained(self) -> tuple[str, ...]:
        """Ids of the engines that are to be empty, gone ones too."""
        return tuple(sorted(self._drained))

    def drain(self, engine_ids: Iterable[str]) -> None:
        """Set which engines are to be empty."""
        self._drained = set(engine_ids)
        for record in list(self._engines.values()):
            self._put(record)

    def remove(self, engine_id: str) -> None:
        if self._engines.pop(engine_id, None) is not None:
            self.membership += 1
            self._changed()

    def expired(self, now: float) -> list[str]:
        """Ids of engines whose lease has run out."""
        return [record.spec.engine_id for record in self if record.lease_expires_s <= now]

    def require_lease(self, lease_id: str, engine_id: str) -> EngineRecord:
        """The engine that holds this lease. Raises LeaseNotFound."""
        record = self._engines.get(engine_id)
        if record is None or record.lease_id != lease_id:
            raise LeaseNotFound(
                f"no lease {lease_id} on engine {engine_id}: it ran out or was replaced; register again",
                lease_id=lease_id,
                engine_id=engine_id,
            )
        return record

    def _put(self, record: EngineRecord) -> None:
        version = record.spec.weight_version
        differs = self.desired is not None and version != self.desired.weight_version
        behind = differs or version.startswith(INCOMPLETE)
        drained = record.spec.engine_id in self._drained
        record = replace(record, behind=behind, load_error=record.load_error if behind else "", draining=drained)
        old = self._engines.get(record.spec.engine_id)
        if old is None or old.spec is not record.spec or old.usable is not record.usable:
            self.membership += 1
        self._engines[record.spec.engine_id] = record
        self._changed()

    def _changed(self) -> None:
        self._sorted = None
        self.revision += 1
