"""Run steps: carry out what the queue (`engine_queue.preemptive_queue`) decides, and stream tokens
to the callers.

This module owns one task a step, in one TaskGroup. A step's task is the only one that changes its
record; others stop the step, or have the engine abort its attempt, and wait. Invariants: a token
that the engine sampled reaches the caller's events exactly once, also one sampled between an abort
and its acknowledgement; a slot is free again only after the engine has ended the attempt.
"""

import asyncio
import math
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog
from treadle_core.engine_queue.preemptive_queue import (
    Admit,
    Prefill,
    QueueFull,
    QueuePolicy,
    StepQueue,
)
from treadle_core.model import DecodeCurve
from treadle_runtime.bus import Bus
from treadle_runtime.errors import Internal, NotFound, ResourceExhausted, TreadleError, contain
from treadle_runtime.http.sglang import EngineClient, EngineLost, EngineRefused

from treadle_sidecar.convert import StepFacts
from treadle_sidecar.engine.watch import EngineWatch, engine_lost
from treadle_sidecar.step import (
    ABORTED,
    LENGTH,
    START_SENT_AFTER_S,
    STOP,
    Finished,
    Reason,
    RunningStep,
    Started,
    StepOrder,
)

log = structlog.get_logger()

# long enough for a few decode steps of a slow engine, short enough to follow a batch that shrinks
WINDOW_S = 5.0
BIN_S = 0.25
# An abort that overtakes its request on the way to the engine is ignored there; it is repeated
# until the stream ends.
REPEAT_ABORT_S = 0.25
RETRY_FULL_QUEUE_S = 1.0  # about the time of a short step
CONTEXT_LIMIT_TOKENS = 32 * 1024 * 1024  # 128 MiB of int32; a thousand trajectories of 32k tokens
BLOCK_TOKENS = 64  # of a context, that are compared at once
# of which it is known that the engine has read them: 8 M tokens, more than most engines hold
MOST_BLOCKS = 131_072


class LoadMeter:
    """Measures how many tokens a second the engine decoded in the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._bins: deque[tuple[float, int]] = deque()  # start, tokens

    def add(self, tokens: int, now: float) -> None:
        start, count = (
            self._bins.pop() if self._bins and now - self._bins[-1][0] < BIN_S else (now, 0)
        )
        self._bins.append((start, count + tokens))
        self._forget(now)

    def tokens_per_s(self, now: float) -> float:
        self._forget(now)
        return sum(count for _, count in self._bins) / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._bins and self._bins[0][0] < now - WINDOW_S:
            self._bins.popleft()


class Contexts:
    """Last context (prompt and output) that this sidecar saw of each trajectory, for another
    sidecar to fetch; and the blocks that the engine has read, of any trajectory's contexts.

    Beyond `limit_tokens` in all, and beyond MOST_BLOCKS, the least recently used are forgotten.
    """

    def __init__(self, limit_tokens: int = CONTEXT_LIMIT_TOKENS) -> None:
        self._limit_tokens = limit_tokens
        self._tokens = 0
        self._contexts: OrderedDict[str, tuple[array[int], float]] = OrderedDict()
        # of each block, a hash of all tokens up to its end
        self._read: OrderedDict[int, None] = OrderedDict()

    def remember(self, trajectory_id: str, context: "array[int]") -> None:
        """Replace the trajectory's context, which the engine has read."""
        self.note_read(hash_blocks(context))
        self.forget(trajectory_id)
        self._contexts[trajectory_id] = context, time.monotonic()
        self._tokens += len(context)
        while self._tokens > self._limit_tokens and len(self._contexts) > 1:
            _, (dropped, _) = self._contexts.popitem(last=False)
            self._tokens -= len(dropped)

    def get(self, trajectory_id: str) -> "array[int] | None":
        """Return the trajectory's context; None where it was never here, or was forgotten."""
        if trajectory_id not in self._contexts:
            return None
        self._contexts.move_to_end(trajectory_id)
        return self._contexts[trajectory_id][0]

    def note_read(self, blocks: Sequence[int]) -> None:
        """Note that the engine has read these blocks of a context (`hash_blocks`)."""
        for block in blocks:
            self._read[block] = None
            self._read.move_to_end(block)
        while len(self._read) > MOST_BLOCKS:
            self._read.popitem(last=False)

    def count_read(self, blocks: Sequence[int]) -> int:
        """Return how many blocks at the beginning of a context the engine has read, as far as is
        known here: it may have dropped their KV since."""
        return next((at for at in range(len(blocks), 0, -1) if blocks[at - 1] in self._read), 0)

    def forget_read(self) -> None:
        """Forget all blocks, since the engine has lost its KV or has other weights."""
        self._read.clear()

    def age_s(self, trajectory_id: str) -> float:
        """Return the seconds since the context, which must be here, was remembered."""
        return time.monotonic() - self._contexts[trajectory_id][1]

    def forget(self, trajectory_id: str) -> None:
        """Forget the trajectory's context, if it is here."""
        self._tokens -= len(self._contexts.pop(trajectory_id, ((), 0.0))[0])


def hash_blocks(context: "array[int]") -> list[int]:
    """Return a number for each whole block of BLOCK_TOKENS, of all tokens up to its end; the same
    tokens give the same number in this process."""
    blocks, known = [], 0
    for end in range(BLOCK_TOKENS, len(context) + 1, BLOCK_TOKENS):
        known = hash((known, context[end - BLOCK_TOKENS : end].tobytes()))
        blocks.append(known)
    return blocks


class StepRunner:
    """Runs all steps of one engine.

    policy.slots: steps that decode at once; 0: as many as the engine was started for. curve: of the
    engine, None while it is not known. wall: Unix seconds, of which steps tell when they were
    accepted. note: called with each step that has ended.

    Whoever uses the engine while it is idle holds `borrowed`, and gives it back when `wanted` is
    set.
    """

    def __init__(
        self,
        engine: EngineClient,
        watch: EngineWatch,
        bus: Bus,
        facts: StepFacts,
        contexts: Contexts,
        policy: QueuePolicy,
        curve: Callable[[], DecodeCurve | None],
        wall: Callable[[], float] = time.time,
        note: Callable[[Finished], None] = lambda _: None,
    ) -> None:
        self.queue = StepQueue(policy, self._prefill_of)
        self._slots = policy.slots
        self.meter = LoadMeter()
        self._engine, self._watch, self._contexts = engine, watch, contexts
        self._bus, self._facts = bus, facts
        self._curve, self._wall, self._note = curve, wall, note
        self._wake: asyncio.TimerHandle | None = None
        self._steps: dict[str, RunningStep] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._slot_freed = asyncio.Event()
        self.borrowed = asyncio.Lock()
        self.wanted = asyncio.Event()  # by a step or a pause, since the borrower cleared it

    @property
    def is_idle(self) -> bool:
        """Return whether no step is here and no pause keeps steps off the engine."""
        return not self._steps and not self.queue.paused

    async def run(self) -> None:
        """Hold the tasks of all steps, and end the waiting steps when the engine is lost."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                while True:
                    profile = await self._watch.until_healthy()
                    self._contexts.forget_read()
                    self.queue.policy = replace(
                        self.queue.policy, slots=self._slots or profile.slots
                    )
                    self.decide()
                    await self._watch.until_lost()
                    for step in [step for step in self._steps.values() if not step.admitted]:
                        step.stop(engine_lost(f"{self._watch.problem}; the step waited"))
            finally:
                self._tasks = None
                if self._wake is not None:
                    self._wake.cancel()

    def submit(self, order: StepOrder) -> RunningStep:
        """Put a step into the queue. Raises InvalidArgument, ResourceExhausted QUEUE_FULL,
        Unavailable ENGINE_LOST."""
        profile = self._watch.require_profile()
        if self._tasks is None:
            raise engine_lost("this sidecar is shutting down")
        step = RunningStep(order, profile, time.monotonic(), self._wall())
        step.record.wait(time.monotonic(), paused=self.queue.paused)
        step.blocks = hash_blocks(step.record.context)
        try:
            self.queue.add(
                order.ticket_id,
                order.priority,
                preemptible=order.preemptible,
                job=order.job,
                weight=order.job_weight,
            )
        except QueueFull as error:
            raise ResourceExhausted(
                "QUEUE_FULL", str(error), retry_after_s=RETRY_FULL_QUEUE_S, capacity=error.capacity
            ) from None
        self._steps[order.ticket_id] = step
        self.wanted.set()
        self._tasks.create_task(self._run_step(step), name=f"step-{order.ticket_id}")
        return step

    def abandon(self, step: RunningStep) -> None:
        """Stop a step that has no caller any more."""
        if step.order.ticket_id in self._steps:
            self._stop(step)

    async def abort(self, ticket_id: str) -> int:
        """End a step; return its output tokens once the engine has ended it. Raises NotFound."""
        step = self._steps.get(ticket_id)
        if step is None:
            raise NotFound(
                "STEP_NOT_FOUND", f"no step with ticket {ticket_id!r} is here", ticket_id=ticket_id
            )
        self._stop(step)
        await step.over.wait()
        return len(step.record.output)

    async def pause(self, *, abort: bool) -> tuple[int, int]:
        """Take every step off the engine; return (aborted, kept) steps once nothing runs there.

        abort: end the steps. Otherwise they wait in the queue, and their KV stays cached.
        """
        self._set_paused(True)
        self.wanted.set()
        async with self.borrowed:
            pass
        steps = list(self._steps.values())
        if abort:
            for step in steps:
                self._stop(step)
            for step in steps:
                await step.over.wait()
            return len(steps), 0
        self.decide()
        while self.queue.running:
            self._slot_freed.clear()
            await self._slot_freed.wait()
        return 0, len(self._steps)

    def hold(self) -> None:
        """Pause without waiting until nothing runs."""
        self._set_paused(True)
        self.wanted.set()
        self.decide()

    def resume(self) -> None:
        """Admit steps again."""
        self._set_paused(False)
        self.decide()

    def _set_paused(self, paused: bool) -> None:
        self.queue.paused = paused
        now = time.monotonic()
        for step in self._steps.values():
            step.record.wait(now, paused=paused)

    def decide(self) -> None:
        """Carry out what the queue decides; after the drain has begun, do nothing."""
        if self._tasks is None:
            return
        now = time.monotonic()
        for action in self.queue.decide(now):
            step = self._steps[action.step_id]
            if isinstance(action, Admit):
                step.admit()
            else:
                step.evicted_by = action.by
                self._abort_attempt(step)
        if self._wake is not None:
            self._wake.cancel()
        if self.queue.wake_s < math.inf:
            self._wake = asyncio.get_running_loop().call_later(self.queue.wake_s - now, self.decide)

    @property
    def oldest_wait_s(self) -> float:
        """Return the longest wait of the steps that wait now; 0 where none does."""
        now = time.monotonic()
        waiting = (
            step
            for ticket_id, step in self._steps.items()
            if ticket_id in self.queue and not step.admitted
        )
        return max((now - step.waiting_since for step in waiting), default=0.0)

    def _stop(self, step: RunningStep) -> None:
        step.stop(None)
        if step.admitted:
            self._abort_attempt(step)

    def _abort_attempt(self, step: RunningStep) -> None:
        if self._tasks is not None and not step.aborting:
            step.aborting = True
            self._tasks.create_task(self._repeat_abort(step), name=f"abort-{step.order.ticket_id}")

    async def _repeat_abort(self, step: RunningStep) -> None:
        while step.aborting:
            if step.rid:
                try:
                    await self._engine.abort(step.rid)
                except (EngineLost, EngineRefused) as error:
                    log.warning(
                        "abort did not reach the engine",
                        ticket_id=step.order.ticket_id,
                        error=str(error),
                    )
            await step.wait_for_end_of_attempt(REPEAT_ABORT_S)

    async def _run_step(self, step: RunningStep) -> None:
        ticket_id, trajectory_id = step.order.ticket_id, step.order.trajectory_id
        try:
            self.decide()
            if not step.admitted:
                await self._bus.publish(self._facts.queued(step.order))
            reason = step.reason_to_end() or await self._run_attempts(step)
            finished = step.record.finish(reason, time.monotonic())
            before = self._contexts.get(trajectory_id)
            self._contexts.remember(trajectory_id, step.record.context)
            self.queue.remove(ticket_id)
            step.emit(finished)
            self._note(finished)
            self.decide()
            with contain("the fact of a finished step", ticket_id=ticket_id):
                await self._bus.publish(
                    self._facts.finished(step.order, finished, step.record.output, before)
                )
        except TreadleError as error:
            self._contexts.remember(trajectory_id, step.record.context)
            step.emit(error)
        except Exception:
            log.exception("a step has failed unexpectedly", ticket_id=ticket_id)
            step.emit(Internal("INTERNAL", "the step failed; the sidecar's log has more"))
        finally:
            step.end_attempt()
            del self._steps[ticket_id]
            step.over.set()
            self._slot_freed.set()
            if ticket_id in self.queue:
                self.queue.remove(ticket_id)
                self.decide()

    async def _run_attempts(self, step: RunningStep) -> Reason:
        while await step.wait_for_slot():
            started = step.record.start_attempt(time.monotonic())
            assert self._tasks is not None, "it runs this step"
            step.emit(started)
            announcing = self._tasks.create_task(self._announce(step, started))
            try:
                reason = await self._run_attempt(step)
            finally:
                step.end_attempt()
                await announcing
            if reason is not None:
                return reason
            now = time.monotonic()
            preempted = step.record.preempt(step.evicted_by, now)
            step.record.wait(now, paused=self.queue.paused)
            step.blocks = hash_blocks(step.record.context)
            step.emit(preempted)
            self.queue.confirm_eviction(step.order.ticket_id)
            step.waiting_since = now
            self._slot_freed.set()
            await self._bus.publish(self._facts.preempted(step.order, preempted))
            self.decide()
        return ABORTED

    async def _announce(self, step: RunningStep, started: Started) -> None:
        await step.wait_for_end_of_attempt(START_SENT_AFTER_S)
        with contain("the fact of a started step", ticket_id=step.order.ticket_id):
            await self._bus.publish(self._facts.started(step.order, started))

    async def _run_attempt(self, step: RunningStep) -> Reason | None:
        """Run one attempt; return why the step ended, or None where it was preempted and needs
        another."""
        profile = self._watch.require_profile()
        finish, message, read = "", "", False
        if step.aborting:  # preempted or stopped before it got to the engine
            return self._reason(step, finish, message)
        request = step.attempt_request(profile.weight_version)
        step.rid = request.rid
        async with self._watch.calling("the step"):
            await step.learn_tail(self._engine)
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    now = time.monotonic()
                    self._watch.hear_weight_version(chunk.weight_version, now)
                    if chunk.token_ids and not step.stop_found:
                        step.emit(step.record.add_tokens(chunk, now))
                        self.meter.add(len(chunk.token_ids), now)
                        if step.stops.completes(chunk.text):
                            step.stop_found = True
                            self._abort_attempt(step)
                        if not read:
                            read = True
                            self._finish_prefill(step, now)
                        if self.queue.report_progress(
                            step.order.ticket_id, step.record.attempt_tokens
                        ):
                            self.decide()
                    if chunk.finish:
                        step.record.correct_spans(chunk.spans)
                        finish, message = chunk.finish, chunk.message
        step.stops.cut()
        return self._reason(step, finish, message)

    def _prefill_of(self, ticket_id: str) -> Prefill:
        """Return what a waiting step has to prefill, as far as is known here; without a curve its
        duration counts as 0."""
        curve, step = self._curve(), self._steps[ticket_id]
        read = self._contexts.count_read(step.blocks)
        first = step.blocks[read] if read < len(step.blocks) else None
        returns = step.order.turn > 0 and read > 0
        if curve is None or not curve.prefill_tokens_per_s:
            return Prefill(first=first, returns=returns)
        read_tokens = read * BLOCK_TOKENS
        new = len(step.record.context) - read_tokens
        prefill_s = new / curve.prefill_tokens_per_s + curve.prefill_pair_s * new * (
            read_tokens + 0.5 * new
        )
        return Prefill(prefill_s / (curve.base_s + curve.per_sequence_s), first, returns)

    def _finish_prefill(self, step: RunningStep, now: float) -> None:
        """Note the attempt's first token: the engine has read its context, and other steps may
        prefill now, or after a rest."""
        self._contexts.note_read(step.blocks)
        if self.queue.finish_prefill(step.order.ticket_id, now):
            self.decide()

    def _reason(self, step: RunningStep, finish: str, message: str) -> Reason | None:
        if finish == "length":
            return LENGTH
        if finish == "stop" or step.stop_found:
            return STOP
        reason = step.reason_to_end()
        if reason is not None:
            return reason
        if step.stopped:
            step.raise_error()
            return ABORTED
        if step.aborting:
            return None
        raise engine_lost(f"the engine aborted the step by itself: {message}")
