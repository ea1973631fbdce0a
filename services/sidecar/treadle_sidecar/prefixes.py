"""Export the context of a trajectory to another sidecar, and bring one from another sidecar here (prefetch).

Token ids go from sidecar to sidecar; KV goes from engine to shared storage to engine, by HiCache, when the target is
asked to prefill a prefix whose pages are stored. Owns the limit on prefetches at once.

Invariant: KV is never computed under another weight version than the one its salt names, because the salt is part of
its name in the storage that all engines share.
"""

import asyncio
import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from treadle_runtime.errors import FailedPrecondition, InvalidArgument, NotFound

from treadle_sidecar.engine.client import EngineClient, EngineLost, EngineRefused, Prefill
from treadle_sidecar.engine.process import SPARE_REQUESTS
from treadle_sidecar.engine.watch import EngineProfile, EngineWatch, engine_lost
from treadle_sidecar.storage_keys import StoredPages

CONTEXT_LIMIT_TOKENS = 32 * 1024 * 1024  # 128 MiB of int32; a thousand trajectories of 32k tokens


class Contexts:
    """The last context (prompt and output) that this sidecar saw of each trajectory, for another sidecar to fetch.

    Beyond `limit_tokens` in all, the least recently used are forgotten.
    """

    def __init__(self, limit_tokens: int = CONTEXT_LIMIT_TOKENS) -> None:
        self._limit_tokens = limit_tokens
        self._tokens = 0
        self._contexts: OrderedDict[str, array[int]] = OrderedDict()

    def remember(self, trajectory_id: str, context: "array[int]") -> None:
        """Replace the trajectory's context."""
        self.forget(trajectory_id)
        self._contexts[trajectory_id] = context
        self._tokens += len(context)
        while self._tokens > self._limit_tokens and len(self._contexts) > 1:
            _, dropped = self._contexts.popitem(last=False)
            self._tokens -= len(dropped)

    def get(self, trajectory_id: str) -> "array[int] | None":
        """None where the trajectory was never here, or was forgotten."""
        context = self._contexts.get(trajectory_id)
        if context is not None:
            self._contexts.move_to_end(trajectory_id)
        return context

    def forget(self, trajectory_id: str) -> None:
        """Forgetting an unknown trajectory changes nothing."""
        dropped = self._contexts.pop(trajectory_id, None)
        if dropped is not None:
            self._tokens -= len(dropped)


POLL_STORAGE_S = 0.05  # a page of a small model is written in about a millisecond


@dataclass(frozen=True)
class Export:
    """A trajectory's context; `stored_tokens` of it are known to be in shared storage."""

    token_ids: "array[int]"
    cache_salt: str
    stored_tokens: int


@dataclass(frozen=True)
class Prefetched:
    """Where a prefix's KV came from, in tokens."""

    prefix_tokens: int
    from_cache: int
    from_storage: int
    prefilled: int
    elapsed_s: float


Fetch = Callable[[], Awaitable[Export]]


class Prefixes:
    """`storage` is HiCache's folder, None where it is not known; an export waits `export_wait_s` for the backup."""

    def __init__(
        self, engine: EngineClient, watch: EngineWatch, contexts: Contexts, storage: Path | None, export_wait_s: float
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._contexts = contexts
        self._storage = storage
        self._export_wait_s = export_wait_s
        self._permits = asyncio.Semaphore(SPARE_REQUESTS)
        self.paused = False

    async def export(self, trajectory_id: str, *, wait: bool = True) -> Export:
        """A trajectory's context; waits at most `export_wait_s` until its pages are stored. Raises NotFound."""
        context = self._contexts.get(trajectory_id)
        if context is None:
            raise NotFound(
                "PREFIX_NOT_FOUND", f"no context of trajectory {trajectory_id!r} is here", trajectory_id=trajectory_id
            )
        profile = self._watch.require_profile()
        stored = await self._stored_within(context, profile, self._export_wait_s if wait else 0.0)
        return Export(context, profile.weight_version, stored)

    async def prefetch(self, trajectory_id: str, source: Fetch, cache_salt: str, storage_only: bool) -> Prefetched:
        """Bring the prefix onto this engine and remember it.

        Raises FailedPrecondition PREFIX_NOT_STORED, WEIGHT_VERSION_MISMATCH or ENGINE_PAUSED, Unavailable.
        """
        began = time.monotonic()
        export = await source()
        prefix = export.token_ids
        async with self._permits:  # weights do not change while it is held
            if self.paused:
                raise FailedPrecondition(
                    "ENGINE_PAUSED", "the engine is paused; its device may be used for something else"
                )
            profile = self._watch.require_profile()
            salt = cache_salt or export.cache_salt or profile.weight_version
            if salt != profile.weight_version:
                raise FailedPrecondition(
                    "WEIGHT_VERSION_MISMATCH",
                    f"the prefix is of weights {salt!r}, this engine serves {profile.weight_version!r}",
                    cache_salt=salt,
                )
            if not 0 < len(prefix) <= profile.max_input_tokens:
                raise InvalidArgument("token_ids", f"must be 1 to {profile.max_input_tokens} tokens, is {len(prefix)}")
            profile.require_known("token_ids", prefix)
            if storage_only:
                self._require_stored(prefix, profile)
            found = await self._prefill(prefix, salt)
        self._contexts.remember(trajectory_id, prefix)
        return Prefetched(len(prefix), found.cached, found.from_storage, found.computed, time.monotonic() - began)

    @asynccontextmanager
    async def exclude(self) -> AsyncIterator[None]:
        """Keep prefetches off the engine within the block."""
        taken = 0
        try:
            for _ in range(SPARE_REQUESTS):
                await self._permits.acquire()
                taken += 1
            yield
        finally:
            for _ in range(taken):
                self._permits.release()

    async def _prefill(self, prefix: "array[int]", salt: str) -> Prefill:
        rid = f"{uuid.uuid4().hex}-prefix"
        try:
            return await self._engine.prefill(rid, prefix.tolist(), salt)
        except EngineRefused as error:
            raise FailedPrecondition("ENGINE_REFUSED", f"the engine refused the prefix: {error}") from error
        except EngineLost as error:
            self._watch.suspect()
            raise engine_lost(str(error)) from error

    def _require_stored(self, prefix: "array[int]", profile: EngineProfile) -> None:
        # The engine always computes the last token itself, so the pages before it are all that can come from storage.
        due = (len(prefix) - 1) // profile.page_tokens * profile.page_tokens
        stored = self._stored(prefix, profile).tokens
        if stored < due:
            raise FailedPrecondition(
                "PREFIX_NOT_STORED",
                f"{stored} of {due} tokens are known to be in shared storage",
                stored_tokens=stored,
                due_tokens=due,
            )

    async def _stored_within(self, context: "array[int]", profile: EngineProfile, wait_s: float) -> int:
        pages = self._stored(context, profile)
        ends_at = time.monotonic() + wait_s
        # The last sampled token has no KV: it was never an input.
        due = (len(context) - 1) // profile.page_tokens * profile.page_tokens
        while self._storage is not None and profile.storage and pages.tokens < due and time.monotonic() < ends_at:
            await asyncio.sleep(POLL_STORAGE_S)
            pages.look()
        return min(pages.tokens, len(context))

    def _stored(self, tokens: "array[int]", profile: EngineProfile) -> StoredPages:
        pages = StoredPages(
            self._storage, profile.storage_suffixes, tokens, profile.page_tokens, profile.weight_version
        )
        pages.look()
        return pages
