"""Table of jobs: those whose client holds a lease and those kept for a client that resumes them,
with the share of each in the mesh.

`JobTable` owns every JobRecord. A job is held while its lease runs; any request of its client
renews it. One that is to be resumed stays here after it has ended, so that its rollouts are found
again and a client that was replaced is refused. Whoever owns the table ends the jobs that `run_out`
names, and removes those that `forgettable` names.

`Shares` divides the slots and the KV of all engines among the jobs (ADR 0039). A job's share is its
weight over the weights of all jobs that have a live ticket, reserved KV or a first step that waits.
What it uses is its dominant share (dominant resource fairness, Ghodsi et al., NSDI 2011): the part
of all slots that its steps hold, or the part of all KV that is reserved for it, whichever is more.
Jobs that use less than their share go before those that do not, then the job that was served least
for its weight (`fair_share`), so that a share of less than one trajectory is kept as a mean over
time. Nothing of it is stored: after a restart all jobs have been served alike.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from treadle_core.fair_share import FairShare
from treadle_core.model import EngineSpec, JobRecord, TrajectoryRecord
from treadle_core.refusals import JobNotFound, JobTakenOver
from treadle_core.tables.engines import EngineTable
from treadle_core.tables.trajectories import NOTHING, Tally, TrajectoryTable

# Seconds of all engines by which a job may have been served more than one whose next step does not
# fit, before it stops to pass that step. Long enough for a job of few short trajectories, and it
# bounds how long a large one is passed.
PASS_LAG_S = 10.0
# An engine shares its slots among the jobs that have steps there, and trajectories that have
# started stay where they are. So the tickets of a job that uses less than it is due get a larger
# weight while it has more to do: larger by the ratio of the two each BOOST_S, and by MOST_BOOST at
# most. Of three simulated engines with eight slots, two jobs of weights 3:1 had slots as 3.5:1
# without it and as 3.2:1 with it.
BOOST_S = 10.0
MOST_BOOST = 2.0
FIRST = itemgetter(0)
# While steps wait, ticks come more often than this; after a longer pause nobody has waited for
# anybody.
LONGEST_PAUSE_S = 5.0


class JobTable:
    """Jobs by id. lease_s: how long a job is held after a renewal. resume_s: how long an ended job
    can be resumed."""

    def __init__(self, lease_s: float, resume_s: float) -> None:
        self._lease_s, self._resume_s = lease_s, resume_s
        self._jobs: dict[str, JobRecord] = {}
        self._expires_s: dict[str, float] = {}  # of the jobs that are held
        # of the names that were looked up since a job has changed
        self._weights: dict[str, float] = {}

    def get(self, job_id: str) -> JobRecord | None:
        return self._jobs.get(job_id)

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(list(self._jobs.values()))

    def weight(self, name: str) -> float:
        """Return the weight of the share of a name: the largest that a client of it has given; 1
        for clients without a name."""
        if name not in self._weights:
            held = (self._jobs[job_id] for job_id in self._expires_s)
            weights = [record.weight for record in held if record.name == name]
            self._weights[name] = max(weights) if weights and name else 1.0
        return self._weights[name]

    def is_held(self, job_id: str) -> bool:
        """Return whether the lease of the job runs."""
        return job_id in self._expires_s

    def require(self, job_id: str) -> JobRecord:
        """Return the job, which is held or may be held again. Raises JobNotFound, JobTakenOver."""
        record = self._jobs.get(job_id)
        if record is None:
            raise JobNotFound(
                f"no job {job_id}: its lease ran out or it was closed; open it again", job_id=job_id
            )
        if record.successor_id:
            raise JobTakenOver(
                f"another client has resumed job {record.name}: this one must not go on",
                job=record.name,
                job_id=job_id,
                successor_id=record.successor_id,
            )
        return record

    def resumable(self, name: str) -> list[JobRecord]:
        """Return the jobs of this name whose work a resuming client takes over: at most one, unless
        a write was lost."""
        return [
            record
            for record in self._jobs.values()
            if record.resume and record.name == name and record.successor_id not in self._jobs
        ]

    def restore(self, records: Iterable[JobRecord], now: float) -> None:
        """Take over stored jobs; leases get their whole length, as none could renew while the
        scheduler was away."""
        self._weights.clear()
        for record in records:
            if record.ended_s is not None and record.ended_s > now:  # by a clock that was ahead
                record = replace(record, ended_s=now)
            self._jobs[record.job_id] = record
            if record.ended_s is None:
                self._expires_s[record.job_id] = now + self._lease_s

    def hold(self, record: JobRecord, now: float) -> JobRecord:
        """Store a job whose lease begins or begins again, and return it as held."""
        record = replace(record, ended_s=None) if record.ended_s is not None else record
        if record is not self._jobs.get(record.job_id):
            self._weights.clear()
        self._jobs[record.job_id] = record
        self._expires_s[record.job_id] = now + self._lease_s
        return record

    def touch(self, job_id: str, now: float) -> None:
        """Renew the lease of a job that is held; any other id changes nothing."""
        if job_id in self._expires_s:
            self._expires_s[job_id] = now + self._lease_s

    def extend_leases(self, seconds: float) -> None:
        """Let all leases end later."""
        for job_id in self._expires_s:
            self._expires_s[job_id] += seconds

    def end(self, record: JobRecord, now: float, successor_id: str = "") -> JobRecord | None:
        """End a job. Returns it as it is kept for a client that resumes it, None where it is
        removed."""
        self._expires_s.pop(record.job_id, None)
        self._weights.clear()
        if not record.resume:
            del self._jobs[record.job_id]
            return None
        ended_s = now if record.ended_s is None else record.ended_s
        record = replace(record, ended_s=ended_s, successor_id=successor_id)
        self._jobs[record.job_id] = record
        return record

    def remove(self, job_id: str) -> None:
        del self._jobs[job_id]

    def run_out(self, now: float) -> list[JobRecord]:
        """Return the jobs whose lease has run out."""
        return [
            self._jobs[job_id] for job_id, expires_s in self._expires_s.items() if expires_s <= now
        ]

    def forgettable(self, now: float) -> list[str]:
        """Return the ids of jobs that ended so long ago that they cannot be resumed any more."""
        return [
            record.job_id
            for record in self._jobs.values()
            if record.ended_s is not None and record.ended_s + self._resume_s <= now
        ]


@dataclass(slots=True)
class Part:
    """Part of the mesh that one job has. share: the part that it is due, above 0 and at most 1.
    held_slots: those of its live tickets that the engines' queues let run. kv_tokens: reserved for
    it, on engines that report their capacity. slots, kv_room_tokens: of all engines."""

    job: str
    weight: float
    slots: int
    kv_room_tokens: int
    share: float = 1.0
    live_tickets: int = 0
    held_slots: float = 0.0
    kv_tokens: int = 0

    @property
    def used(self) -> float:
        """Return the dominant share: 0 to about 1."""
        kv = self.kv_tokens / self.kv_room_tokens if self.kv_room_tokens else 0.0
        return max(kv, self.held_slots / self.slots if self.slots else 0.0)

    @property
    def is_below(self) -> bool:
        """Return whether the job uses less than it is due."""
        return self.used < self.share


def _divide_slots(slots: int, tickets: list[tuple[float, int, float, Part]]) -> None:
    """Give each job as many slots of an engine as its queue does: those of its share, and of those
    that others do not need (max-min fairness). tickets: live ones for its weight, live ones, weight
    and part of each job that has any."""
    left, weights = float(slots), 0.0
    for each in tickets:
        weights += each[2]
    tickets.sort(key=FIRST)
    for _, count, weight, part in tickets:
        due = left * weight / weights
        held = count if count < due else due
        part.held_slots += held
        left -= held
        weights -= weight


class Shares:
    """Shares of the jobs: their parts, as the last `divide` has found them."""

    def __init__(self, engines: EngineTable, table: TrajectoryTable, jobs: JobTable) -> None:
        self._engines, self._table, self._jobs = engines, table, jobs
        self._served = FairShare()  # in seconds of all engines
        self._parts: dict[str, Part] = {}
        self._boosts: dict[str, float] = {}  # of the weights, where above 1
        self._now = 0.0

    def divide(self, waiting: Collection[str], now: float) -> bool:
        """Find the parts of all jobs. Returns False where no more than one has any. waiting: names
        of jobs whose first steps wait."""
        if len(self._table.open_of_job) < 2 and len(self._parts) < 2:
            return False
        took_s, self._now = now - self._now, now
        if took_s > LONGEST_PAUSE_S:
            self._served, self._parts, self._boosts = FairShare(), {}, {}
        for part in self._parts.values():
            self._served.charge(part.job, part.used * took_s, part.weight)
            self._boost(part, took_s, part.job in waiting)
        former, self._parts = self._parts, {part.job: part for part in self.parts(waiting)}
        self._boosts = {job: boost for job, boost in self._boosts.items() if job in self._parts}
        for job in waiting:
            self._served.begin_waiting(job)
        for job in (former.keys() | self._parts.keys()) - set(waiting):
            self._served.end_waiting(job)
        return len(self._parts) > 1

    def _boost(self, part: Part, took_s: float, waits: bool) -> None:
        """Change the boost of a job for the time since the last look. A job with nothing more to do
        collects none."""
        has_more = waits or part.live_tickets > part.held_slots
        lack = min(part.share / part.used, MOST_BOOST) if part.used else MOST_BOOST
        boost = self._boosts.pop(part.job, 1.0) * (lack if has_more else 1 / MOST_BOOST) ** (
            took_s / BOOST_S
        )
        if boost > 1.0:
            self._boosts[part.job] = min(boost, MOST_BOOST)

    def ticket_weight(self, job: str) -> float:
        """Return the weight with which a job's tickets share the slots of their engines."""
        return self._jobs.weight(job) * self._boosts.get(job, 1.0)

    def parts(self, waiting: Iterable[str]) -> list[Part]:
        """Return the parts of all jobs now, by name."""
        specs = [engine.spec for engine in self._engines]
        tallies = [self._table.tallies_of_jobs(spec.engine_id) for spec in specs]
        names = sorted(
            {
                *waiting,
                *(job for each in tallies for job, tally in each.items() if tally.uses_engine),
            }
        )
        rooms = [spec.kv_room_tokens for spec in specs]
        slots = sum(spec.slot_limit for spec in specs)
        parts = [Part(name, self._jobs.weight(name), slots, sum(rooms)) for name in names]
        weights = sum(part.weight for part in parts)
        for part in parts:
            part.share = part.weight / weights
        by_weight = [(part, self.ticket_weight(part.job)) for part in parts]
        for spec, room, tally in zip(specs, rooms, tallies, strict=True):
            tickets = []
            for part, weight in by_weight:
                mine = tally.get(part.job, NOTHING)
                if count := len(mine.live):
                    tickets.append((count / weight, count, weight, part))
                    part.live_tickets += count
                if room:
                    part.kv_tokens += mine.kv_reserve_tokens
            _divide_slots(spec.slot_limit, tickets)
        return parts

    def next(self, jobs: Iterable[str]) -> str:
        """Return which of these jobs, all of which wait, starts a trajectory next."""
        parts, served = self._parts, self._served
        return min(jobs, key=lambda job: (not parts[job].is_below, served.tag(job), job))

    def is_below(self, job: str) -> bool:
        """Return whether a job uses less than it is due."""
        return self._parts[job].is_below

    def note_start(self, record: TrajectoryRecord) -> None:
        """Count a first step that has got its ticket since `divide`."""
        if record.ticket is not None:
            part = self._parts[record.job]
            part.held_slots += 1
            part.kv_tokens += record.ticket.kv_reserve_tokens

    def may_pass(self, job: str, blocked: str) -> bool:
        """Return whether a job may start within its share although the next step of the job
        `blocked` does not fit."""
        lag_s = sum(part.weight for part in self._parts.values()) * (
            self._served.tag(job) - self._served.tag(blocked)
        )
        return lag_s <= PASS_LAG_S

    def owned_slots(self, job: str, spec: EngineSpec) -> int:
        """Return how many slots of an engine are a job's share, the last one of them perhaps in
        part."""
        return math.ceil(self._parts[job].share * spec.slot_limit)

    def owns_room(
        self, record: TrajectoryRecord, kv_tokens: int, spec: EngineSpec, mine: Tally
    ) -> bool:
        """Return whether the job's share of an engine's KV has room for a trajectory. mine: what
        the job has there."""
        part = self._parts[record.job]
        kv_tokens -= record.prompt_tokens if record.prompt_id in mine.prompts else 0
        mine_tokens, room_tokens = mine.kv_reserve_tokens + kv_tokens, spec.kv_room_tokens
        return part.is_below and (not room_tokens or mine_tokens <= part.share * room_tokens)
