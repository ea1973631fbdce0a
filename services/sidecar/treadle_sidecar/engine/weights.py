"""Pauses and weight updates: one at a time.

A pause takes every step off the engine, by the same abort as an eviction, so that the engine is idle while it lasts:
weights may change, a flush is not refused, and a kept step goes on with its own tokens, under the salt of whatever
weights are there then. (SGLang's in-place pause would keep decoding on KV of the old weights.)
"""

import asyncio
import time

import structlog
from treadle_runtime.errors import FailedPrecondition, InvalidArgument, Unavailable

from treadle_sidecar.engine.client import EngineClient, EngineLost, EngineRefused
from treadle_sidecar.engine.watch import EngineWatch
from treadle_sidecar.facts import StepFacts
from treadle_sidecar.kv.prefixes import Prefixes
from treadle_sidecar.steps.runner import StepRunner
from treadle_sidecar.steps.step import PauseMode

log = structlog.get_logger()

RETRY_S = 2.0


class Weights:
    """The one place that changes what the engine serves."""

    def __init__(
        self, engine: EngineClient, watch: EngineWatch, runner: StepRunner, prefixes: Prefixes, facts: StepFacts
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._runner = runner
        self._prefixes = prefixes
        self._facts = facts
        self._one_at_a_time = asyncio.Lock()

    async def pause(self, mode: PauseMode) -> tuple[int, int]:
        """(aborted, kept) steps; returns once none runs."""
        async with self._one_at_a_time:
            self._prefixes.paused = True
            counts = await self._runner.pause(mode)
            async with self._prefixes.held_back():
                return counts

    async def resume(self) -> None:
        """Steps run again. Resuming what is not paused is fine."""
        async with self._one_at_a_time:
            self._prefixes.paused = False
            self._runner.resume()

    async def update(self, model_path: str, weight_version: str) -> tuple[float, str]:
        """(seconds that the load took, version before). Steps here wait meanwhile, and stay paused where they were.
        Raises InvalidArgument, FailedPrecondition WEIGHTS_NOT_LOADED, Unavailable.
        """
        async with self._one_at_a_time:
            if self._watch.profile is None or not self._watch.healthy:
                raise Unavailable("ENGINE_LOST", "the engine does not answer", retry_after_s=RETRY_S)
            previous = self._watch.profile.weight_version
            if weight_version == previous:
                raise InvalidArgument("weight_version", f"must be new; the engine serves {previous!r} already")
            was_paused = self._runner.queue.paused
            try:
                await self._runner.pause(PauseMode.KEEP)
                async with self._prefixes.held_back():
                    load_s = await self._load(model_path, weight_version)
            finally:
                if not was_paused:
                    self._runner.resume()
        await self._facts.weights_updated(weight_version)
        return load_s, previous

    async def _load(self, model_path: str, weight_version: str) -> float:
        began = time.monotonic()
        try:
            await self._engine.update_weights(model_path, weight_version)
            self._watch.weights_are(weight_version)
            if not await self._engine.flush_cache():
                log.warning("old KV was not flushed; it is never hit, and goes as room is needed")
        except EngineRefused as error:
            raise FailedPrecondition(
                "WEIGHTS_NOT_LOADED", f"the engine refused the weights: {error}", model_path=model_path
            ) from error
        except EngineLost as error:
            self._watch.suspect()
            raise Unavailable("ENGINE_LOST", str(error), retry_after_s=RETRY_S) from error
        return time.monotonic() - began
