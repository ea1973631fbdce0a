"""Bring the GPU memory of the SGLang servers of GPU services into the state that is wanted.

SGLang leaves two things to its caller: a release while anything runs, or a resume of what is not
released, ends the server's scheduler (an assertion, a KeyError). So the cache is flushed first,
which is refused while anything runs; and the `Ledger` keeps the state, which no endpoint reports. A
server that was started anew is known by the time that its start took.
"""

import asyncio
import enum
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import nats.errors
import structlog
from nats.js.kv import KeyValue
from pydantic import TypeAdapter
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import kv_key
from treadle_runtime.errors import Unavailable

from treadle_tools.remote.declarations import Server

BUCKET = "treadle-tools-gpus"

CONNECT_S = 2.0
ANSWER_S = 10.0  # of a question
IDLE_WAIT_S = 20.0  # for the last requests to end before a release
MEMORY_S = 120.0  # 140 GB over PCIe take seconds, a busy host some more
RETRY_S = 1.0

log = structlog.get_logger()


class Residents:
    """Changes which servers hold GPU memory. Owns a lock for each server.

    Invariants: from `bring` until the next call for the same GPUs, no further memory of them is
    taken; a server is resumed only where it is known to be released since its last start; one whose
    last change was cut short is left alone until it is started anew.
    """

    def __init__(self, servers: Sequence[Server], memory: "EngineMemory", ledger: "Ledger") -> None:
        self._servers = servers
        self._memory = memory
        self._ledger = ledger
        self._locks = {server.url: asyncio.Lock() for server in servers}
        # Servers whose entry in the ledger is from before a restart of this service or a failure.
        self._doubted = {server.url for server in servers}
        self._wanted: set[str] = set()  # servers that serve, or are about to

    async def bring(self, server: Server, evict: Sequence[Server]) -> None:
        """Bring `server` into memory, and return once it takes requests.

        evict: servers on its GPUs that have to release their memory for it.

        Raises EngineAway, EngineTrouble, nats.errors.Error.
        """
        self._wanted.add(server.url)
        # Servers of its GPUs that may hold memory unknown to the scheduler release theirs too.
        unknown = [
            one
            for one in self._servers
            if one.gpus & server.gpus and one.url in self._doubted - self._wanted
        ]
        going = {one.url: one for one in (*evict, *unknown)}.values()
        ended = await asyncio.gather(
            *(self._change(one, State.RELEASED) for one in going), return_exceptions=True
        )
        for problem in ended:
            if problem is not None:
                raise problem
        await self._change(server, State.HELD)

    def leave(self, server: Server, *, failed: bool) -> None:
        """Note that nobody uses a server any more. failed: whether it did not answer as it
        should."""
        self._wanted.discard(server.url)
        if failed:
            self._doubted.add(server.url)

    async def watch(self, period_s: float) -> None:
        """Release servers that come up while nobody wants them, for ever: others could not use
        their GPUs."""
        while True:
            for server in self._servers:
                try:
                    if server.url not in self._wanted and await self._may_hold_memory(server.url):
                        await self._change(server, State.RELEASED)
                except (Unavailable, nats.errors.Error) as error:
                    log.warning("a GPU server is not released", server=server.url, why=str(error))
            await asyncio.sleep(period_s)

    async def _may_hold_memory(self, url: str) -> bool:
        """Return whether a server's state is in doubt, as that of a released server is once it is
        started anew."""
        entry = self._ledger.get(url)
        if url not in self._doubted and entry is not None and entry.state is State.RELEASED:
            try:
                is_same = await self._memory.identity(url) == entry.identity
            except EngineAway:
                is_same = False  # its next start will take memory
            if not is_same:
                self._doubted.add(url)
        return url in self._doubted

    async def _change(self, server: Server, wanted: "State") -> None:
        """Make the change to its end, also where the caller is cancelled: a change that is cut
        short leaves the state unknown."""
        change = asyncio.ensure_future(self._bring_into(server.url, wanted))
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

    async def _bring_into(self, url: str, wanted: "State") -> None:
        async with self._locks[url]:
            if wanted is State.RELEASED and url in self._wanted:
                return  # a round has requested it in between
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
                why = f"{url} was cut short as it released or resumed its memory: start it anew"
                raise EngineTrouble("ENGINE_UNSURE", why)
            if entry.state is not wanted:
                await self._ledger.put(url, Entry(identity, State.CHANGING))
                change = self._memory.resume if wanted is State.HELD else self._memory.release
                await change(url)
            await self._ledger.put(url, Entry(identity, wanted))
            self._doubted.discard(url)


class State(enum.StrEnum):
    """State of a server's GPU memory. The values are stored."""

    HELD = "held"
    RELEASED = "released"
    CHANGING = "changing"


@dataclass(frozen=True)
class Entry:
    """State of one server's GPU memory as the ledger stores it.

    identity: of the start of the server in which it has this state.

    The fields are stored: names are only added.
    """

    identity: str
    state: State


STORED = TypeAdapter(Entry)


class Ledger:
    """Keeps each server's state in a JetStream bucket across restarts of this service, one key a
    server.

    `changing` is written before a change, the new state after it: a restart that finds `changing`
    knows neither.
    """

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket
        self._entries: dict[str, Entry] = {}

    async def load(self) -> None:
        """Read the entries that were written before a restart."""
        for entry in await entries_of(self._bucket):
            self._entries[entry.key] = STORED.validate_json(entry.value or b"")

    def get(self, url: str) -> Entry | None:
        """Return the entry of a server; None where it was never seen."""
        return self._entries.get(kv_key(url))

    async def put(self, url: str, entry: Entry) -> None:
        """Store a server's entry, and return once it is on disk. Raises nats.errors.Error."""
        key = kv_key(url)
        if self._entries.get(key) != entry:
            await self._bucket.put(key, STORED.dump_json(entry))
            self._entries[key] = entry


class EngineAway(Unavailable):
    """No server answers at this address."""


class EngineTrouble(Unavailable):
    """The server answers, and does not do as it should; the message gives the remedy."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message, retry_after_s=RETRY_S)


class EngineMemory:
    """Has SGLang servers release their GPU memory to the host and resume it, over HTTP (SGLang
    0.5).

    Owns the HTTP session.
    """

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession()

    async def close(self) -> None:
        """Break off requests under way."""
        await self._session.close()

    async def identity(self, url: str) -> str:
        """Return a text that differs after each start of the server.

        Raises EngineAway; EngineTrouble for a server that would lose its weights.
        """
        text = await self._ask("GET", url, "/server_info", ANSWER_S)
        try:
            info = dict(json.loads(text))
        except (TypeError, ValueError) as error:
            raise EngineTrouble(
                "ENGINE_REFUSED", f"{url}/server_info is no SGLang server's: {text[:300]!r}"
            ) from error
        saves = bool(info.get("enable_memory_saver"))
        if saves and not info.get("enable_weights_cpu_backup"):
            why = (
                f"{url} would resume without its weights: start it with --enable-weights-cpu-backup"
            )
            raise EngineTrouble("ENGINE_LOSES_WEIGHTS", why)
        start = [info.get("startup_time"), info.get("random_seed"), saves]
        return hashlib.blake2b(
            json.dumps(start, sort_keys=True).encode(), digest_size=8
        ).hexdigest()

    async def release(self, url: str) -> None:
        """Release a server's GPU memory, and return once it is free.

        Raises EngineAway, EngineTrouble where it does not become idle.
        """
        await self._ask(
            "POST", url, f"/flush_cache?timeout={IDLE_WAIT_S:g}", IDLE_WAIT_S + ANSWER_S
        )
        await self._ask("POST", url, "/release_memory_occupation", MEMORY_S, {})

    async def resume(self, url: str) -> None:
        """Resume a server's GPU memory, and return once it takes requests.

        The memory must have been released. Raises EngineAway, EngineTrouble.
        """
        await self._ask("POST", url, "/resume_memory_occupation", MEMORY_S, {})

    async def _ask(
        self, method: str, url: str, path: str, within_s: float, body: Any = None
    ) -> str:
        timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                method, url + path, json=body, timeout=timeout
            ) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineTrouble(
                "ENGINE_SILENT", f"{url}{path} did not answer within {within_s:g} s"
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            why = f"{url}{path} does not answer: {error!r}"
            raise EngineAway("ENGINE_AWAY", why, retry_after_s=RETRY_S) from error
        if response.status == 200:
            return text
        answer = " ".join(text.split())[:300]
        raise EngineTrouble(
            "ENGINE_REFUSED", f"{url}{path} answered HTTP {response.status}: {answer}"
        )
