"""Pause the engine and update its weights, one at a time.

A pause takes every step off the engine by the same abort as a preemption, so that the engine is idle while it lasts:
weights may change, a flush is not refused, and a kept step goes on with its own tokens under the salt of the weights
that are there then. (SGLang's in-place pause would keep decoding on KV of the old weights.)

A load that has begun goes on when its caller does not wait any longer, since the engine goes on with it too: steps that
ran meanwhile would store KV of the new weights under the name of the old ones.
"""

import asyncio
import time
from dataclasses import dataclass, field

import structlog
from treadle_runtime.bus import Bus
from treadle_runtime.errors import InvalidArgument, TreadleError

from treadle_sidecar.convert import StepFacts
from treadle_sidecar.engine.client import EngineClient
from treadle_sidecar.engine.watch import EngineWatch, engine_lost
from treadle_sidecar.prefixes import Prefixes
from treadle_sidecar.runner import StepRunner

log = structlog.get_logger()


@dataclass(frozen=True)
class Loaded:
    """What a load brought. load_s: seconds that it took."""

    model_path: str
    weight_version: str
    load_s: float
    previous: str


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
    _tasks: asyncio.TaskGroup | None = field(default=None, init=False)
    _loads: "dict[tuple[str, str], asyncio.Future[Loaded]]" = field(default_factory=dict, init=False)  # under way
    _last: Loaded | None = field(default=None, init=False)

    async def run(self) -> None:
        """Background task: what loads go on in."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

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

    async def update(self, model_path: str, weight_version: str) -> Loaded:
        """Load weights; another call for the same ones waits for the load under way, or returns what it brought.

        Steps wait meanwhile, and stay paused where they were paused. Raises InvalidArgument, FailedPrecondition
        WEIGHTS_NOT_LOADED, Unavailable.
        """
        target = (model_path, weight_version)
        if target not in self._loads:
            profile, last = self.watch.require_profile(), self._last
            if profile.weight_version == weight_version and not self._loads:
                if last is not None and (last.model_path, last.weight_version) == target:
                    return last
                raise InvalidArgument("weight_version", f"must be new; the engine serves {weight_version!r} already")
            if self._tasks is None:
                raise engine_lost("this sidecar is shutting down")
            load = self._loads[target] = asyncio.get_running_loop().create_future()
            load.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # seen, also without a caller
            self._tasks.create_task(self._load(target, load))
        return await asyncio.shield(self._loads[target])

    async def _load(self, target: tuple[str, str], load: "asyncio.Future[Loaded]") -> None:
        try:
            async with self._one_at_a_time:
                self._last = await self._replace(*target)
            await self.bus.publish(self.facts.weights_updated(self._last.weight_version))
            load.set_result(self._last)
        except TreadleError as error:
            load.set_exception(error)
        finally:
            load.cancel()
            del self._loads[target]

    async def _replace(self, model_path: str, weight_version: str) -> Loaded:
        previous = self.watch.require_profile().weight_version
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
                return Loaded(model_path, weight_version, time.monotonic() - began, previous)
        finally:
            if not was_paused:
                self.runner.resume()
