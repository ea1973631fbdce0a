"""The table of jobs: whose client holds a lease, and which are kept for a client that resumes them.

Owns every JobRecord. A job is held while its lease runs; any request of its client renews it. One that is to be resumed
stays here after it has ended, so that its rollouts are found again and a client that was replaced is refused. Whoever
owns the table ends the jobs that `run_out` names, and removes those that `forgettable` names.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from treadle_core.model import JobRecord
from treadle_core.refusals import JobNotFound, JobTakenOver


class JobTable:
    """Jobs by id. lease_s: how long a job is held after a renewal. resume_s: how long an ended one can be resumed."""

    def __init__(self, lease_s: float, resume_s: float) -> None:
        self._lease_s, self._resume_s = lease_s, resume_s
        self._jobs: dict[str, JobRecord] = {}
        self._expires_s: dict[str, float] = {}  # of the jobs that are held
        self._weights: dict[str, float] = {}  # of the names that were asked for since a job has changed

    def get(self, job_id: str) -> JobRecord | None:
        return self._jobs.get(job_id)

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(list(self._jobs.values()))

    def weight(self, name: str) -> float:
        """Of the share of a name: the largest that a client of it has given; 1 for clients without a name."""
        if name not in self._weights:
            held = (self._jobs[job_id] for job_id in self._expires_s)
            weights = [record.weight for record in held if record.name == name]
            self._weights[name] = max(weights) if weights and name else 1.0
        return self._weights[name]

    def is_held(self, job_id: str) -> bool:
        """Whether the lease of the job runs."""
        return job_id in self._expires_s

    def require(self, job_id: str) -> JobRecord:
        """The job, which is held or may be held again. Raises JobNotFound, JobTakenOver."""
        record = self._jobs.get(job_id)
        if record is None:
            raise JobNotFound(f"no job {job_id}: its lease ran out or it was closed; open it again", job_id=job_id)
        if record.successor_id:
            raise JobTakenOver(
                f"another client has resumed job {record.name}: this one must not go on",
                job=record.name,
                job_id=job_id,
                successor_id=record.successor_id,
            )
        return record

    def resumable(self, name: str) -> list[JobRecord]:
        """Jobs of this name whose work a client that resumes it takes over: one, but where a write was lost."""
        return [
            record
            for record in self._jobs.values()
            if record.resume and record.name == name and record.successor_id not in self._jobs
        ]

    def restore(self, records: Iterable[JobRecord], now: float) -> None:
        """Take over stored jobs; leases get their whole length, as none could renew while the scheduler was away."""
        self._weights.clear()
        for record in records:
            self._jobs[record.job_id] = record
            if record.ended_s is None:
                self._expires_s[record.job_id] = now + self._lease_s

    def hold(self, record: JobRecord, now: float) -> JobRecord:
        """Store a job whose lease begins or begins again; returns it as held."""
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
        """End a job; returns it as it is kept for a client that resumes it, None where it is removed."""
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
        """Jobs whose lease has run out."""
        return [self._jobs[job_id] for job_id, expires_s in self._expires_s.items() if expires_s <= now]

    def forgettable(self, now: float) -> list[str]:
        """Ids of jobs that ended so long ago that they cannot be resumed any more."""
        return [
            record.job_id
            for record in self._jobs.values()
            if record.ended_s is not None and record.ended_s + self._resume_s <= now
        ]
