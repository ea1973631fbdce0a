"""Change what the engine serves, one change at a time: pauses, loads, pushed weights, and memory
that a trainer uses.

A pause takes every step off the engine by the same abort as a preemption, so that the engine is
idle while it lasts: weights may change, a flush is not refused, and a kept step goes on with its
own tokens under the salt of the weights that are there then. (SGLang's in-place pause would keep
decoding on KV of the old weights.)

A change that has begun goes on when its caller does not wait any longer, since the engine goes on
with it too: steps that ran meanwhile would store KV of the new weights under the name of the old
ones.

Invariant: before an engine's weights are overwritten in parts, or given away, the sidecar has the
engine itself name them INCOMPLETE, and what sleeps (`write_name`). No step runs under such a name,
also after a restart of this sidecar; a new engine process has whole weights of its own, and its
name shows that.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from treadle_core.model import INCOMPLETE
from treadle_runtime.bus import Bus
from treadle_runtime.errors import FailedPrecondition, Internal, InvalidArgument, TreadleError
from treadle_runtime.http.sglang import EngineClient, EngineRefused

from treadle_sidecar.convert import PushPart, StepFacts
from treadle_sidecar.engine.watch import MEMORY, EngineProfile, EngineWatch, engine_lost, write_name
from treadle_sidecar.prefixes import Prefixes
from treadle_sidecar.runner import StepRunner

log = structlog.get_logger()

ALMOST_IDLE_S = 5.0  # SGLang is idle some passes after its last request has ended

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """Result of a load or a push. load_s: seconds that it took. model_path: empty where the weights
    were pushed."""

    model_path: str
    weight_version: str
    load_s: float
    previous: str


@dataclass(eq=False)
class Push:
    """One push of a version, which ends with its last part, with a part that fails, or when no part
    comes in time.

    parts: that have been accepted. newest: the answer to the last accepted part. in_session:
    whether the engine expects parts.
    """

    push_id: str
    weight_version: str
    previous: str
    began_s: float = field(default_factory=time.monotonic)
    parts: int = 0
    newest: "asyncio.Future[Loaded] | None" = None
    in_session: bool = False
    expiry: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class Weights:
    """Owner of all changes to what the engine serves. push_timeout_s: longest time between two
    parts of a push."""

    engine: EngineClient
    watch: EngineWatch
    runner: StepRunner
    prefixes: Prefixes
    bus: Bus
    facts: StepFacts
    push_timeout_s: float
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _tasks: asyncio.TaskGroup | None = field(default=None, init=False)
    # under way
    _loads: "dict[tuple[str, str], asyncio.Future[Loaded]]" = field(
        default_factory=dict, init=False
    )
    _last: Loaded | None = field(default=None, init=False)
    _push: Push | None = field(default=None, init=False)  # under way
    _pushed: Push | None = field(default=None, init=False)  # the last one that has ended well
    _paused: bool = field(default=False, init=False)  # by a caller
    _changing: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.watch.on_name = self._hold_or_resume

    async def run(self) -> None:
        """Hold the tasks of all changes until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

    async def pause(self, *, abort: bool) -> tuple[int, int]:
        """Take the steps off the engine; return (aborted, kept) steps once none runs. abort: end
        the steps rather than keep them waiting."""
        async with self._idle(abort=abort) as counts:
            self._paused = True
        return counts

    async def resume(self) -> None:
        """Let steps run again, unless the engine cannot run any. Changes nothing where nothing is
        paused."""
        async with self._one_at_a_time:
            self._paused = False
            self._hold_or_resume()

    async def update(self, model_path: str, weight_version: str) -> Loaded:
        """Load weights; another call for the same ones waits for the load under way, or returns its
        result.

        Steps wait meanwhile, and stay paused where they were paused. Raises InvalidArgument,
        FailedPrecondition WEIGHTS_NOT_LOADED, PUSH_UNDER_WAY or ENGINE_ASLEEP, Unavailable.
        """
        target = (model_path, weight_version)
        if target not in self._loads:
            profile, last = self.watch.require_profile(), self._last
            if profile.weight_version == weight_version and not self._loads:
                if last is not None and (last.model_path, last.weight_version) == target:
                    return last
                raise _not_new(weight_version)
            self._loads[target] = load = self._begin(self._load(*target))
            load.add_done_callback(lambda _: self._loads.pop(target))
        return await asyncio.shield(self._loads[target])

    async def push(self, part: PushPart) -> Loaded:
        """Take one part of pushed weights once, however often it is sent; the last part names the
        version.

        Raises InvalidArgument, FailedPrecondition PUSH_UNDER_WAY, PUSH_OUT_OF_ORDER,
        WEIGHTS_NOT_PUSHED or ENGINE_ASLEEP, Unavailable.
        """
        for push in (self._push, self._pushed):
            if (
                push is not None
                and push.newest is not None
                and _is_part_of(push, part, push.parts - 1)
            ):
                return await asyncio.shield(push.newest)
        push = self._admit(part)
        push.newest = self._begin(self._take(push, part))
        return await asyncio.shield(push.newest)

    async def sleep(
        self, tags: frozenset[str], *, abort: bool
    ) -> tuple[tuple[int, int], frozenset[str]]:
        """Give memory to a trainer; return (aborted, kept) steps, and all that sleeps.

        Raises FailedPrecondition NO_MEMORY_SAVER, PUSH_UNDER_WAY or ENGINE_BUSY, Unavailable.
        """
        if not self.watch.require_profile().memory_saver:
            raise FailedPrecondition(
                "NO_MEMORY_SAVER",
                "the engine cannot give memory away: SGLang was started without "
                "--enable-memory-saver, and would keep all memory without an error",
            )
        return await asyncio.shield(self._begin(self._sleep(tags, abort=abort)))

    async def wake(self, tags: frozenset[str]) -> frozenset[str]:
        """Take memory back; return what still sleeps. Steps go on once all memory is there and the
        weights are whole. Raises FailedPrecondition ENGINE_NOT_AWAKE, Unavailable."""
        return await asyncio.shield(self._begin(self._wake(tags)))

    async def join_group(self, group: dict[str, object]) -> None:
        """Join the trainer's process group, by SGLang's own request; the engine does nothing else
        until all ranks are there. Raises FailedPrecondition GROUP_NOT_JOINED, Unavailable."""
        await asyncio.shield(self._begin(self._join(group)))

    async def leave_group(self, group_name: str) -> None:
        """Leave the trainer's process group. Raises FailedPrecondition GROUP_NOT_LEFT,
        Unavailable."""
        async with self._one_at_a_time, self.watch.calling("to leave the group", "GROUP_NOT_LEFT"):
            await self.engine.leave_group(group_name)

    def _begin(self, change: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Start a change that goes on without its caller. Raises Unavailable."""
        if self._tasks is None:
            change.close()
            raise engine_lost("this sidecar is shutting down")
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # seen, also without a caller
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._tasks.create_task(_settle(change, ended))
        return ended

    @asynccontextmanager
    async def _idle(self, *, abort: bool = False) -> AsyncIterator[tuple[int, int]]:
        """Keep everything off the engine within the block. Yields the (aborted, kept) steps."""
        async with self._one_at_a_time:
            self._changing = True
            try:
                counts = await self.runner.pause(abort=abort)
                async with self.prefixes.exclude():
                    yield counts
            finally:
                self._changing = False
                self._hold_or_resume()

    def _hold_or_resume(self) -> None:
        profile = self.watch.profile
        held = self._paused or (profile is not None and not profile.can_run)
        self.prefixes.paused = held
        idle = held or self._changing
        if idle and not self.runner.queue.paused:
            self.runner.hold()
        elif not idle and self.runner.queue.paused:
            self.runner.resume()

    async def _name(self, weight_version: str, asleep: frozenset[str]) -> None:
        name = write_name(weight_version, asleep)
        await self.engine.name_weights(name)
        self.watch.set_name(name)

    async def _ask_profile(self) -> EngineProfile:
        """Read the engine's name for its weights and return the profile: the engine may have
        restarted since the last poll."""
        self.watch.set_name(await self.engine.name_of_weights())
        return self.watch.require_profile()

    async def _drop_kv(self) -> None:
        self.prefixes.contexts.forget_read()
        try:
            await self.engine.flush_cache()
        except EngineRefused:
            log.warning("old KV was not flushed; it is never hit and is evicted as space is needed")

    async def _load(self, model_path: str, weight_version: str) -> Loaded:
        async with self._idle():
            if self._push is not None:
                raise _under_way(self._push)
            profile = self._require_weights()
            began_s = time.monotonic()
            async with self.watch.calling(
                "the weights", "WEIGHTS_NOT_LOADED", model_path=model_path
            ):
                if not profile.can_run:
                    with suppress(EngineRefused):  # no push was broken off
                        await self.engine.end_push()
                name = write_name(weight_version, profile.asleep)
                await self.engine.update_weights(model_path, name)
                self.watch.set_name(name)
                await self._drop_kv()
            self._last = Loaded(
                model_path, weight_version, time.monotonic() - began_s, profile.weight_version
            )
        await self.bus.publish(self.facts.weights_updated(weight_version))
        return self._last

    def _admit(self, part: PushPart) -> Push:
        """Return the push that the part belongs to, whose next part it is; part 0 begins a push."""
        push = self._push
        restarts = (
            push is not None and part.index == 0 and part.weight_version == push.weight_version
        )
        if push is None or restarts:
            if part.index > 0:
                raise _out_of_order(
                    0, "no such push is under way: it has failed, or no part came in time"
                )
            profile = self._require_weights()
            if profile.weight_version == part.weight_version:
                raise _not_new(part.weight_version)
            push = self._push = Push(part.push_id, part.weight_version, profile.weight_version)
        elif (part.push_id, part.weight_version) != (push.push_id, push.weight_version):
            raise _under_way(push)
        elif part.index != push.parts:
            raise _out_of_order(push.parts, f"part {part.index} came instead")
        push.parts += 1
        if push.expiry is not None:
            push.expiry.cancel()
        return push

    async def _take(self, push: Push, part: PushPart) -> Loaded:
        try:
            async with self._idle():
                await self._overwrite(push, part)
        except BaseException:
            self._end(push)
            raise
        pushed = Loaded("", part.weight_version, time.monotonic() - push.began_s, push.previous)
        if part.last:
            self._last, self._pushed = pushed, push
            self._end(push)
            await self.bus.publish(self.facts.weights_updated(part.weight_version))
        elif push.parts == part.index + 1:
            loop = asyncio.get_running_loop()
            push.expiry = loop.call_later(
                self.push_timeout_s, self._end, push, "no further part came in time"
            )
        return pushed

    async def _overwrite(self, push: Push, part: PushPart) -> None:
        if self._push is not push:
            raise _out_of_order(0, "the push has failed, or was begun anew")
        asleep, incomplete = self._require_weights().asleep, INCOMPLETE + part.weight_version
        async with self.watch.calling(
            "the pushed weights", "WEIGHTS_NOT_PUSHED", weight_version=part.weight_version
        ):
            if part.index == 0:
                await self._name(incomplete, asleep)
            elif (await self._ask_profile()).weight_version != incomplete:
                # with its own weights, without the parts
                raise _out_of_order(0, "the engine has restarted since")
            # What SGLang takes by IPC it makes ready itself.
            if part.way not in ("", "ipc") and not push.in_session:
                await self.engine.begin_push()
                push.in_session = True
            if part.way:
                await self.engine.push_weights(part.way, part.body)
            if part.last:
                if push.in_session:
                    await self.engine.end_push()
                await self._name(part.weight_version, asleep)
                await self._drop_kv()

    def _end(self, push: Push, problem: str = "") -> None:
        """End the push; without its last part, the engine stays incomplete."""
        if self._push is push:
            self._push = None
            if problem:
                log.warning(
                    "a push was given up", weight_version=push.weight_version, problem=problem
                )

    async def _sleep(
        self, tags: frozenset[str], *, abort: bool
    ) -> tuple[tuple[int, int], frozenset[str]]:
        async with self._idle(abort=abort) as counts:
            if self._push is not None:
                raise _under_way(self._push)
            async with self.watch.calling("to sleep"):
                profile = await self._ask_profile()
                asleep, version = (
                    profile.asleep | (tags or frozenset(MEMORY)),
                    profile.weight_version,
                )
                fresh = asleep - profile.asleep  # to give away twice kills an engine
                if "weights" in fresh and not profile.keeps_weights:
                    # they come back as whatever is there then
                    version = INCOMPLETE + version.removeprefix(INCOMPLETE)
                if fresh:
                    await self._require_idle()
                    self.prefixes.contexts.forget_read()
                    # First the name: a sidecar that restarts in between must not run steps without
                    # the memory.
                    await self._name(version, asleep)
                    await self.engine.release_memory(fresh)
            return counts, asleep

    async def _require_idle(self) -> None:
        try:
            await self.engine.flush_cache(ALMOST_IDLE_S)
        except EngineRefused as error:
            raise FailedPrecondition(
                "ENGINE_BUSY", "the engine runs requests that are not of this sidecar"
            ) from error

    async def _wake(self, tags: frozenset[str]) -> frozenset[str]:
        async with self._idle():
            async with self.watch.calling("to wake", "ENGINE_NOT_AWAKE"):
                profile = await self._ask_profile()
                back = profile.asleep & (tags or profile.asleep)
                if back:
                    await self.engine.resume_memory(back)
                    await self._name(profile.weight_version, profile.asleep - back)
            return profile.asleep - back

    async def _join(self, group: dict[str, object]) -> None:
        async with self._one_at_a_time, self.watch.calling("to join the group", "GROUP_NOT_JOINED"):
            await self.engine.join_group(group)

    def _require_weights(self) -> EngineProfile:
        """Return the profile of an engine whose weights may be overwritten."""
        profile = self.watch.require_profile()
        if "weights" in profile.asleep:
            raise FailedPrecondition(
                "ENGINE_ASLEEP", "the memory of the weights is given away; wake it first"
            )
        return profile


async def _settle(change: Coroutine[Any, Any, T], ended: "asyncio.Future[T]") -> None:
    try:
        ended.set_result(await change)
    except TreadleError as error:
        ended.set_exception(error)
    except Exception:
        log.exception("a change of what the engine serves has failed unexpectedly")
        said = "the change failed; the sidecar's log has more"
        ended.set_exception(Internal("INTERNAL", said))
    finally:
        ended.cancel()


def _is_part_of(push: Push, part: PushPart, index: int) -> bool:
    return (part.push_id, part.weight_version, part.index) == (
        push.push_id,
        push.weight_version,
        index,
    )


def _not_new(weight_version: str) -> InvalidArgument:
    return InvalidArgument(
        "weight_version", f"must be new; the engine serves {weight_version!r} already"
    )


def _under_way(push: Push) -> FailedPrecondition:
    version = push.weight_version
    return FailedPrecondition(
        "PUSH_UNDER_WAY",
        f"weights {version!r} are being pushed to this engine by another push",
        weight_version=version,
    )


def _out_of_order(due: int, problem: str) -> FailedPrecondition:
    return FailedPrecondition("PUSH_OUT_OF_ORDER", f"part {due} is due: {problem}", part=due)
