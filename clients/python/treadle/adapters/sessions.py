"""Generate each turn in the open trajectory that its request continues, and close trajectories that
get no further turn.

A framework sends each turn as a request of its own, with the whole context. The turn belongs to the
longest open trajectory of its session whose tokens its prompt begins with; the tokens after them
are an observation. Where there is none, a new trajectory opens, so a session that rewrites its
context, or sends two requests at once, has several. Trajectories of requests without a session ("")
are found by their tokens alone.

An idle trajectory keeps its engine's KV, and no request ends it. Each is closed after a time limit,
and earlier where first steps wait for room and hardly any trajectory was idle for so long before
its next turn. A closed trajectory that gets another turn opens again, with its whole context.

Invariants: a trajectory is in the index exactly while no request uses it; the tokens of a prompt
are never changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from treadle.client import Client
from treadle.connection import CLIENT_CLOSED
from treadle.errors import TreadleError, refused
from treadle.trajectory import GONE, TRAJECTORY_CLOSED, Trajectory
from treadle.types import Chunk, Outcome, Sampling

PROMPT_ID_CHARS = 16
REMEMBERED_PROMPTS = 100_000  # whose samples are counted, about 10 MB
SWEEP_S = 0.1  # between two calls of `sweep`
EXPIRY_S = 1.0  # between two checks of all trajectories for those at their time limit
# A first step that finds room has its ticket within this time, also where it waits for a plan.
STARTS_WITHIN_S = 0.3
# Pauses of one kind that are remembered, and how many must be known before they set when a
# trajectory counts as over.
RECENT_PAUSES, FEWEST_PAUSES = 256, 16
# This share of pauses may be longer than a quarter of the time after which a trajectory counts as
# over: those with the longest tools are often the ones that a rollout waits for.
RARE, MARGIN = 0.05, 4.0
NAMED_AT_FIRST_S, UNNAMED_AT_FIRST_S = 60.0, 1.0  # until pauses are known
# What an idle trajectory takes beside its tokens, in tokens of 40 bytes.
OWN_TOKENS = 256
REMEMBERED_S = 300.0  # for which a closed trajectory that gets another turn is recognised

_log = logging.getLogger("treadle")

T = TypeVar("T")
Place = tuple[int, bytes]  # how many tokens a trajectory has, and their digest
_Old = tuple[float, Trajectory, str]  # when it became idle, the trajectory, and its session


@dataclass(eq=False)
class _Places(Generic[T]):
    """Items at places of a session, such as its idle trajectories: each with the moment when it was
    added, oldest first. lengths: the number of items for each number of tokens."""

    places: dict[Place, list[tuple[float, T]]] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: Sequence[int], item: T, now: float) -> None:
        packed = array("i", tokens)
        place = (len(packed), hashlib.blake2b(packed, digest_size=16).digest())
        self.places.setdefault(place, []).append((now, item))
        self.lengths[place[0]] += 1

    def longest(self, prompt: Sequence[int]) -> Place | None:
        """Return the longest place whose tokens the prompt begins with."""
        tokens, digest, at = (
            memoryview(array("i", prompt)).cast("B"),
            hashlib.blake2b(digest_size=16),
            0,
        )
        found: Place | None = None
        for length in sorted(self.lengths):
            if length > len(prompt):
                break
            digest.update(tokens[4 * at : 4 * length])
            at = length
            place = (length, digest.copy().digest())
            found = place if place in self.places else found
        return found

    def remove(self, place: Place, at: int = -1) -> tuple[float, T]:
        """Remove one item at a place and return it. at: -1 for the one that became idle last, whose
        KV is the likeliest to be there; 0 for the oldest."""
        found = self.places[place].pop(at)
        if not self.places[place]:
            del self.places[place]
        self.lengths[place[0]] -= 1
        if not self.lengths[place[0]]:
            del self.lengths[place[0]]
        return found

    def remove_older(self, before_s: float) -> list[tuple[float, T]]:
        """Remove the items that were added before this moment, and return them."""
        old = [
            place
            for place, items in self.places.items()
            for since_s, _ in items
            if since_s < before_s
        ]
        return [self.remove(place, 0) for place in old]


class _Pauses:
    """Pauses of trajectories of one kind before their next turn, infinite for those that were
    closed before one came. at_first_s: the result until enough are known."""

    def __init__(self, at_first_s: float) -> None:
        self._recent_s: deque[float] = deque(maxlen=RECENT_PAUSES)
        self._at_first_s = at_first_s

    def note(self, pause_s: float) -> None:
        self._recent_s.append(pause_s)

    @property
    def over_after_s(self) -> float:
        """Return the seconds of a pause after which hardly any trajectory has had another turn."""
        if len(self._recent_s) < FEWEST_PAUSES:
            return self._at_first_s
        ended_s, rare = (
            sorted(filter(math.isfinite, self._recent_s)),
            int(RARE * len(self._recent_s)),
        )
        return MARGIN * ended_s[-1 - rare] if len(ended_s) > rare else 0.0


class Sessions:
    """Open trajectories of one client. idle_s, unnamed_idle_s: seconds after which an idle
    trajectory of a session, and of requests without one, is closed. now: seconds that never go
    back. idle_tokens: of all idle trajectories; beyond it, those that are idle for longest are
    closed; None: no limit."""

    def __init__(
        self,
        client: Client,
        idle_s: float,
        unnamed_idle_s: float,
        now: Callable[[], float] = time.monotonic,
        *,
        idle_tokens: int | None = None,
    ) -> None:
        self._idle_tokens = idle_tokens
        self._client, self._idle_s, self._unnamed_idle_s, self._now = (
            client,
            idle_s,
            unnamed_idle_s,
            now,
        )
        self._idle: dict[str, _Places[Trajectory]] = {}
        self._closed: dict[str, _Places[None]] = {}  # by `sweep`, not by their session
        # the trajectories that were opened for the turn that runs, and when
        self._starting: dict[Trajectory, float] = {}
        self._pauses = {  # of sessions, and of requests without one
            True: _Pauses(min(NAMED_AT_FIRST_S, idle_s)),
            False: _Pauses(min(UNNAMED_AT_FIRST_S, unnamed_idle_s)),
        }
        self._next_expiry_s = -math.inf
        self._samples: OrderedDict[str, int] = OrderedDict()  # that a prompt has begun

    async def generate(
        self,
        session: str,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        alone: bool = False,
        shared_seed: bool = False,
        on_take: Callable[[Trajectory], object] = id,
        on_chunk: Callable[[Chunk], object] | None = None,
    ) -> Trajectory:
        """Generate the next turn of the trajectory that the prompt continues, as the last of its
        steps.

        Where the scheduler has closed the trajectory, as where the lease had run out, the turn is
        generated in another one, unless on_chunk has received tokens of it. alone: the session has
        one trajectory at a time, so its other trajectories end. shared_seed: the index of the
        sample is added to the seed. on_take: called with each trajectory before its turn. Raises
        TreadleError.
        """
        while True:
            found = self._take(session, prompt)
            trajectory, seen = found or await self._open(session, prompt), False
            turns = len(trajectory.steps)
            on_take(trajectory)
            try:
                if alone:
                    await self.close(session)
                asked = sampling.of_sample(trajectory.sample) if shared_seed else sampling
                async with aclosing(trajectory.generate(asked)) as chunks:
                    async for chunk in chunks:
                        if on_chunk is not None:
                            seen = True
                            on_chunk(chunk)
            except TreadleError as error:
                if error.reason not in GONE:
                    raise
                await _close_one(trajectory, "failed")
                if found is None or seen:
                    raise
            else:
                if len(trajectory.steps) == turns:
                    raise refused(
                        TRAJECTORY_CLOSED, "the client was closed before the turn had a token"
                    )
                return trajectory
            finally:
                self._starting.pop(trajectory, None)
                self._give_back(session, trajectory)

    def known(self, session: str) -> list[list[int]]:
        """Return the tokens of the session's idle trajectories, longest first."""
        idle = self._idle.get(session, _Places[Trajectory]())
        found = [trajectory.tokens for each in idle.places.values() for _, trajectory in each]
        return sorted(found, key=len, reverse=True)

    async def close(self, session: str, outcome: Outcome = "finished") -> int:
        """Close the idle trajectories of a session, and return their number."""
        return await self._close_all(
            [each for _, each in self._remove_older(session, math.inf)], outcome
        )

    async def sweep(self) -> int:
        """Close idle trajectories that will probably have no other turn: those at their time limit,
        those beyond the limit of tokens, and, while first steps wait for room, two more for each
        such step. Return their number. Call it each SWEEP_S."""
        now = self._now()
        old: list[_Old] = []
        if now >= self._next_expiry_s:
            self._next_expiry_s = now + EXPIRY_S
            limits = {
                session: now - (self._idle_s if session else self._unnamed_idle_s)
                for session in self._idle
            }
            old = [
                (*found, each)
                for each, before_s in limits.items()
                for found in self._remove_older(each, before_s)
            ]
            old += self._remove_beyond_limit()
            for session, closed in list(self._closed.items()):
                closed.remove_older(now - REMEMBERED_S)
                if not closed.places:
                    del self._closed[session]
        waiting = sum(
            not one.engine_id and now - since > STARTS_WITHIN_S
            for one, since in self._starting.items()
        )
        if waiting:
            old += self._remove_over(2 * waiting, now)
        for since_s, trajectory, session in old:
            self._pauses[bool(session)].note(math.inf)
            self._closed.setdefault(session, _Places()).add(trajectory.tokens, None, since_s)
        return await self._close_all([trajectory for _, trajectory, _ in old], "finished")

    async def close_everything(self) -> int:
        """Close all idle trajectories, and return their number."""
        idle = [
            each
            for session in list(self._idle)
            for _, each in self._remove_older(session, math.inf)
        ]
        return await self._close_all(idle, "finished")

    @property
    def idle(self) -> int:
        """Return the number of open trajectories that no request uses."""
        return sum(idle.lengths.total() for idle in self._idle.values())

    def _take(self, session: str, prompt: Sequence[int]) -> Trajectory | None:
        """Return the idle trajectory whose next turn this is, with `prompt` as its tokens."""
        idle = self._idle.get(session)
        place = idle.longest(prompt) if idle is not None else None
        if idle is None or place is None:
            return None
        since_s, trajectory = idle.remove(place)
        self._forget_empty(session)
        self._pauses[bool(session)].note(self._now() - since_s)
        trajectory.observe(prompt[place[0] :])
        return trajectory

    def _give_back(self, session: str, trajectory: Trajectory) -> None:
        """Return a trajectory to the idle ones after its turn: the next turn may come, or the same
        one again where it has failed."""
        if trajectory.outcome is None:
            self._idle.setdefault(session, _Places()).add(
                trajectory.tokens, trajectory, self._now()
            )

    async def _open(self, session: str, prompt: Sequence[int]) -> Trajectory:
        """Open a trajectory. Samples of one prompt have one prompt_id, so that the mesh predicts
        them from each other."""
        closed = self._closed.get(session)
        if closed is not None and (place := closed.longest(prompt)) is not None:
            self._pauses[bool(session)].note(self._now() - closed.remove(place)[0])
        prompt_id = hashlib.blake2b(
            array("i", prompt), digest_size=PROMPT_ID_CHARS // 2
        ).hexdigest()
        sample = self._samples.pop(prompt_id, 0)
        self._samples[prompt_id] = sample + 1
        if len(self._samples) > REMEMBERED_PROMPTS:
            self._samples.popitem(last=False)
        trajectory = await self._client.open(prompt_id=prompt_id, sample=sample, prompt=prompt)
        self._starting[trajectory] = self._now()
        return trajectory

    def _remove_over(self, most: int, now: float) -> list[_Old]:
        """Remove at most `most` trajectories that are idle for longer than pauses were, the longest
        idle first."""
        over_s = {named: now - pauses.over_after_s for named, pauses in self._pauses.items()}
        over = [
            (since_s, session, place)
            for session, idle in self._idle.items()
            for place, found in idle.places.items()
            for since_s, _ in found
            if since_s < over_s[bool(session)]
        ]
        return self._remove(sorted(over)[:most])

    def _remove_beyond_limit(self) -> list[_Old]:
        """Remove the trajectories that are idle for longest, until the others are within the limit
        of tokens."""
        held = sum(
            count * (length + OWN_TOKENS)
            for idle in self._idle.values()
            for length, count in idle.lengths.items()
        )
        if self._idle_tokens is None or held <= self._idle_tokens:
            return []
        beyond: list[tuple[float, str, Place]] = []
        for since_s, session, place in sorted(
            (since_s, session, place)
            for session, idle in self._idle.items()
            for place, found in idle.places.items()
            for since_s, _ in found
        ):
            if held <= self._idle_tokens:
                break
            beyond.append((since_s, session, place))
            held -= place[0] + OWN_TOKENS
        _log.info("%s idle trajectories are closed: they are too many", len(beyond))
        return self._remove(beyond)

    def _remove(self, oldest: Sequence[tuple[float, str, Place]]) -> list[_Old]:
        """Remove the oldest trajectories at these places of sessions, and return them."""
        removed = [(*self._idle[session].remove(place, 0), session) for _, session, place in oldest]
        for _, _, session in removed:
            self._forget_empty(session)
        return removed

    def _remove_older(self, session: str, before_s: float) -> list[tuple[float, Trajectory]]:
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
        # The scheduler closes it once the client's lease has ended.
        if error.reason not in (*GONE, CLIENT_CLOSED):
            _log.warning("trajectory %s was not closed: %s", trajectory.trajectory_id, error)
