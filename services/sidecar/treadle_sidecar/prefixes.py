"""Export the context of a trajectory to another sidecar, and bring one from another sidecar here
(prefetch).

Token ids go from sidecar to sidecar; KV goes from engine to shared storage to engine, by HiCache,
when the target's sidecar has it prefill a prefix whose pages are stored. This module owns the limit
on prefetches at once.

Invariant: KV is never computed under another weight version than the one its salt names, because
the salt is part of its name in the storage that all engines share.
"""

import asyncio
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from treadle.engine.v1 import engine_pb2 as pb
from treadle.engine.v1 import engine_pb2_grpc
from treadle_runtime.calls import remaining_s
from treadle_runtime.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from treadle_runtime.fields import duration, like
from treadle_runtime.http.sglang import EngineClient

from treadle_sidecar import convert
from treadle_sidecar.engine.process import SPARE_REQUESTS
from treadle_sidecar.engine.watch import EngineProfile, EngineWatch
from treadle_sidecar.runner import Contexts
from treadle_sidecar.storage_keys import StoredPages

POLL_STORAGE_S = 0.05  # a page of a small model is written in about a millisecond
EXPORT_TIMEOUT_S = (
    30.0  # for another sidecar's ExportPrefix, where the caller's own deadline is further away
)
RETRY_SOURCE_S = 2.0


@dataclass(eq=False)
class Prefixes:
    """Exports and prefetches of contexts, for one engine.

    storage: HiCache's folder, None where it is not known. export_wait_s: how long after a step an
    export waits for the engine's backup. channel: connects to another sidecar.
    """

    engine: EngineClient
    watch: EngineWatch
    contexts: Contexts
    storage: Path | None
    export_wait_s: float
    channel: Callable[[str, str], grpc.aio.Channel]
    paused: bool = False
    _permits: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(SPARE_REQUESTS), init=False
    )

    async def export(self, trajectory_id: str, *, counts_only: bool) -> pb.ExportPrefixResponse:
        """Return a trajectory's context, once its pages are stored or the wait is over; or its
        counts at once. Raises NotFound."""
        context = self.contexts.get(trajectory_id)
        if context is None:
            raise _prefix_not_found(
                trajectory_id, f"no context of trajectory {trajectory_id!r} is here"
            )
        profile = self.watch.require_profile()
        salt = like(trajectory_id, profile.weight_version)
        # Storage that fails is waited for once, not again by the export for a prefill.
        wait_s = 0.0 if counts_only else self.export_wait_s - self.contexts.age_s(trajectory_id)
        return pb.ExportPrefixResponse(
            token_ids=None if counts_only else convert.packed(context),
            cache_salt=salt,
            stored_tokens=await self._stored_within(context, profile, salt, wait_s),
            prefix_tokens=len(context),
        )

    async def prefetch(
        self,
        trajectory_id: str,
        source: "array[int] | pb.PrefixRef",
        cache_salt: str,
        storage_only: bool,
    ) -> pb.PrefetchPrefixResponse:
        """Bring the prefix onto this engine and remember it.

        Raises FailedPrecondition PREFIX_NOT_STORED, WEIGHT_VERSION_MISMATCH or ENGINE_PAUSED,
        NotFound, Unavailable.
        """
        began = time.monotonic()
        prefix, source_salt = (
            await self._fetch(source) if isinstance(source, pb.PrefixRef) else (source, "")
        )
        async with self._permits:  # weights do not change while it is held
            if self.paused:
                raise FailedPrecondition(
                    "ENGINE_PAUSED",
                    "the engine is paused; its device may be used for something else",
                )
            profile = self.watch.require_profile()
            own = like(trajectory_id, profile.weight_version)
            salt = cache_salt or source_salt or own
            if salt != own:
                raise FailedPrecondition(
                    "WEIGHT_VERSION_MISMATCH",
                    f"the prefix is of weights {salt!r}, this engine serves {own!r}",
                    cache_salt=salt,
                )
            if not 0 < len(prefix) <= profile.max_input_tokens:
                raise InvalidArgument(
                    "token_ids", f"must be 1 to {profile.max_input_tokens} tokens, is {len(prefix)}"
                )
            profile.require_known("token_ids", prefix)
            if storage_only:
                await self._require_stored(prefix, profile, salt)
            async with self.watch.calling("the prefix"):
                found = await self.engine.prefill(
                    f"{uuid.uuid4().hex}-prefix", prefix.tolist(), salt
                )
        self.contexts.remember(trajectory_id, prefix)
        return pb.PrefetchPrefixResponse(
            prefix_tokens=len(prefix),
            tokens_from_cache=found.cached,
            tokens_from_storage=found.from_storage,
            tokens_prefilled=found.computed,
            elapsed=duration(time.monotonic() - began),
        )

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

    async def _fetch(self, reference: pb.PrefixRef) -> tuple["array[int]", str]:
        """Return the token ids and the salt of a context that another sidecar has."""
        stub = engine_pb2_grpc.EngineServiceStub(self.channel(reference.engine_address, "sidecar"))
        request = pb.ExportPrefixRequest(trajectory_id=reference.trajectory_id)
        timeout_s = min(remaining_s() or EXPORT_TIMEOUT_S, EXPORT_TIMEOUT_S)
        try:
            response = await stub.ExportPrefix(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            what = (
                f"{reference.engine_address} does not export {reference.trajectory_id!r}: "
                f"{error.details()}"
            )
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise _prefix_not_found(reference.trajectory_id, what) from error
            raise Unavailable("SOURCE_UNAVAILABLE", what, retry_after_s=RETRY_SOURCE_S) from error
        return convert.token_ids("token_ids", response.token_ids), response.cache_salt

    async def _require_stored(
        self, prefix: "array[int]", profile: EngineProfile, salt: str
    ) -> None:
        # The engine always computes the last token itself, so the pages before it are all that can
        # come from storage.
        due = (len(prefix) - 1) // profile.page_tokens * profile.page_tokens
        stored = (await self._look(prefix, profile, salt)).tokens
        if stored < due:
            raise FailedPrecondition(
                "PREFIX_NOT_STORED",
                f"{stored} of {due} tokens are known to be in shared storage",
                stored_tokens=stored,
                due_tokens=due,
            )

    async def _stored_within(
        self, context: "array[int]", profile: EngineProfile, salt: str, wait_s: float
    ) -> int:
        pages = await self._look(context, profile, salt)
        ends_at = time.monotonic() + wait_s
        # The last sampled token has no KV: it was never an input.
        due = (len(context) - 1) // profile.page_tokens * profile.page_tokens
        while (
            self.storage is not None
            and profile.storage
            and pages.tokens < due
            and time.monotonic() < ends_at
        ):
            await asyncio.sleep(POLL_STORAGE_S)
            await asyncio.to_thread(pages.look)
        return min(pages.tokens, len(context))

    async def _look(self, tokens: "array[int]", profile: EngineProfile, salt: str) -> StoredPages:
        pages = StoredPages(
            self.storage, profile.storage_suffixes, tokens, profile.page_tokens, salt
        )
        await asyncio.to_thread(pages.look)
        return pages


def _prefix_not_found(trajectory_id: str, what: str) -> NotFound:
    return NotFound("PREFIX_NOT_FOUND", what, trajectory_id=trajectory_id)
