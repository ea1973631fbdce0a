"""Generate each turn in the open trajectory that its request goes on with, and close those that nobody goes on with.

A framework sends each turn as a request of its own, with the whole context. The turn belongs to the open trajectory of
its session whose tokens its prompt begins with, the longest one; what follows them is an observation. Without one a new
trajectory opens, so a session that rewrites its context, or asks twice at once, has several. Requests without a session
("") are found by their tokens alone.

Invariants: a trajectory is in the index exactly while no request uses it; the tokens of a prompt are never changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from treadle.client import Client
from treadle.errors import TreadleError, refused
from treadle.trajectory import TRAJECTORY_CLOSED, Trajectory
from treadle.types import Chunk, Outcome, Sampling

PROMPT_ID_CHARS = 16
REMEMBERED_PROMPTS = 100_000  # whose samples are counted, about 10 MB

_log = logging.getLogger("treadle")

Place = tuple[int, bytes]  # how many tokens a trajectory has, and their digest


@dataclass(eq=False)
class _Idle:
    """The trajectories of a session that no request uses: by place, each with the moment since when, oldest first.
    lengths: how many have so many tokens."""

    places: dict[Place, list[tuple[float, Trajectory]]] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, trajectory: Trajectory, now: float) -> None:
        tokens = array("i", trajectory.tokens)
        place = (len(tokens), hashlib.blake2b(tokens, digest_size=16).digest())
        self.places.setdefault(place, []).append((now, trajectory))
        self.lengths[place[0]] += 1

    def longest(self, prompt: Sequence[int]) -> Place | None:
        """Of those whose tokens are a beginning of the prompt, the longest."""
        tokens, digest, at = memoryview(array("i", prompt)).cast("B"), hashlib.blake2b(digest_size=16), 0
        found: Place | None = None
        for length in sorted(self.lengths):
            if length > len(prompt):
                break
            digest.update(tokens[4 * at : 4 * length])
            at = length
            place = (length, digest.copy().digest())
            found = place if place in self.places else found
        return found

    def remove(self, place: Place, at: int = -1) -> Trajectory:
        """at: -1 for the one that became idle last, whose KV is the likeliest to be there; 0 for the oldest."""
        _, trajectory = self.places[place].pop(at)
        if not self.places[place]:
            del self.places[place]
        self.lengths[place[0]] -= 1
        if not self.lengths[place[0]]:
            del self.lengths[place[0]]
        return trajectory

    def remove_older(self, before_s: float) -> list[Trajectory]:
        """Those that became idle before this moment."""
        old = [place for place, idle in self.places.items() for since_s, _ in idle if since_s < before_s]
        return [self.remove(place, 0) for place in old]


class Sessions:
    """Open trajectories of one client. idle_s, unnamed_idle_s: seconds after which an idle trajectory is closed, of a
    session and of requests without one. now: seconds that never go back."""

    def __init__(
        self, client: Client, idle_s: float, unnamed_idle_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._idle_s, self._unnamed_idle_s, self._now = client, idle_s, unnamed_idle_s, now
        self._idle: dict[str, _Idle] = {}
        self._samples: OrderedDict[str, int] = OrderedDict()  # that a prompt has begun

    async def generate(
        self,
        session: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        alone: bool = False,
        on_take: Callable[[Trajectory], object] = id,
        on_chunk: Callable[[Chunk], object] | None = None,
    ) -> Trajectory:
        """Generate the next turn of the trajectory that the prompt goes on with, as the last of its steps.

        Where the scheduler has closed the trajectory, as where the lease had run out, the turn is generated in another
        one, unless on_chunk has had tokens of it. alone: the session has one trajectory at a time, so others of it are
        over. on_take: called with each trajectory before its turn. Raises TreadleError.
        """
        while True:
            found = self._take(session, prompt)
            trajectory, seen = found or await self._open(prompt), False
            turns = len(trajectory.steps)
            on_take(trajectory)
            try:
                if alone:
                    await self.close(session)
                async with aclosing(trajectory.generate(sampling)) as chunks:
                    async for chunk in chunks:
                        if on_chunk is not None:
                            seen = True
                            on_chunk(chunk)
            except TreadleError as error:
                if error.reason != TRAJECTORY_CLOSED:
                    raise
                await _close_one(trajectory, "failed")
                if found is None or seen:
                    raise
            else:
                if len(trajectory.steps) == turns:
                    raise refused(TRAJECTORY_CLOSED, "the client was closed before the turn had a token")
                return trajectory
            finally:
                self._give_back(session, trajectory)

    def known(self, session: str) -> list[list[int]]:
        """The tokens of the session's idle trajectories, longest first."""
        idle = self._idle.get(session, _Idle())
        found = [trajectory.tokens for each in idle.places.values() for _, trajectory in each]
        return sorted(found, key=len, reverse=True)

    async def close(self, session: str, outcome: Outcome = "finished") -> int:
        """Close the idle trajectories of a session; returns how many."""
        return await self._close_all(self._remove_older(session, float("inf")), outcome)

    async def close_idle(self) -> int:
        """Close what has been idle for too long; returns how many."""
        now = self._now()
        limits = {session: now - (self._idle_s if session else self._unnamed_idle_s) for session in self._idle}
        old = [each for session, before_s in limits.items() for each in self._remove_older(session, before_s)]
        return await self._close_all(old, "finished")

    async def close_everything(self) -> int:
        """Close all idle trajectories; returns how many."""
        idle = [each for session in list(self._idle) for each in self._remove_older(session, float("inf"))]
        return await self._close_all(idle, "finished")

    @property
    def idle(self) -> int:
        """Open trajectories that no request uses."""
        return sum(idle.lengths.total() for idle in self._idle.values())

    def _take(self, session: str, prompt: Sequence[int]) -> Trajectory | None:
        """The idle trajectory whose next turn this is, with `prompt` as its tokens."""
        idle = self._idle.get(session)
        place = idle.longest(prompt) if idle is not None else None
        if idle is None or place is None:
            return None
        trajectory = idle.remove(place)
        self._forget_empty(session)
        trajectory.observe(prompt[place[0] :])
        return trajectory

    def _give_back(self, session: str, trajectory: Trajectory) -> None:
        """The turn is over: the next one may come, or the same one again where it has failed."""
        if trajectory.outcome is None:
            self._idle.setdefault(session, _Idle()).add(trajectory, self._now())

    async def _open(self, prompt: Sequence[int]) -> Trajectory:
        """Samples of one prompt have one prompt_id, so that the mesh predicts them from each other."""
        prompt_id = hashlib.blake2b(array("i", prompt), digest_size=PROMPT_ID_CHARS // 2).hexdigest()
        sample = self._samples.pop(prompt_id, 0)
        self._samples[prompt_id] = sample + 1
        if len(self._samples) > REMEMBERED_PROMPTS:
            self._samples.popitem(last=False)
        return await self._client.open(prompt_id=prompt_id, sample=sample, prompt=prompt)

    def _remove_older(self, session: str, before_s: float) -> list[Trajectory]:
        idle = self._idle.get(session)
        removed = idle.remove_older(before_s) if idle is not None else []
        self._forget_empty(session)
        return removed

    def _forget_empty(self, session: str) -> None:
        if session in self._idle and not self._idle[session].places:
            del self._idle[session]

    async def _close_all(self, trajectories: Sequence[Trajectory], outcome: Outcome) -> int:
        async with asyncio.TaskGroup() as group:
            for trajectory in trajectories:
                group.create_task(_close_one(trajectory, outcome))
        return len(trajectories)


async def _close_one(trajectory: Trajectory, outcome: Outcome) -> None:
    try:
        await trajectory.close(outcome=outcome)
    except TreadleError as error:
        if error.reason != TRAJECTORY_CLOSED:  # the scheduler closes it once the client's lease has ended
            _log.warning("trajectory %s was not closed: %s", trajectory.trajectory_id, error)
