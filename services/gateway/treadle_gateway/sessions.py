"""Find the open trajectory that a request goes on with, and close those that nobody goes on with.

A framework sends each turn as a request of its own, with the whole context. The turn belongs to the open trajectory of
its session whose tokens its prompt begins with, the longest one; what follows them is an observation. Without one a new
trajectory opens, so a session that rewrites its context, or asks twice at once, has several. Requests without a session
are found by their tokens alone.

Invariants: a trajectory is in the index exactly while no request uses it; the tokens of a prompt are never changed.
"""

import asyncio
import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import treadle

log = structlog.get_logger()

PROMPT_ID_CHARS = 16
REMEMBERED_PROMPTS = 100_000  # whose samples are counted, about 10 MB


@dataclass(frozen=True)
class _Place:
    """Where an idle trajectory stands in the index."""

    session: str
    tokens: int
    digest: bytes


class Sessions:
    """Open trajectories of one client. idle_s, unnamed_idle_s: see GatewaySettings. now: seconds that never go back."""

    def __init__(self, client: treadle.Client, idle_s: float, unnamed_idle_s: float, now: Callable[[], float]) -> None:
        self._client, self._idle_s, self._unnamed_idle_s, self._now = client, idle_s, unnamed_idle_s, now
        self._idle: dict[_Place, list[tuple[treadle.Trajectory, float]]] = {}  # and since when
        self._lengths: dict[str, Counter[int]] = {}  # tokens of the idle ones, by session
        self._samples: OrderedDict[str, int] = OrderedDict()  # that a prompt has begun

    async def take(self, session: str, prompt: Sequence[int]) -> treadle.Trajectory:
        """The trajectory whose next turn this is, with `prompt` as its tokens. Raises TreadleError."""
        found = self._longest(session, prompt)
        if found is None:
            return await self._open(prompt)
        trajectory = self._remove(found)
        trajectory.observe(prompt[found.tokens :])
        return trajectory

    def give_back(self, session: str, trajectory: treadle.Trajectory) -> None:
        """The turn is over: the next one may come, or the same one again where it has failed."""
        tokens = array("i", trajectory.tokens)
        place = _Place(session, len(tokens), hashlib.blake2b(tokens, digest_size=16).digest())
        self._idle.setdefault(place, []).append((trajectory, self._now()))
        self._lengths.setdefault(session, Counter())[place.tokens] += 1

    def known(self, session: str) -> list[list[int]]:
        """The tokens of the session's idle trajectories, longest first."""
        found = [each for place, idle in self._idle.items() if place.session == session for each, _ in idle]
        return sorted((trajectory.tokens for trajectory in found), key=len, reverse=True)

    async def close(self, session: str) -> int:
        """Close the idle trajectories of a session; returns how many."""
        return await self._close([place for place in self._idle if place.session == session], before_s=None)

    async def close_idle(self) -> int:
        """Close what has been idle for too long; returns how many."""
        now = self._now()
        closed = await self._close([place for place in self._idle if not place.session], now - self._unnamed_idle_s)
        return closed + await self._close([place for place in self._idle if place.session], now - self._idle_s)

    @property
    def idle(self) -> int:
        """Open trajectories that no request uses."""
        return sum(len(each) for each in self._idle.values())

    def _longest(self, session: str, prompt: Sequence[int]) -> _Place | None:
        """Of the idle trajectories whose tokens are a beginning of the prompt, the longest."""
        tokens, digest, at = memoryview(array("i", prompt)).cast("B"), hashlib.blake2b(digest_size=16), 0
        found: _Place | None = None
        for length in sorted(self._lengths.get(session, ())):
            if length > len(prompt):
                break
            digest.update(tokens[4 * at : 4 * length])
            at = length
            place = _Place(session, length, digest.copy().digest())
            found = place if place in self._idle else found
        return found

    def _remove(self, place: _Place) -> treadle.Trajectory:
        """The one that became idle last: its KV is the likeliest to be there."""
        trajectory, _ = self._idle[place].pop()
        if not self._idle[place]:
            del self._idle[place]
        lengths = self._lengths[place.session]
        lengths[place.tokens] -= 1
        if not lengths[place.tokens]:
            del lengths[place.tokens]
        if not lengths:
            del self._lengths[place.session]
        return trajectory

    async def _open(self, prompt: Sequence[int]) -> treadle.Trajectory:
        """Samples of one prompt have one prompt_id, so that the mesh predicts them from each other."""
        prompt_id = hashlib.blake2b(array("i", prompt), digest_size=PROMPT_ID_CHARS // 2).hexdigest()
        sample = self._samples.pop(prompt_id, 0)
        self._samples[prompt_id] = sample + 1
        if len(self._samples) > REMEMBERED_PROMPTS:
            self._samples.popitem(last=False)
        return await self._client.open(prompt_id=prompt_id, sample=sample, prompt=prompt)

    async def _close(self, places: Sequence[_Place], before_s: float | None) -> int:
        closing = []
        for place in places:
            while place in self._idle and (before_s is None or self._idle[place][-1][1] < before_s):
                closing.append(self._remove(place))
        async with asyncio.TaskGroup() as group:
            for trajectory in closing:
                group.create_task(_close_one(trajectory))
        return len(closing)


async def _close_one(trajectory: treadle.Trajectory) -> None:
    try:
        await trajectory.close()
    except treadle.TreadleError as error:  # the scheduler closes it once the client's lease has ended
        log.warning("a trajectory was not closed", trajectory_id=trajectory.trajectory_id, error=str(error))
