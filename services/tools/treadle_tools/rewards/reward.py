"""Define one reward (one trajectory to be scored by one function), the table of all rewards, and
their journal.

Invariants: a reward ends for good, as DONE (with a score), FAILED or CANCELLED; `revision` grows
with each change.
"""

import asyncio
import contextlib
import dataclasses
import enum
import json
import os
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import structlog
from nats.js import JetStreamContext
from nats.js.errors import KeyWrongLastSequenceError
from nats.js.kv import KeyValue
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import kv_key

log = structlog.get_logger()

DEFAULT_JOB = "default"

BUCKET = "treadle-tools-rewards"
# Half of NATS's default max_payload (1 MiB), which headers and subject count against
PART_BYTES = 512 * 1024
STATE = "state"
PART = "part"
SECRET, SECRET_BYTES = "secret", 32


class State(enum.StrEnum):
    """State of a reward. The values are stored."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Reward:
    """One trajectory to be scored by one function, and how far that is.

    name: of the reward function. tries: begun until now, since the service started.

    accepted_at, ended_at: seconds since the epoch, 0.0 before. queue_s: from acceptance to the last
    try; overhead_s and execution_s: of that try. ends: how often the service has ended, after its
    first restart with this reward, while it was scored. The fields are stored: names are only
    added.
    """

    reward_id: str
    trajectory_id: str
    job: str
    name: str
    accepted_at: float
    state: State = State.PENDING
    score: float | None = None
    output: str = ""
    data_json: str = ""
    error: str = ""
    tries: int = 0
    queue_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0
    ended_at: float = 0.0
    ends: int = 0
    revision: int = 1

    @property
    def ended(self) -> bool:
        """Return whether the reward changes no more."""
        return self.state not in (State.PENDING, State.RUNNING)


Matches = Callable[[Reward], bool]


@dataclass(eq=False)
class _Watcher:
    matches: Matches
    changed: OrderedDict[str, None] = field(default_factory=OrderedDict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, reward: Reward) -> None:
        if self.matches(reward):
            self.changed[reward.reward_id] = None
            self.wake.set()


class RewardTable:
    """Keeps all rewards by id, and yields each change to their watchers.

    Invariant: a watcher gets every matching reward in its newest state. The table may leave out
    only states in between.
    """

    def __init__(self) -> None:
        self.rewards: dict[str, Reward] = {}
        self._watchers: set[_Watcher] = set()

    def put(self, reward: Reward) -> None:
        """Store a new reward, or a newer state of one, and wake the watchers."""
        self.rewards[reward.reward_id] = reward
        for watcher in self._watchers:
            watcher.note(reward)

    async def watch(self, matches: Matches) -> AsyncIterator[Reward]:
        """Yield each reward that matches, then each change of one, for ever."""
        watcher = _Watcher(matches)
        for reward in self.rewards.values():
            watcher.note(reward)
        self._watchers.add(watcher)
        try:
            while True:
                await watcher.wake.wait()
                watcher.wake.clear()
                while watcher.changed:
                    reward_id, _ = watcher.changed.popitem(last=False)
                    if (newest := self.rewards.get(reward_id)) is not None:
                        yield newest
        finally:
            self._watchers.discard(watcher)

    async def watch_until_ended(self, reward_ids: Iterable[str]) -> AsyncIterator[Reward]:
        """Yield these rewards and their changes until all of them have ended."""
        wanted = frozenset(reward_ids)
        left = set(wanted)
        async for reward in self.watch(lambda reward: reward.reward_id in wanted):
            yield reward
            if reward.ended:
                left.discard(reward.reward_id)
            if not left:
                return


class RewardJournal:
    """Keeps rewards and their arguments in a JetStream bucket across restarts of the service.

    A reward is two kinds of keys: `<id>.part.<n>`, its arguments, compressed and cut below NATS's
    message limit, and `<id>.state`, which is written after them, so that a reward with a state is
    whole. Its end removes the arguments. The id is as `kv_key` writes it.
    """

    def __init__(
        self, bucket: KeyValue, jetstream: JetStreamContext, max_payload_bytes: int
    ) -> None:
        self._bucket = bucket
        self._jetstream = jetstream
        self._part_bytes = max(1, min(PART_BYTES, max_payload_bytes // 2))

    async def secret(self) -> bytes:
        """Return a random secret of this journal, the same at each restart.

        Raises nats.errors.Error.
        """
        with contextlib.suppress(KeyWrongLastSequenceError):  # it is there
            await self._bucket.create(SECRET, os.urandom(SECRET_BYTES))
        return (await self._bucket.get(SECRET)).value or b""

    async def accept(self, reward: Reward, arguments_json: str) -> None:
        """Store a reward and its arguments, and return once both are on disk.

        Raises nats.errors.Error.
        """
        data = zlib.compress(arguments_json.encode("utf-8", "surrogatepass"))
        for index, start in enumerate(range(0, len(data), self._part_bytes)):
            await self._bucket.put(
                f"{kv_key(reward.reward_id)}.{PART}.{index}", data[start : start + self._part_bytes]
            )
        await self.note(reward)

    async def end(self, reward: Reward) -> None:
        """Store how a reward ended, and remove its arguments. Raises nats.errors.Error."""
        await self.note(reward)
        await self._purge(f"{kv_key(reward.reward_id)}.{PART}.*")

    async def forget(self, reward_id: str) -> None:
        """Remove all of a reward. Raises nats.errors.Error."""
        await self._purge(f"{kv_key(reward_id)}.>")

    async def load(self) -> list[tuple[Reward, str | None]]:
        """Return every reward, in the order of acceptance, with its arguments; "" of those that
        have ended, None where they cannot be read. A state that cannot be read stays where it is,
        and in the log."""
        rewards: list[Reward] = []
        parts: dict[str, dict[int, bytes]] = {}
        unreadable: set[str] = set()
        for entry in await entries_of(self._bucket):
            if entry.key == SECRET:
                continue
            key, kind, *index = entry.key.split(".")
            if kind != STATE:
                parts.setdefault(key, {})[int(index[0])] = entry.value or b""
                continue
            try:
                document = json.loads(entry.value or b"")
                rewards.append(Reward(**{**document, "state": State(document["state"])}))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                log.error("a stored reward cannot be read", reward_id=key, error=repr(error))
                unreadable.add(key)
        for orphan in parts.keys() - unreadable - {kv_key(reward.reward_id) for reward in rewards}:
            # Never accepted: the service ended before its state was written
            await self._purge(f"{orphan}.>")
        return [
            (reward, "" if reward.ended else _join(parts.get(kv_key(reward.reward_id), {})))
            for reward in sorted(rewards, key=lambda reward: reward.accepted_at)
        ]

    async def note(self, reward: Reward) -> None:
        """Store the state of a reward. Raises nats.errors.Error."""
        # By the standard library, as pydantic refuses the lone surrogates that a tool's output may
        # hold.
        data = json.dumps(dataclasses.asdict(reward), separators=(",", ":")).encode()
        await self._bucket.put(f"{kv_key(reward.reward_id)}.{STATE}", data)

    async def _purge(self, keys: str) -> None:
        """Purge the subjects themselves, because deleting by key would leave a marker behind
        each."""
        await self._jetstream.purge_stream(f"KV_{BUCKET}", subject=f"$KV.{BUCKET}.{keys}")


def _join(parts: dict[int, bytes]) -> str | None:
    try:
        return zlib.decompress(b"".join(parts[index] for index in sorted(parts))).decode(
            "utf-8", "surrogatepass"
        )
    except (zlib.error, UnicodeDecodeError):
        return None
