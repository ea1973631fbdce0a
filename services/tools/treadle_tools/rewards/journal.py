"""What the pool must not forget, in a JetStream bucket: each reward as accepted, its arguments, and how it ended.

A reward is two kinds of keys: `<id>.part.<n>`, its arguments, compressed and cut below NATS's message limit, and
`<id>.state`, which is written after them, so that a reward with a state is whole. Arguments are removed once it has
ended. Records outlive this version of the program: names are only added.
"""

import dataclasses
import json
import zlib

from nats.js import JetStreamContext
from nats.js.kv import KeyValue
from treadle_runtime.bus import entries_of

from treadle_tools.rewards.reward import Reward, State

BUCKET = "treadle-tools-rewards"
PART_BYTES = 512 * 1024  # half of NATS's default max_payload (1 MiB), which headers and subject count against
STATE = "state"
PART = "part"


class RewardJournal:
    """See the module."""

    def __init__(self, bucket: KeyValue, jetstream: JetStreamContext, max_payload_bytes: int) -> None:
        self._bucket = bucket
        self._jetstream = jetstream
        self._part_bytes = max(1, min(PART_BYTES, max_payload_bytes // 2))

    async def accept(self, reward: Reward, arguments_json: str) -> None:
        """Returns once both are on disk. Raises nats.errors.Error."""
        data = zlib.compress(arguments_json.encode("utf-8", "surrogatepass"))
        for index, start in enumerate(range(0, len(data), self._part_bytes)):
            await self._bucket.put(f"{reward.reward_id}.{PART}.{index}", data[start : start + self._part_bytes])
        await self._bucket.put(f"{reward.reward_id}.{STATE}", _encoded(reward))

    async def end(self, reward: Reward) -> None:
        """It has ended: keep how, forget its arguments. Raises nats.errors.Error."""
        await self._bucket.put(f"{reward.reward_id}.{STATE}", _encoded(reward))
        await self._purge(f"{reward.reward_id}.{PART}.*")

    async def forget(self, reward_id: str) -> None:
        """Remove all of a reward. Raises nats.errors.Error."""
        await self._purge(f"{reward_id}.>")

    async def load(self) -> list[tuple[Reward, str]]:
        """Every reward, in the order of acceptance, with its arguments; "" of those that have ended."""
        rewards: list[Reward] = []
        parts: dict[str, dict[int, bytes]] = {}
        for entry in await entries_of(self._bucket):
            reward_id, kind, *index = entry.key.split(".")
            if kind == STATE:
                rewards.append(_decoded(entry.value or b""))
            else:
                parts.setdefault(reward_id, {})[int(index[0])] = entry.value or b""
        for orphan in parts.keys() - {reward.reward_id for reward in rewards}:
            await self.forget(orphan)  # never accepted: the service ended before its state was written
        return [
            (reward, "" if reward.ended else _joined(parts[reward.reward_id]))
            for reward in sorted(rewards, key=lambda reward: reward.accepted_at)
        ]

    async def _purge(self, keys: str) -> None:
        """The subjects themselves: deleting by key would leave a marker behind each."""
        await self._jetstream.purge_stream(f"KV_{BUCKET}", subject=f"$KV.{BUCKET}.{keys}")


def _encoded(reward: Reward) -> bytes:
    return json.dumps(dataclasses.asdict(reward), separators=(",", ":")).encode()


def _decoded(data: bytes) -> Reward:
    document = json.loads(data)
    return Reward(**{**document, "state": State(document["state"])})


def _joined(parts: dict[int, bytes]) -> str:
    data = b"".join(parts[index] for index in sorted(parts))
    return zlib.decompress(data).decode("utf-8", "surrogatepass")
