"""Pause the engine and update its weights, one at a time.

A pause takes every step off the engine by the same abort as a preemption, so that the engine is idle while it lasts:
weights may change, a flush is not refused, and a kept step goes on with its own tokens under the salt of the weights
that are there then. (SGLang's in-place pause would keep decoding on KV of the old weights.)
"""

import asyncio
import time
from dataclasses import dataclass, field

import structlog
from treadle_runtime.bus import Bus
from treadle_runtime.errors import InvalidArgument

from treadle_sidecar.convert import StepFacts
from treadle_sidecar.engine.client import EngineClient
from treadle_sidecar.engine.watch import EngineWatch
from treadle_sidecar.prefixes import Prefixes
from treadle_sidecar.runner import StepRunner

log = structlog.get_logger()


@dataclass(eq=False)
class Weights:
    """The only part that changes what the engine serves."""

    engine: EngineClient
    watch: EngineWatch
    runner: StepRunner
    prefixes: Prefixes
    bus: Bus
    facts: StepFacts
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def pause(self, *, abort: bool) -> tuple[int, int]:
        """Returns (aborted, kept) steps once none runs; abort: end the steps rather than keep them waiting."""
        async with self._one_at_a_time:
            self.prefixes.paused = True
            counts = await self.runner.pause(abort=abort)
            async with self.prefixes.exclude():
                return counts

    async def resume(self) -> None:
        """Let steps run again. Changes nothing where nothing is paused."""
        async with self._one_at_a_time:
            self.prefixes.paused = False
            self.runner.resume()

    async def update(self, model_path: str, weight_version: str) -> tuple[float, str]:
        """Load weights. Returns the seconds that the load took and the version before.

        Steps wait meanwhile, and stay paused where they were paused. Raises InvalidArgument, FailedPrecondition
        WEIGHTS_NOT_LOADED, Unavailable.
        """
        async with self._one_at_a_time:
            previous = self.watch.require_profile().weight_version
            if weight_version == previous:
                raise InvalidArgument("weight_version", f"must be new; the engine serves {previous!r} already")
            was_paused = self.runner.queue.paused
            try:
                await self.runner.pause(abort=False)
                async with self.prefixes.exclude():
                    began = time.monotonic()
                    async with self.watch.calling("the weights", "WEIGHTS_NOT_LOADED", model_path=model_path):
                        await self.engine.update_weights(model_path, weight_version)
                        self.watch.set_weight_version(weight_version)
                        self.prefixes.contexts.forget_read()
                        if not await self.engine.flush_cache():
                            log.warning("old KV was not flushed; it is never hit and is evicted as space is needed")
                    load_s = time.monotonic() - began
            finally:
                if not was_paused:
                    self.runner.resume()
        await self.bus.publish(self.facts.weights_updated(weight_version))
        return load_s, previous
