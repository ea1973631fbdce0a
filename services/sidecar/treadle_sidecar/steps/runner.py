"""Carries steps out: the queue (treadle_core.steps.queue) decides, this admits, streams, evicts and resumes.

Owns one task a step, in one TaskGroup. A step's task is the only one that touches its record; others ask it (`stop`,
an abort on the engine) and wait. Invariants: a token that the engine sampled reaches the caller's events exactly
once, also those sampled between an abort and its acknowledgement; a slot is free again only after the engine has let
the request go.

How fast the engine decodes: tokens a second over the last seconds. The time is passed in."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import structlog
from treadle_core.steps.queue import Admit, Evict, QueueFull, QueuePolicy, StepQueue
from treadle_runtime.errors import FailedPrecondition, NotFound, ResourceExhausted, TreadleError, Unavailable

from treadle_sidecar.engine.client import EngineClient, EngineLost, EngineRefused
from treadle_sidecar.engine.watch import EngineWatch
from treadle_sidecar.facts import StepFacts
from treadle_sidecar.kv.prefixes import Contexts
from treadle_sidecar.steps.running import RunningStep
from treadle_sidecar.steps.sampling import attempt_request, limits, over
from treadle_sidecar.steps.step import Failed, PauseMode, Reason, StepOrder

WINDOW_S = 5.0  # long enough for a few decode steps of a slow engine, short enough to follow a batch that shrinks
BIN_S = 0.25


class LoadMeter:
    """Counts tokens in bins; at most WINDOW_S / BIN_S + 1 of them are kept."""

    def __init__(self) -> None:
        self._bins: deque[tuple[float, int]] = deque()  # start, tokens

    def sampled(self, tokens: int, now: float) -> None:
        """`tokens` came at `now`."""
        if self._bins and now - self._bins[-1][0] < BIN_S:
            start, count = self._bins[-1]
            self._bins[-1] = (start, count + tokens)
        else:
            self._bins.append((now, tokens))
        self._forget(now)

    def tokens_per_s(self, now: float) -> float:
        """Over the window; 0 where nothing was sampled in it."""
        self._forget(now)
        return sum(count for _, count in self._bins) / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._bins and self._bins[0][0] < now - WINDOW_S:
            self._bins.popleft()


log = structlog.get_logger()

# An abort that overtakes its request on the way to the engine is ignored there; so it is said again until the stream
# ends.
REPEAT_ABORT_S = 0.25
RETRY_FULL_QUEUE_S = 1.0  # about the time of a short step
RETRY_LOST_ENGINE_S = 2.0


class StepRunner:
    """`slots`: steps that decode at once; 0: as many as the engine was started for."""

    def __init__(
        self,
        engine: EngineClient,
        watch: EngineWatch,
        facts: StepFacts,
        contexts: Contexts,
        policy: QueuePolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = StepQueue(policy)
        self._slots = policy.slots
        self.meter = LoadMeter()
        self._engine = engine
        self._watch = watch
        self._facts = facts
        self._contexts = contexts
        self._clock = clock
        self._steps: dict[str, RunningStep] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._slot_freed = asyncio.Event()

    async def run(self) -> None:
        """Holds the tasks of all steps, and ends the waiting ones when the engine is lost."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await self._follow_engine()
            finally:
                self._tasks = None

    async def _follow_engine(self) -> None:
        while True:
            profile = await self._watch.until_healthy()
            self.queue.policy = replace(self.queue.policy, slots=self._slots or profile.slots)
            self.decide()
            await self._watch.until_lost()
            for step in [step for step in self._steps.values() if not step.admitted]:
                step.stop_with(self._engine_lost("the engine went away while the step waited"))

    def submit(self, order: StepOrder) -> RunningStep:
        """Takes a step in. Raises InvalidArgument, ResourceExhausted QUEUE_FULL, Unavailable ENGINE_LOST."""
        profile = self._watch.profile
        if not self._watch.healthy or profile is None or self._tasks is None:
            raise self._engine_lost("the engine does not answer")
        limit = limits(order, profile)
        try:
            self.queue.add(order.ticket_id, order.priority, preemptible=order.preemptible)
        except QueueFull as error:
            raise ResourceExhausted(
                "QUEUE_FULL", str(error), retry_after_s=RETRY_FULL_QUEUE_S, capacity=error.capacity
            ) from None
        step = RunningStep(order, limit, self._clock(), time.time())
        self._steps[order.ticket_id] = step
        self._tasks.create_task(self._drive(step), name=f"step-{order.ticket_id}")
        return step

    def abandon(self, step: RunningStep) -> None:
        """Nobody listens any more."""
        if step.order.ticket_id in self._steps:
            self._stop(step, None)

    async def abort(self, ticket_id: str) -> int:
        """Ends a step; its output tokens, once the engine has let it go. Raises NotFound."""
        step = self._steps.get(ticket_id)
        if step is None:
            raise NotFound("STEP_NOT_FOUND", f"no step with ticket {ticket_id!r} is here", ticket_id=ticket_id)
        self._stop(step, None)
        await step.over.wait()
        return len(step.record.output)

    def reprioritize(self, ticket_id: str, priority: float) -> bool:
        """False where the step is not here. `decide` follows, once for all changes."""
        return self.queue.reprioritize(ticket_id, priority)

    async def pause(self, mode: PauseMode) -> tuple[int, int]:
        """Returns (aborted, kept) once nothing runs on the engine. Running steps that are kept give up their slots
        with their KV cached.
        """
        self.queue.paused = True
        steps = list(self._steps.values())
        if mode is PauseMode.ABORT:
            for step in steps:
                self._stop(step, None)
            for step in steps:
                await step.over.wait()
            return len(steps), 0
        self.decide()
        while self.queue.running:
            self._slot_freed.clear()
            await self._slot_freed.wait()
        return 0, len(self._steps)

    def resume(self) -> None:
        """Steps are admitted again."""
        self.queue.paused = False
        self.decide()

    def decide(self) -> None:
        """Carries out what the queue decides; nothing any more at drain."""
        if self._tasks is None:
            return
        for action in self.queue.decide():
            step = self._steps[action.step_id]
            if isinstance(action, Admit):
                step.admit()
            else:
                self._evict(step, action)

    @property
    def oldest_wait_s(self) -> float:
        """Of the steps that wait now; 0 where none does."""
        now = self._clock()
        waiting = (step for ticket_id, step in self._steps.items() if ticket_id in self.queue and not step.admitted)
        return max((now - step.waiting_since for step in waiting), default=0.0)

    def _evict(self, step: RunningStep, action: Evict) -> None:
        step.evicted_by = action.by
        self._ask_engine_to_abort(step)

    def _stop(self, step: RunningStep, error: TreadleError | None) -> None:
        step.stop_with(error)
        if step.admitted:
            self._ask_engine_to_abort(step)

    def _ask_engine_to_abort(self, step: RunningStep) -> None:
        if self._tasks is not None and not step.aborting:
            step.aborting = True
            self._tasks.create_task(self._abort_until_over(step), name=f"abort-{step.order.ticket_id}")

    async def _abort_until_over(self, step: RunningStep) -> None:
        while step.aborting:
            if step.rid:
                try:
                    await self._engine.abort(step.rid)
                except (EngineLost, EngineRefused) as error:
                    log.warning("abort did not reach the engine", ticket_id=step.order.ticket_id, error=str(error))
            await step.attempt_ends_within(REPEAT_ABORT_S)

    async def _drive(self, step: RunningStep) -> None:
        try:
            await self._facts.queued(step.order)
            self.decide()
            reason = over(step.record, step.limit) or await self._run_to_end(step)
            finished = step.record.finished(reason, self._clock())
            before = self._contexts.of(step.order.trajectory_id)
            self._contexts.remember(step.order.trajectory_id, step.record.context)
            self.queue.remove(step.order.ticket_id)
            step.emit(finished)
            self.decide()
            await self._facts.finished(step.order, finished, step.record.output, before)
        except TreadleError as error:
            self._contexts.remember(step.order.trajectory_id, step.record.context)
            step.emit(Failed(error))
        finally:
            step.attempt_over()
            self.queue.remove(step.order.ticket_id)
            del self._steps[step.order.ticket_id]
            step.over.set()
            self._slot_freed.set()
            self.decide()

    async def _run_to_end(self, step: RunningStep) -> Reason:
        while True:
            if not await step.slot():
                return Reason.ABORTED
            started = step.record.admitted(self._clock())
            step.emit(started)
            await self._facts.started(step.order, started)
            try:
                finish = await self._attempt(step)
            finally:
                step.attempt_over()
            if finish is not None:
                return finish
            preempted = step.record.preempted(step.evicted_by, self._clock())
            step.emit(preempted)
            self.queue.evicted(step.order.ticket_id)
            step.waiting_since = self._clock()
            self._slot_freed.set()
            await self._facts.preempted(step.order, preempted)
            self.decide()

    async def _attempt(self, step: RunningStep) -> Reason | None:
        """None: cut by an eviction, to be resumed."""
        profile = self._watch.profile
        if profile is None or not self._watch.healthy:
            raise self._engine_lost("the engine went away before the step reached it")
        if step.aborting:  # evicted or stopped before it got to the engine
            return self._outcome(step, "", "")
        request = attempt_request(step.record, step.limit, profile.weight_version)
        step.rid = request.rid
        finish, message = "", ""
        try:
            await step.learn_tail(self._engine)
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    now = self._clock()
                    if chunk.token_ids and not step.stop_found:
                        event = step.record.sampled(
                            chunk.token_ids, chunk.logprobs, chunk.weight_version, chunk.cached_tokens, now
                        )
                        step.emit(event)
                        self.meter.sampled(len(chunk.token_ids), now)
                        if step.stops.completes(chunk.text):
                            step.stop_found = True
                            self._ask_engine_to_abort(step)
                        if self.queue.progress(step.order.ticket_id, step.record.attempt_tokens):
                            self.decide()
                    if chunk.finish:
                        step.record.attempt_over(chunk.spans)
                        finish, message = chunk.finish, chunk.message
        except EngineLost as error:
            self._watch.suspect()
            raise self._engine_lost(str(error)) from error
        except EngineRefused as error:
            raise FailedPrecondition("ENGINE_REFUSED", f"the engine refused the step: {error}") from error
        step.stops.cut()
        return self._outcome(step, finish, message)

    def _outcome(self, step: RunningStep, finish: str, message: str) -> Reason | None:
        if finish == "length":
            return Reason.LENGTH
        if finish == "stop" or step.stop_found:
            return Reason.STOP
        ended = over(step.record, step.limit)
        if ended is not None:
            return ended
        if step.stopped:
            step.raise_if_failed()
            return Reason.ABORTED
        if step.aborting:
            return None
        raise self._engine_lost(f"the engine aborted the step by itself: {message}")

    def _engine_lost(self, message: str) -> Unavailable:
        return Unavailable("ENGINE_LOST", message, retry_after_s=RETRY_LOST_ENGINE_S)
