"""Decide which of the scheduler's processes leads, and have JetStream refuse the writes of all
others (ADR 0038).

The lease is a key of the scheduler's bucket. The leader writes it again RENEWALS_A_TTL times in
`ttl_s`. Another process takes it over once it has seen no renewal for `ttl_s` while the bucket
answered; at once where the lease was released, or was held by an earlier process at the same
address.

Invariants. Each write of a leader names the revision of the lease that it holds, and is refused
where the lease is at another one. A takeover writes the lease, so that everything that the former
leader sends after it is refused, whatever the clocks show, and everything before it is there to be
read. `is_held` goes by the monotonic clock: it keeps a leader that was stopped for a while from
acting before it has read the bucket.
"""

import asyncio
import math
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import nats.errors
import nats.js.errors
import structlog
from nats.js.kv import KeyValue
from pydantic import TypeAdapter
from treadle_runtime.buckets import is_refusal
from treadle_runtime.bus import Bus

log = structlog.get_logger()

BUCKET = "treadle_trajectories"
LEADER_KEY = "leader"
RENEWALS_A_TTL = 3  # so that two may be late
POLL_S = 0.25  # between two reads by a process that stands by; a read is one small message
LONGEST_GAP_S = 4 * POLL_S  # between two reads; a longer gap was not watched, and does not count
RETRY_S = 0.2  # pause after a renewal that NATS did not answer
# How long a call waits for a lease that is overdue. A leader that was stopped learns within
# milliseconds whether it still leads.
ADMIT_S = 0.5
MOST_REFUSALS = 5  # refusals of a write, each with the revision that the lease then had
WILDCARD_HOSTS = ("0.0.0.0", "[::]")


class NotLeader(Exception):  # noqa: N818 - named as what is so
    """This process does not lead, as far as it knows. address: the leader's; empty: not known."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"another scheduler leads: {address}"
            if address
            else "it is not known which scheduler leads"
        )
        self.address = address


@dataclass(frozen=True)
class LeaderRecord:
    """Identity of the leader. leader_id: machine and address, the same for a process that is
    started again. run: this process alone. address: where others reach it."""

    leader_id: str
    run: str
    address: str
    ttl_s: float
    renewals: int = 0
    released: bool = False


_ADAPTER = TypeAdapter(LeaderRecord)


@dataclass
class Silence:
    """Measure of how long a leader has not renewed its lease, by reads that the bucket answered."""

    revision: int | None = None
    looked_s: float = 0.0
    silent_s: float = 0.0

    def look(self, revision: int, now: float) -> float:
        """Return the seconds without a renewal, after a read that has found the lease at this
        revision."""
        if revision == self.revision:
            self.silent_s += min(now - self.looked_s, LONGEST_GAP_S)
        else:
            self.revision, self.silent_s = revision, 0.0
        self.looked_s = now
        return self.silent_s

    def forget(self) -> None:
        """Begin again, after a read that was not answered: the leader could not renew either."""
        self.revision = None


class Lease:
    """Claim of this process to lead. `write` is the one way to write to the bucket; hold `writing`
    around it, as a renewal changes the revision that each write names."""

    def __init__(self, bus: Bus, bucket: KeyValue, ttl_s: float) -> None:
        self.bucket = bucket
        self.writing = asyncio.Lock()
        self.leader_address = ""  # empty where it is not known
        self._bus, self._ttl_s = bus, ttl_s
        self._own = LeaderRecord("", uuid.uuid4().hex, "", ttl_s)
        self._revision = 0  # revision of the lease, as it was last written or read
        self._renewed_s = -math.inf  # when the newest renewal that is known to be stored was sent
        self._renewed = asyncio.Event()  # set at a renewal, and at the end
        self._ended = asyncio.Event()  # set once the lease is lost or released

    @classmethod
    async def open(cls, bus: Bus, ttl_s: float) -> "Lease":
        """Open the lease, and make the bucket where there is none."""
        return cls(bus, await bus.key_value(BUCKET), ttl_s)

    @property
    def is_held(self) -> bool:
        """Return whether no other process can lead at this moment."""
        return not self._ended.is_set() and time.monotonic() < self._renewed_s + self._ttl_s

    async def take(self, address: str, stands_by: asyncio.Event | None = None) -> None:
        """Wait until this process, which listens at `address`, leads. Sets `stands_by` once another
        process leads."""
        host, _, port = address.rpartition(":")
        machine = socket.gethostname()
        reached_at = f"{machine}:{port}" if host in WILDCARD_HOSTS else address
        self._own = replace(self._own, leader_id=f"{machine}/{address}", address=reached_at)
        silence = Silence()
        while True:
            try:
                if await self._may_take(silence) and await self._write_lease():
                    return
            except (nats.errors.Error, OSError) as error:
                log.debug("the lease was not read", error=repr(error))
                silence.forget()
            else:
                if stands_by is not None and self.leader_address and not stands_by.is_set():
                    log.info("standing by", leader=self.leader_address)
                    stands_by.set()
            await asyncio.sleep(POLL_S)

    async def keep(self) -> None:
        """Renew the lease regularly; a background task. Raises NotLeader once another process
        leads."""
        wait_s = self._ttl_s / RENEWALS_A_TTL
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ended.wait()
            wait_s = self._ttl_s / RENEWALS_A_TTL
            try:
                await self._renew()
            except (nats.errors.Error, OSError) as error:
                log.debug("the lease was not renewed, trying again", error=repr(error))
                wait_s = RETRY_S

    async def release(self) -> None:
        """Let another process lead at once; nothing can be written afterwards. Raises NotLeader,
        nats.errors.Error."""
        await self._renew(released=True)
        self._end("")

    async def until_held(self) -> None:
        """Wait for a moment in which no other process can lead; once one does, never return."""
        await self._until_known()
        if self._ended.is_set():
            await asyncio.Event().wait()

    async def until_overdue(self) -> None:
        """Wait until the lease has been overdue for ADMIT_S: another process may lead."""
        with suppress(TimeoutError):
            while True:
                await asyncio.sleep(self._renewed_s + self._ttl_s - time.monotonic())
                async with asyncio.timeout(ADMIT_S):
                    await self.until_held()

    async def admit(self) -> None:
        """Wait before a call is served, where the lease is overdue. Raises NotLeader once another
        process leads, and where it is not known for ADMIT_S which process leads."""
        if not self.is_held:
            with suppress(TimeoutError):
                async with asyncio.timeout(ADMIT_S):
                    await self._until_known()
            self._require_lead()
            if not self.is_held:
                raise NotLeader("")

    async def write(self, values: Mapping[str, bytes | None]) -> dict[str, Exception]:
        """Write keys, or delete those whose value is None, with `writing` held; return the keys
        that are not known to be written, with the reason. Raises NotLeader, and RuntimeError where
        NATS knows no such writes."""
        failed: dict[str, Exception] = {}
        for _ in range(MOST_REFUSALS):
            self._require_lead()
            missing = await self._bus.write_entries(
                BUCKET, values, fence=(LEADER_KEY, self._revision)
            )
            refused = {key for key, error in missing.items() if is_refusal(error)}
            failed |= {key: error for key, error in missing.items() if key not in refused}
            values = {key: values[key] for key in values if key in refused}
            if not refused:
                return failed
            await self._find_revision()
        raise RuntimeError(
            "NATS refuses writes that name the lease's right revision: it must be 2.11 or newer"
        )

    async def _until_known(self) -> None:
        """Wait until it is known whether this process leads."""
        while not self.is_held and not self._ended.is_set():
            self._renewed.clear()
            await self._renewed.wait()

    async def _may_take(self, silence: Silence) -> bool:
        found, self._revision = await self._read()
        if found is None or found.released or found.leader_id == self._own.leader_id:
            return True
        self.leader_address = found.address
        return silence.look(self._revision, time.monotonic()) >= found.ttl_s

    async def _renew(self, *, released: bool = False) -> None:
        async with self.writing:
            self._require_lead()
            while not await self._write_lease(released=released):
                await self._find_revision()

    async def _write_lease(self, *, released: bool = False) -> bool:
        """Write the lease where it is at the revision known here; return False where it is at
        another one."""
        record = replace(self._own, renewals=self._own.renewals + 1, released=released)
        sent_s = time.monotonic()
        try:
            revision = await self._bus.update_entry(
                BUCKET, LEADER_KEY, _ADAPTER.dump_json(record), revision=self._revision
            )
        except nats.errors.Error as error:
            if is_refusal(error):
                return False
            raise
        self._own, self._revision, self._renewed_s = record, revision, sent_s
        self.leader_address = record.address
        self._renewed.set()
        return True

    async def _find_revision(self) -> None:
        """Read the revision of the lease after a refusal: a renewal whose acknowledgement was lost
        has changed it. Raises NotLeader where another process has."""
        found, self._revision = await self._read()
        if found is None or found.run != self._own.run:
            self._end("" if found is None else found.address)
            log.error("another scheduler leads: this one ends", leader=self.leader_address)
        self._require_lead()

    def _end(self, leader_address: str) -> None:
        self.leader_address = leader_address
        self._ended.set()
        self._renewed.set()

    async def _read(self) -> tuple[LeaderRecord | None, int]:
        """Return the lease and its revision; None and 0 where no process has ever led."""
        try:
            entry = await self.bucket.get(LEADER_KEY)
        except nats.js.errors.KeyNotFoundError:
            return None, 0
        return _ADAPTER.validate_json(entry.value or b""), entry.revision or 0

    def _require_lead(self) -> None:
        if self._ended.is_set():
            raise NotLeader(self.leader_address)
