"""Brings servers' GPU memory into the state that is wanted, and never asks a server for a change that would end it.

Owns: a lock for each server. Invariants: what is held after `make_room` and before the next call for the same GPUs does
not grow; a server is resumed only where it is known to be released, in this start of it; one whose last change was cut
short is left alone until it has been started anew.

Which servers hold GPU memory, kept in a JetStream bucket: a restarted service must not resume what is not released.

One key a server: {"identity": of its start, "state": held, released or changing}. `changing` is written before a change
and the new state after it, so that one that was cut short is known to be unsure."""

import asyncio
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass

import nats.errors
import structlog
from nats.js.kv import KeyValue
from treadle_runtime.bus import entries_of, kv_key
from treadle_runtime.errors import Unavailable

from treadle_tools.gpu.memory import RETRY_S, EngineAway, EngineMemory, EngineTrouble
from treadle_tools.gpu.servers import Server

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


log = structlog.get_logger()

WATCH_PERIOD_S = 5.0  # a server that has just come up keeps others of its GPUs from starting


class Residents:
    """See the module."""

    def __init__(self, servers: Sequence[Server], memory: EngineMemory, ledger: Ledger) -> None:
        self._servers = servers
        self._memory = memory
        self._ledger = ledger
        self._locks = {server.url: asyncio.Lock() for server in servers}
        self._doubted = {server.url for server in servers}  # whose entry is of an earlier life, or of before a failure
        self._wanted: set[str] = set()  # that serve, or are about to

    async def bring(self, server: Server, evict: Sequence[Server]) -> None:
        """Returns once `server` can be asked. evict: servers on its GPUs that have to go for it.

        Raises EngineAway, EngineTrouble, nats.errors.Error.
        """
        self._wanted.add(server.url)
        # Those of its GPUs that may hold memory without anybody's knowing go too.
        unknown = [one for one in self._servers if one.gpus & server.gpus and one.url in self._doubted - self._wanted]
        going = {one.url: one for one in (*evict, *unknown)}.values()
        ended = await asyncio.gather(*(self._change(one, State.RELEASED) for one in going), return_exceptions=True)
        for problem in ended:
            if problem is not None:
                raise problem
        await self._change(server, State.HELD)

    def left(self, server: Server, *, failed: bool) -> None:
        """Nobody asks it any more. failed: it did not answer as it should."""
        self._wanted.discard(server.url)
        if failed:
            self._doubted.add(server.url)

    async def watch(self) -> None:
        """Release servers that come up while nobody wants them, for ever: others of their GPUs could not start."""
        while True:
            for server in self._servers:
                if server.url in self._doubted and server.url not in self._wanted:
                    try:
                        await self._change(server, State.RELEASED)
                    except (Unavailable, nats.errors.Error) as error:
                        log.warning("a GPU server is not released", server=server.url, why=str(error))
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _change(self, server: Server, wanted: State) -> None:
        """To its end, also where the caller is cancelled: a change that is cut short leaves its server unsure."""
        change = asyncio.ensure_future(self._changed(server, wanted))
        cancelled: asyncio.CancelledError | None = None
        while not change.done():
            try:
                await asyncio.wait((change,))
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            change.exception()
            raise cancelled
        change.result()

    async def _changed(self, server: Server, wanted: State) -> None:
        url = server.url
        async with self._locks[url]:
            if wanted is State.RELEASED and url in self._wanted:
                return  # somebody came in between
            entry = self._ledger.get(url)
            if url not in self._doubted and entry is not None and entry.state is wanted:
                return
            try:
                identity = await self._memory.identity(url)
            except EngineAway:
                self._doubted.add(url)
                if wanted is State.RELEASED:
                    return  # what does not run holds nothing
                raise
            if entry is None or entry.identity != identity:
                entry = Entry(identity, State.HELD)  # a server that starts takes its memory
            if entry.state is State.CHANGING:
                raise EngineTrouble(
                    "ENGINE_UNSURE",
                    f"{url} was cut short as it released or resumed its memory: start it anew",
                    retry_after_s=RETRY_S,
                )
            if entry.state is not wanted:
                await self._ledger.put(url, Entry(identity, State.CHANGING))
                change = self._memory.resume if wanted is State.HELD else self._memory.release
                await change(url)
            await self._ledger.put(url, Entry(identity, wanted))
            self._doubted.discard(url)
