"""Keep rollouts in memory: each is a buffer of the core, to which the records of its log are
applied.

Invariants: every change is in the log before it is in memory and before a caller sees it. After a
write whose outcome is unknown (NATS gone, RPC cancelled) and after losing a position to another
process, the log is read again before the next decision. Each rollout makes its own changes one at a
time.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil, inf

import nats.errors
import structlog
from treadle_core.rollouts.buffer import Aborted, Arrived, Batch, Event, GroupDropped, SampleBuffer
from treadle_core.rollouts.group import Group, Sample, Verdict
from treadle_core.rollouts.history import RolloutHistory
from treadle_core.rollouts.pacing import Admission
from treadle_core.rollouts.spec import RolloutSpec
from treadle_runtime.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable

from treadle_rollout.running import RunningTokens, TokenRoom
from treadle_rollout.storage import (
    Created,
    HistoryStore,
    PayloadStore,
    Record,
    RolloutLog,
    decode,
    encode,
    payload_lost,
)

# A waiting batch reads the log again that often: an entry may be there that this process never saw
# acknowledged, or that the process it is about to replace has written. One read costs about 0.2 ms.
RECHECK_S = 1.0
LEAST_WAIT_S = 0.02  # until a batch that waits for groups is looked at again
# A group that settled so shortly before the last record of a rollout may not have been announced
# when the process before this ended.
TELL_AGAIN_S = 60.0
RETRY_DRAINING_S = 0.5  # by then the process after this one listens

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Request of GetBatch or StreamBatch. `fingerprint` covers all of it but the part, so that a
    repeat and the other parts of the batch have the same one."""

    request_id: str
    fingerprint: str
    max_groups: int
    weight_version: int
    wait: bool
    wait_at_most_s: float = inf
    part: int = 0
    parts: int = 1


# Receives a rollout and a group of which no further sample is wanted; again after a restart of the
# service.
TellSettled = Callable[["Rollout", Group], Awaitable[None]]


class Rollout:
    """One rollout, whose `buffer` anybody may read and only this class changes."""

    def __init__(
        self,
        created: Created,
        created_at_s: float,
        log: RolloutLog,
        payloads: PayloadStore,
        room: TokenRoom,
        tell: TellSettled,
    ) -> None:
        self.rollout_id = created.rollout_id
        self.created = created
        self.created_at_s = created_at_s
        self.touched_at_s = created_at_s
        self.buffer = SampleBuffer(created.spec)
        paced = created.spec.batch_groups is not None
        self.admission = Admission(self.buffer) if paced else None
        self.running = RunningTokens(self.buffer, room)
        self.payload_names: dict[str, str] = {}  # by trajectory, where tokens are stored
        self.batch_times_s: dict[str, float] = {}
        # Unix times of submitted samples, until the rollout is over
        self.arrivals_s: list[float] = []
        self.folded = False  # whether its history counts it
        self.finished_by = ""  # the trajectory whose sample was the last that it needed
        self.changed = asyncio.Event()  # replaced at each change: take it, look, then wait on it
        self._fingerprints: dict[str, str] = {}
        self._log = log
        self._payloads = payloads
        self._tell = tell
        # Unix times at which samples ceased to be wanted
        self._untold: list[tuple[float, Group]] = []
        self._lock = asyncio.Lock()
        self._position = 1  # position of the next entry; the first is the creation
        self._unsure = True  # another process may have written since the log was read
        self._forgotten = False
        self._ended: Exception | None = None  # raised in all tasks that wait for a change

    def apply(self, record: Record) -> None:
        """Apply one record of the log to memory."""
        body = record.body
        if isinstance(body, Created):
            raise ValueError(f"rollout {self.rollout_id} is created twice in its log")
        was_over, was_complete = self.buffer.over, self.buffer.complete
        group: Group | None = None
        if isinstance(body, Arrived):
            group = self.buffer.groups[body.sample.prompt_id]
        elif isinstance(body, GroupDropped):
            group = self.buffer.groups[body.prompt_id]
        was_settled = group is not None and group.settled
        self.buffer.apply(body)
        if self.admission is not None:
            self.admission.note(body, record.at_s)
        if group is not None and group.settled and not was_settled:
            self._untold.append((record.at_s, group))
        if self.buffer.complete and not was_complete:
            rest = (each for each in self.buffer.groups.values() if not each.settled)
            self._untold += [(record.at_s, each) for each in rest]
        self._position += 1
        self.touched_at_s = record.at_s
        if isinstance(body, Arrived) and not was_over:
            self.arrivals_s.append(record.at_s)
            self.finished_by = body.sample.trajectory_id if self.buffer.over else ""
        if isinstance(body, Arrived) and record.payload:
            self.payload_names[body.sample.trajectory_id] = record.payload
        elif isinstance(body, Batch):
            self.batch_times_s[body.batch_id] = record.at_s
            self._fingerprints[body.batch_id] = record.request
        self.running.settle(None if group is None or self.buffer.complete else group.prompt_id)
        self.changed.set()
        self.changed = asyncio.Event()

    async def begin(self) -> None:
        """Let the first groups begin, where the rollout keeps a pace."""
        async with self._lock:
            await self._keep_pace()

    async def tell_settled(self, since_s: float = 0.0) -> None:
        """Announce the groups that have settled, or were withdrawn, since `since_s` (Unix time) and
        were not announced yet."""
        while self._untold:
            at_s, group = self._untold.pop(0)
            if at_s >= since_s and (
                group.settled or self.buffer.complete
            ):  # the group may have opened again
                await self._tell(self, group)

    async def submit(self, sample: Sample, payload: bytes) -> Verdict:
        """Decide on a sample, and store its tokens before its verdict. Raises SampleTakenError."""

        def decide() -> Arrived | None:
            known = sample.trajectory_id in self.buffer.samples
            return None if known else self.buffer.decide_arrival(sample)

        # Under the lock also while tokens are stored: a store that is full removes what it has of
        # them, which must not be those of the same trajectory in another request.
        async with self._lock:
            await self._read_news()
            name, arrived = "", decide()
            if arrived is not None and arrived.verdict.kept:
                name = await self._payloads.put(self.rollout_id, sample.trajectory_id, payload)
            await self._commit(decide, payload=name)
            await self._keep_pace()
            verdict = self.buffer.groups[
                self.buffer.samples[sample.trajectory_id].prompt_id
            ].verdicts[sample.trajectory_id]
            if name and not verdict.kept:
                await self._payloads.release(self.rollout_id, sample.trajectory_id)
        return verdict

    async def take(self, request: BatchRequest, max_bytes: float = inf) -> Batch:
        """Return the part of a request's batch, now or, where it waits, as soon as it is full,
        nothing more can come, or it has waited for as long as it may.

        While NATS does not answer, a request that waits goes on waiting; another raises
        nats.errors.Error.
        """
        until_s = time.monotonic() + request.wait_at_most_s
        while True:
            changed = self.changed
            try:
                async with self._lock:
                    if not self._is_repeat(request):
                        await self._commit(
                            lambda: self.buffer.decide_version(request.weight_version)
                        )
                        waits = request.wait and time.monotonic() < until_s
                        await self._keep_pace(trainer_waits=waits)
                        decide = partial(self._decide_batch, request, waits, max_bytes)
                        if await self._commit(decide, request=request.fingerprint):
                            await self._keep_pace()
            except nats.errors.Error as error:
                if not request.wait:
                    raise
                log.warning(
                    "batch not decided, trying again", rollout_id=self.rollout_id, error=repr(error)
                )
            if self._is_repeat(request):
                return self.part_of(request.request_id, request.part, request.parts)
            try:
                look_again_s = min(RECHECK_S, max(until_s - time.monotonic(), 0.0))
                if 0.0 < (wait_s := self._wait_s()) < look_again_s:
                    look_again_s = max(wait_s, LEAST_WAIT_S)
                async with asyncio.timeout(look_again_s):
                    await self.wait(changed)
            except TimeoutError:
                self._unsure = True

    async def note_aborted(self, aborted: Aborted) -> None:
        """Record a sample that was ended before it was submitted; a repeat, or a foreign prompt,
        changes nothing."""

        def decide() -> Aborted | None:
            group, name = self.buffer.groups.get(aborted.prompt_id), aborted.trajectory_id
            known = group is None or name in group.aborted or name in self.buffer.samples
            return None if known else aborted

        async with self._lock:
            await self._commit(decide)

    async def cancel(self) -> None:
        """Cancel the rollout; cancelling one that is over changes nothing."""
        async with self._lock:
            await self._commit(self.buffer.decide_cancel)

    def part_of(self, batch_id: str, part: int, parts: int) -> Batch:
        """Return the part of a batch that one of so many ranks takes. Raises NotFound."""
        batch = self.buffer.batches.get(batch_id)
        if batch is None:
            raise NotFound(
                "BATCH_NOT_FOUND",
                f"rollout {self.rollout_id} gave no batch to {batch_id}",
                batch=batch_id,
            )
        sizes = {name: self.buffer.samples[name].payload_bytes for name in batch.members}
        return batch.part(part, parts, sizes)

    async def confirm(self, batch_id: str, part: int, parts: int) -> None:
        """Remove the tokens of a part that has arrived; it cannot be repeated any more. Raises
        NotFound."""
        async with self._lock:
            await self._read_news()
        await self._release(self.part_of(batch_id, part, parts).members)

    async def payloads_of(self, batch: Batch) -> dict[str, bytes]:
        """Return the tokens of a batch's trajectories, by trajectory. Raises FailedPrecondition (in
        a group)."""

        async def read(trajectory_id: str) -> bytes:
            return b"".join([chunk async for chunk, _ in self.chunks_of(trajectory_id)])

        async with asyncio.TaskGroup() as group:
            reads = {
                trajectory_id: group.create_task(read(trajectory_id))
                for trajectory_id in batch.members
            }
        return {trajectory_id: task.result() for trajectory_id, task in reads.items()}

    def chunks_of(self, trajectory_id: str) -> AsyncIterator[tuple[bytes, bool]]:
        """Yield the tokens of a trajectory in chunks, each with whether it is the last. Raises
        FailedPrecondition."""
        name = self.payload_names.get(trajectory_id)
        if name is None:
            raise payload_lost(trajectory_id)
        return self._payloads.chunks(self.rollout_id, trajectory_id, name)

    @property
    def tail_s(self) -> float:
        """Return the seconds from the arrival of nine tenths of the samples so far to that of the
        last."""
        return self.arrivals_s[-1] - self.arrivals_s[ceil(0.9 * len(self.arrivals_s)) - 1]

    @property
    def can_free_room(self) -> bool:
        """Return whether tokens are stored that do not belong to kept samples of groups that have
        not settled."""
        groups = [group for group in self.buffer.groups.values() if not group.settled]
        return len(self.payload_names) > sum(len(group.kept) for group in groups)

    async def release_tokens(self, repeatable_since_s: float) -> None:
        """Remove tokens of batches before `repeatable_since_s` (Unix time), and tokens dropped
        after they were kept.

        Tokens of a trajectory that waits to be taken, or whose batch may still be repeated, stay.
        """
        wanted = {
            sample.trajectory_id
            for group in self.buffer.groups.values()
            if not group.taken
            for sample in group.kept
        }
        for batch in self.buffer.batches.values():
            if self.batch_times_s[batch.batch_id] >= repeatable_since_s:
                wanted.update(batch.members)
        await self._release(self.payload_names.keys() - wanted)

    async def _release(self, trajectory_ids: Iterable[str]) -> None:
        async def release(trajectory_id: str) -> None:
            await self._payloads.release(self.rollout_id, trajectory_id)
            self.payload_names.pop(trajectory_id, None)

        async with asyncio.TaskGroup() as group:
            for trajectory_id in trajectory_ids:
                group.create_task(release(trajectory_id))

    async def forget(self) -> None:
        """Remove everything stored of this rollout and end all waits on it.

        Tokens are removed first: a later process finds a log without tokens and removes it again,
        but not tokens without a log.
        """
        async with self._lock:
            self._forgotten = True
            self.end(_unknown(self.rollout_id))
            await self._payloads.forget(self.rollout_id)
            await self._log.forget(self.rollout_id)

    def end(self, reason: Exception) -> None:
        """Raise `reason` in all tasks that wait for a change, now or later; changes under way go
        on."""
        self._ended = reason
        self.running.close(reason)
        self.changed.set()

    async def wait(self, changed: asyncio.Event) -> None:
        """Wait for the change after `changed` was taken. Raises what the rollout ended with."""
        if self._ended is None:
            await changed.wait()
        if self._ended is not None:
            raise self._ended

    def _is_repeat(self, request: BatchRequest) -> bool:
        if request.request_id not in self.buffer.batches:
            return False
        if self._fingerprints[request.request_id] != request.fingerprint:
            raise InvalidArgument(
                "request_id",
                f"{request.request_id} named another GetBatch before; mint a new one for new "
                "parameters",
            )
        return True

    def _decide_batch(self, request: BatchRequest, waits: bool, max_bytes: float) -> Event | None:
        if (
            request.request_id in self.buffer.batches
        ):  # a request before this one wrote it; it was read back just now
            return None
        batch = self.buffer.decide_batch(request.request_id, request.max_groups, waits, max_bytes)
        if batch is not None and waits and not self.buffer.complete and self._wait_s():
            return None
        return batch

    def _wait_s(self) -> float:
        """Return for how long a complete batch should wait for groups that can be in no later
        one."""
        return self.admission.wait_s(time.time()) if self.admission is not None else 0.0

    async def _keep_pace(self, *, trainer_waits: bool = False) -> None:
        """Drop groups that grew too old, and let others begin, where the rollout keeps a pace. The
        caller holds the lock."""
        admission = self.admission
        if admission is not None:
            while await self._commit(admission.decide_drop):
                pass
            await self._commit(
                lambda: admission.decide_admission(time.time(), trainer_waits=trainer_waits)
            )

    async def _read_news(self) -> None:
        """Apply what another process may have written. Raises NotFound for a rollout that is
        forgotten."""
        if self._forgotten:
            raise _unknown(self.rollout_id)
        if self._unsure:
            for data in await self._log.read_from(self.rollout_id, self._position):
                self.apply(decode(data))
            self._unsure = False

    async def _commit(
        self, decide: Callable[[], Event | None], *, request: str = "", payload: str = ""
    ) -> bool:
        """Decide on the newest state, write the decision, then apply it; return whether there was
        one. Deciding None writes nothing."""
        while True:
            await self._read_news()
            event = decide()
            if event is None:
                return False
            record = Record(time.time(), event, request, payload)
            self._unsure = True
            if await self._log.append(self.rollout_id, self._position, encode(record)):
                self._unsure = False
                self.apply(record)
                await self.tell_settled()
                return True


class Rollouts:
    """Set of all rollouts of this process."""

    def __init__(
        self,
        log: RolloutLog,
        payloads: PayloadStore,
        histories: HistoryStore,
        room: TokenRoom,
        tell: TellSettled,
    ) -> None:
        self._log = log
        self._payloads = payloads
        self._room = room
        self._histories = histories
        self._tell = tell
        self._by_id: dict[str, Rollout] = {}
        payloads.can_be_freed = lambda: any(rollout.can_free_room for rollout in self)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(list(self._by_id.values()))

    async def load(self) -> None:
        """Read all stored logs."""
        async for rollout_id, position, data in self._log.everything():
            record = decode(data)
            if isinstance(record.body, Created):
                self._by_id[rollout_id] = self._rollout(record.body, record.at_s)
            elif rollout_id in self._by_id:
                self._by_id[rollout_id].apply(record)
            else:
                log.warning(
                    "log entry without its rollout", rollout_id=rollout_id, position=position
                )
        for rollout in self:
            await rollout.tell_settled(rollout.touched_at_s - TELL_AGAIN_S)

    def _rollout(self, created: Created, created_at_s: float) -> Rollout:
        return Rollout(created, created_at_s, self._log, self._payloads, self._room, self._tell)

    async def find(self, rollout_id: str) -> Rollout:
        """Return a rollout by id, created here or by another process. Raises NotFound."""
        if rollout_id not in self._by_id:
            entries = [decode(data) for data in await self._log.read_from(rollout_id, 0)]
            if not entries or not isinstance(entries[0].body, Created):
                raise _unknown(rollout_id)
            rollout = self._rollout(entries[0].body, entries[0].at_s)
            for record in entries[1:]:
                rollout.apply(record)
            self._by_id.setdefault(rollout_id, rollout)
        return self._by_id[rollout_id]

    async def create(self, rollout_id: str, spec: RolloutSpec, request_id: str) -> Rollout:
        """Create a rollout, or return what the same request created. Raises AlreadyExists.

        Its numbers of samples and its cap follow from its history, where it has one.
        """
        if spec.history:
            spec = (await self.fold(spec.history)).begin(spec)
        created = Created(rollout_id, spec, request_id)
        await self._log.append(rollout_id, 0, encode(Record(time.time(), created)))
        rollout = await self.find(rollout_id)
        if rollout.created.request_id != request_id:
            raise AlreadyExists(
                "ROLLOUT_EXISTS",
                f"rollout {rollout_id} was created by another request",
                rollout_id=rollout_id,
            )
        await rollout.begin()
        return rollout

    async def fold(self, name: str) -> RolloutHistory:
        """Count the rollouts of a history that are over, each once, and return the history."""
        while True:
            history, revision = await self._histories.read(name)
            known = set(history.folded)
            over = [
                each
                for each in self
                if each.buffer.spec.history == name and each.buffer.over and not each.folded
            ]
            for rollout in over:
                history.fold(rollout.rollout_id, rollout.buffer)
            if set(history.folded) == known or await self._histories.write(name, history, revision):
                for rollout in over:
                    rollout.folded = True
                return history

    async def sweep(self, now_s: float, *, batch_replay_s: float, retention_s: float) -> None:
        """Fold rollouts that are over into their histories, and forget those that nobody used for
        `retention_s` and tokens of batches older than `batch_replay_s`."""
        for name in {
            each.buffer.spec.history for each in self if each.buffer.over and not each.folded
        } - {""}:
            await self.fold(name)
        for rollout in self:
            if now_s - rollout.touched_at_s > retention_s:
                log.info("rollout forgotten", rollout_id=rollout.rollout_id)
                await rollout.forget()
                del self._by_id[rollout.rollout_id]
            else:
                await rollout.release_tokens(now_s - batch_replay_s)

    def close(self) -> None:
        """Raise Unavailable in all waiting tasks: this process is shutting down."""
        for rollout in self:
            error = Unavailable(
                "DRAINING", "this server is shutting down", retry_after_s=RETRY_DRAINING_S
            )
            rollout.end(error)


def _unknown(rollout_id: str) -> NotFound:
    return NotFound(
        "ROLLOUT_NOT_FOUND",
        f"no rollout {rollout_id}; it may have been forgotten",
        rollout_id=rollout_id,
    )
