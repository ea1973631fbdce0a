"""Which servers hold GPU memory, kept in a JetStream bucket: a restarted service must not resume what is not released.

One key a server: {"identity": of its start, "state": held, released or changing}. `changing` is written before a change
and the new state after it, so that one that was cut short is known to be unsure.
"""

import enum
import json
from dataclasses import dataclass

from nats.js.kv import KeyValue
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import kv_key

BUCKET = "treadle-tools-gpus"


class State(enum.StrEnum):
    """Of a server's GPU memory."""

    HELD = "held"
    RELEASED = "released"
    CHANGING = "changing"


@dataclass(frozen=True)
class Entry:
    """identity: of the start of the server that the state is of."""

    identity: str
    state: State


class Ledger:
    """See the module."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket
        self._entries: dict[str, Entry] = {}

    async def load(self) -> None:
        """What an earlier life of the service wrote."""
        for entry in await entries_of(self._bucket):
            document = json.loads(entry.value or b"{}")
            self._entries[entry.key] = Entry(document["identity"], State(document["state"]))

    def get(self, url: str) -> Entry | None:
        """None of a server that was never seen."""
        return self._entries.get(kv_key(url))

    async def put(self, url: str, entry: Entry) -> None:
        """Returns once it is on disk. Raises nats.errors.Error."""
        key = kv_key(url)
        if self._entries.get(key) != entry:
            await self._bucket.put(key, json.dumps({"identity": entry.identity, "state": entry.state}).encode())
            self._entries[key] = entry
