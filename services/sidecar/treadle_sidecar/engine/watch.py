"""Whether the engine is there, and what it is. Polls it; owns the engine's profile and the present weight version.

An engine that refuses connections is lost at once; one that is slow to answer only after several polls, because a CPU
engine in a long prefill answers late. `changed` wakes everybody who waits for a change of health.
"""

import asyncio
import dataclasses

import structlog

from treadle_sidecar.engine.client import EngineClient, EngineLost, EngineProfile, EngineRefused

log = structlog.get_logger()

POLL_S = 1.0
SLOW_POLLS = 3  # polls in a row without an answer, each as long as EngineClient waits, after which an engine is lost


class EngineWatch:
    """`profile` is None until the engine has answered for the first time; it is kept while the engine is away."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.profile: EngineProfile | None = None
        self.healthy = False
        self.kv_tokens_used = 0
        self._changed = asyncio.Event()
        self._poll_now = asyncio.Event()
        self._weights_told = 0

    async def run(self) -> None:
        """Polls for ever."""
        missed = 0
        while True:
            self._poll_now.clear()
            try:
                await self._poll()
                missed = 0
                self._set_healthy(True)
            except EngineRefused as error:  # it runs, and is not ready
                log.debug("engine is not ready", error=str(error))
                self._set_healthy(False)
            except EngineLost as error:
                missed += 1
                # A timeout is an OSError too, but a busy engine's.
                gone = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, TimeoutError)
                if self.healthy and (gone or missed >= SLOW_POLLS):
                    log.warning("engine is lost", error=str(error))
                    self._set_healthy(False)
            try:
                async with asyncio.timeout(POLL_S):
                    await self._poll_now.wait()
            except TimeoutError:
                continue

    def suspect(self) -> None:
        """A stream broke: ask the engine now."""
        self._poll_now.set()

    def weights_are(self, weight_version: str) -> None:
        """The engine has said that these are its weights."""
        self._weights_told += 1
        if self.profile is not None and weight_version != self.profile.weight_version:
            self.profile = dataclasses.replace(self.profile, weight_version=weight_version)

    async def until_healthy(self) -> EngineProfile:
        """The profile, once the engine is there."""
        while not self.healthy or self.profile is None:
            await self._changed.wait()
        return self.profile

    async def until_lost(self) -> None:
        """Returns once the engine is away."""
        while self.healthy:
            await self._changed.wait()

    async def _poll(self) -> None:
        if not self.healthy or self.profile is None:
            self.profile = await self._engine.profile()
            log.info("engine is there", **_summary(self.profile))
        else:
            told = self._weights_told
            version = await self._engine.weight_version()
            if told == self._weights_told:  # else an update has overtaken the answer
                self.weights_are(version)
        self.kv_tokens_used = await self._engine.kv_tokens_used()

    def _set_healthy(self, healthy: bool) -> None:
        if healthy == self.healthy:
            return
        self.healthy = healthy
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _summary(profile: EngineProfile) -> dict[str, object]:
    return {
        "model": profile.model_path,
        "weight_version": profile.weight_version,
        "slots": profile.slots,
        "kv_tokens": profile.kv_tokens,
        "max_sequence_tokens": profile.max_sequence_tokens,
        "storage": profile.storage,
        "vocab_size": profile.vocab_size,
    }
