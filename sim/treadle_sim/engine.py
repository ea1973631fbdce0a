"""Simulated engine behind a sidecar's queue: continuous batching, slots, a KV limit and a radix
cache.

The queue is the sidecar's own (`treadle_core.engine_queue.preemptive_queue`), the batch is
`DecodeBatch`. A step that arrives or is to be aborted during a decode step waits for the end of
that decode step. Prefills run alone and before decodes, as SGLang schedules them (the chunks of one
prefill do not let decodes in between); a step that arrives during a prefill waits for the next one.
Equations and assumptions: docs/simulator.md.

The driver submits and reprioritizes steps, and learns of their ends through `StepListener`.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from treadle_core.engine_queue.preemptive_queue import Admit, Evict, Prefill, QueuePolicy, StepQueue

from treadle_sim.batch import DecodeBatch, EngineStep, SpeculativeBatch, StepListener
from treadle_sim.cluster import Timeline
from treadle_sim.engine_model import EngineModel
from treadle_sim.kv_cache import KvCache

UNBOUNDED = 1 << 40  # capacity of the queue: a rollout's client never gives up
NONE_FINISHED: Mapping[str, int] = MappingProxyType({})
MOST_PREFILL_TOKENS = (
    16_384  # in one prefill batch: SGLang's default; the step that crosses it is still taken
)


class SimEngine:
    """Engine that runs steps under the virtual clock. paced: the queue paces, shares and gathers
    the prefills of preemptible steps (ADR 0030). kv_tokens 0: no limit. spans: (start_s, end_s,
    batch), batch -1 for a prefill; None unless recorded. finished: the samples of each prompt that
    have ended anywhere, from which an engine that speculates has drafts."""

    def __init__(
        self,
        engine_id: str,
        model: EngineModel,
        timeline: Timeline,
        listener: StepListener,
        *,
        preempt: bool,
        paced: bool,
        record: bool = False,
        finished: Mapping[str, int] = NONE_FINISHED,
    ) -> None:
        self.engine_id = engine_id
        self.model = model
        self.cache = KvCache(model.kv_tokens, model.host_kv_tokens)
        self.busy_s = 0.0
        self.spans: list[tuple[float, float, int]] | None = [] if record else None
        self._timeline = timeline
        self._listener = listener
        self._queue = StepQueue(
            QueuePolicy(model.slots, UNBOUNDED, preempt), self._prefill_of if paced else None
        )
        self._decode_s = model.curve.decode_s(1.0)
        self._steps: dict[str, EngineStep] = {}
        self._pending: deque[EngineStep] = deque()  # admitted, not yet prefilled
        self._prefilling: list[EngineStep] = []
        speculation = model.speculation
        self._batch = (
            SpeculativeBatch(model, speculation, finished) if speculation else DecodeBatch(model)
        )
        self._fresh: dict[str, EngineStep] = {}  # in the batch, with too few tokens to be evicted
        self._evicting: list[EngineStep] = []  # in the batch until the decode step under way ends
        self._advanced_s = 0.0  # when the batch was last brought up to date
        self._epoch = 0  # calls on the timeline from an earlier one do nothing
        self._paused_until = 0.0
        self._prefill_began_s = 0.0
        self._wakes_s = 0.0  # when the queue decides next without a report

    def submit(
        self,
        step: EngineStep,
        priority: float,
        *,
        preemptible: bool = True,
        job: str = "",
        weight: float = 1.0,
    ) -> None:
        """Put a step into the queue."""
        self._advance()
        self._steps[step.step_id] = step
        step.paused = self._timeline.now < self._paused_until
        self._queue.add(step.step_id, priority, preemptible=preemptible, job=job, weight=weight)
        self._decide()

    def reprioritize(self, step_id: str, priority: float) -> None:
        """Change a step's priority; ignored for a step that is not here."""
        if self._queue.reprioritize(step_id, priority) and self._queue.waiting:
            self._advance()
            self._decide()

    def cancel(self, step_ids: Iterable[str]) -> list[EngineStep]:
        """Abort steps for good, at once; return those that had not ended, each with the tokens that
        it has sampled.

        A prefill goes on for the steps beside them, and ends where there are none. KV of aborted
        steps is not kept.
        """
        self._advance()
        cancelled = [self._steps.pop(step_id) for step_id in step_ids if step_id in self._steps]
        for step in cancelled:
            if step.step_id in self._batch.steps:
                self._stop(step, cached=False)
            elif step in self._prefilling:
                self._prefilling.remove(step)
                step.book("prefill", self._timeline.now)
                self.cache.stop(step, 0)
                if not self._prefilling:
                    self._book_busy(self._prefill_began_s, -1)
            else:
                step.book("queue", self._timeline.now)
                if step in self._pending:
                    self._pending.remove(step)
            self._queue.remove(step.step_id)
        if cancelled:
            self._decide()
        return cancelled

    def note_finished(self, prompt_id: str) -> None:
        """Note that a sample of the prompt has ended anywhere, and use it for drafts from the next
        decode step on."""
        if self._batch.is_changed_by(prompt_id):
            self._advance()
            self._batch.outdate()
            self._decide()

    def fail(self) -> list[EngineStep]:
        """Lose everything; return the steps that were here, each with the tokens that it had
        sampled."""
        self._advance()
        lost = list(self._steps.values())
        prefilling = {step.step_id for step in self._prefilling}
        for step in lost:
            what = "prefill" if step.step_id in prefilling else "queue"
            if step.step_id in self._batch.steps:
                what = "decode"
                self._batch.leave(step)
            step.book(what, self._timeline.now)
            self._queue.remove(step.step_id)
        self._book_prefill()
        for held in (self._steps, self._pending, self._prefilling, self._fresh, self._evicting):
            held.clear()
        self._paused_until = 0.0
        self._epoch += 1
        self.cache.clear()
        return lost

    def pause(self, seconds: float) -> None:
        """Stop for an update of the weights; all KV is void after it."""
        now = self._timeline.now
        self._advance()
        self._evict_all()
        for step in list(self._batch.steps.values()):
            self._stop(step, cached=False)
            # it is prefilled again, and cannot be evicted before
            self._queue.report_progress(step.step_id, 0)
            self._pending.append(step)
        self._book_prefill()
        for step in self._prefilling:
            step.book("prefill", now)
            self._pending.append(step)
        self._prefilling = []
        self._set_paused(True)
        self.cache.clear()
        self._paused_until = now + seconds
        self._epoch += 1
        self._timeline.at(self._paused_until, self._resume, self._epoch)

    def _resume(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._advanced_s = self._timeline.now
            self._set_paused(False)
            self._decide()

    def _set_paused(self, paused: bool) -> None:
        """Book the waiting time of all steps, and set whether an update makes them wait from now
        on."""
        for step in self._steps.values():
            step.book("queue", self._timeline.now)
            step.paused = paused

    def _decide(self) -> None:
        """Apply the queue's decisions, then continue."""
        self._report_progress()
        self._ask_queue()
        if not self._prefilling and self._batch.is_between_steps:
            self._evict_all()
        self._continue()

    def _ask_queue(self) -> None:
        now = self._timeline.now
        self._apply(self._queue.decide(now))
        wake_s = self._queue.wake_s
        if wake_s < math.inf and not now < self._wakes_s <= wake_s:
            self._wakes_s = wake_s
            self._timeline.at(wake_s, self._wake)

    def _wake(self) -> None:
        self._advance()
        self._decide()

    def _prefill_of(self, step_id: str) -> Prefill:
        step = self._steps[step_id]
        context = step.context_tokens + step.done
        _, cached = self.cache.find(step)
        computed_s = self.model.curve.prefill_computed_s(
            max(context - cached, 0), min(cached, context)
        )
        returns = cached >= step.prompt_tokens
        return Prefill(computed_s / self._decode_s, None if returns else step.prompt_id, returns)

    def _report_progress(self) -> None:
        """Report to the queue which steps have sampled enough to be evicted."""
        if not (self._fresh and self._queue.waiting and self._queue.policy.preempt):
            return
        fresh = {}
        for step_id, step in self._fresh.items():
            tokens = self._batch.tokens_since_admission(step)
            self._queue.report_progress(step_id, tokens)
            if tokens < self._queue.policy.min_run_tokens:
                fresh[step_id] = step
        self._fresh = fresh

    def _apply(self, actions: Iterable[Admit | Evict]) -> None:
        for action in actions:
            step = self._steps[action.step_id]
            if isinstance(action, Evict):
                step.evicted_by = action.by
                self._evicting.append(step)
            else:
                self._pending.append(step)

    def _evict_all(self) -> None:
        """Evict steps, and apply the queue's decisions after that. An abort keeps the KV in
        SGLang's radix tree, but for the last token, as long as nothing else needs the room."""
        while self._evicting:
            step = self._evicting.pop(0)
            if step.step_id not in self._batch.steps:
                continue  # it ended first
            self._stop(step, cached=True)
            step.preemptions += 1
            self._queue.confirm_eviction(step.step_id)
            self._listener.step_preempted(step)
            self._ask_queue()

    def _stop(self, step: EngineStep, *, cached: bool) -> None:
        self._batch.leave(step)  # which counts what it has sampled
        self._fresh.pop(step.step_id, None)
        self.cache.stop(step, step.context_tokens + step.done - 1 if cached else 0)
        step.book("decode", self._timeline.now)

    def _continue(self) -> None:
        """Start a prefill if one can start and none runs; otherwise decode until something is
        due."""
        now = self._timeline.now
        if self._prefilling or now < self._paused_until:
            return
        self._epoch += 1
        between = self._batch.is_between_steps
        if between and self._pending and self._start_prefill(now):
            return
        if self._batch:
            due = not between and (self._pending or self._evicting or self._batch.is_outdated)
            count = self._batch.step_end if due else self._next_count()
            self._timeline.at(
                now + self._batch.seconds_to(count), self._finish_decode, self._epoch, count
            )

    def _next_count(self) -> float:
        """Return the count of the batch at which a sequence ends, or can be evicted for a waiting
        step."""
        queue, count = self._queue, self._batch.next_end
        if self._fresh and queue.waiting and queue.policy.preempt:
            first = next(iter(self._fresh.values()))
            count = min(
                count, self._batch.count_of(first, first.done + queue.policy.min_run_tokens)
            )
        return count

    def _start_prefill(self, now: float) -> bool:
        curve, computed_s, batch_tokens, kv_tokens, loaded_tokens = self.model.curve, 0.0, 0, 0, 0
        while self._pending and batch_tokens < MOST_PREFILL_TOKENS:
            step = self._pending[0]
            if not self.cache.fits(step):
                break  # no step overtakes the first one
            self._pending.popleft()
            context = step.context_tokens + step.done
            cached, loaded = self._take_cached(step, context)
            loaded_tokens += loaded
            new_tokens = context - cached
            step.prefilled_tokens += new_tokens
            batch_tokens += new_tokens
            computed_s += curve.prefill_computed_s(new_tokens, cached)
            kv_tokens += context
            step.book("queue", now)
            self._prefilling.append(step)
            self._listener.prefill_started(step)
        if not self._prefilling:
            return False
        self._prefill_began_s = now
        # A layer of KV comes from the host while the layer before it computes.
        load_s = (
            loaded_tokens
            * self.model.kv_bytes_per_token
            / (self.model.host_bytes_per_s * self.model.gpus)
        )
        seconds = max(curve.prefill_batch_s(computed_s, len(self._prefilling), kv_tokens), load_s)
        self._timeline.at(now + seconds, self._finish_prefill, self._epoch)
        return True

    def _take_cached(self, step: EngineStep, context: int) -> tuple[int, int]:
        """Return how many tokens of the context are cached, and how many of them only the host has:
        whole pages, and never the last token."""
        cached, loaded = self.cache.start(step)
        cached = min(cached, context - 1)
        return cached - cached % self.model.page_tokens, min(loaded, cached)

    def _finish_prefill(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        now = self._timeline.now
        self._advanced_s = now
        self._book_prefill()
        steps, self._prefilling = self._prefilling, []
        for step in steps:
            step.book("prefill", now)
            self._queue.finish_prefill(step.step_id, now)
            self.cache.finish_prefill(step)
            self._batch.join(step)
            self._fresh[step.step_id] = step
        self._finish_ended()
        self._decide()

    def _finish_decode(self, epoch: int, count: float) -> None:
        if epoch != self._epoch:
            return
        self._book_busy(self._advanced_s, len(self._batch))
        self._advanced_s = self._timeline.now
        self._batch.advance_to(count)
        self._finish_ended()
        self._decide()

    def _finish_ended(self) -> None:
        while (step := self._batch.pop_ended()) is not None:
            self._fresh.pop(step.step_id, None)
            del self._steps[step.step_id]
            self._queue.remove(step.step_id)
            step.book("decode", self._timeline.now)
            # the last token was sampled and never read
            self.cache.stop(step, step.reserved_tokens - 1)
            self._listener.step_finished(step)

    def _advance(self) -> None:
        """Bring the batch up to now."""
        now = self._timeline.now
        began_s, self._advanced_s = self._advanced_s, now
        if now > began_s and self._batch and not self._prefilling and now >= self._paused_until:
            self._book_busy(began_s, len(self._batch))
            self._batch.advance(now - began_s)
            self._finish_ended()

    def _book_prefill(self) -> None:
        """Book the running prefill, if any, which has ended or was interrupted."""
        if self._prefilling:
            self._book_busy(self._prefill_began_s, -1)

    def _book_busy(self, began_s: float, batch: int) -> None:
        """Book the engine's work until now: a prefill where `batch` is -1."""
        now = self._timeline.now
        self.busy_s += now - began_s
        if self.spans is None or now <= began_s:
            return
        if self.spans and self.spans[-1][1:] == (began_s, batch) and batch > 0:
            began_s = self.spans.pop()[0]
        self.spans.append((began_s, now, batch))
