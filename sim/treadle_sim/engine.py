"""One simulated engine behind a sidecar's queue: continuous batching, prefill first, slots and KV limits, radix cache.

The queue is the sidecar's own (`treadle_core.step_queue`). Between events the batch is constant, so the time at which
the next sequence ends is a closed form: x tokens of a batch of n that reads K tokens of KV take x * step(n) +
k * (K x + n x^2 / 2) seconds. Prefills run alone and before decodes, as SGLang schedules them (chunks of one prefill do
not let decodes in between); what arrives during one waits for the next. Equations and assumptions: docs/simulator.md.
Owner: the driver submits, reprioritizes and cancels; it hears of steps through `StepListener`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from treadle_core.step_queue import Evict, QueuePolicy, StepQueue

from treadle_sim.engine_model import EngineModel
from treadle_sim.engine_step import EngineStep, StepListener
from treadle_sim.events import Timeline
from treadle_sim.prefix_cache import PrefixCache

UNBOUNDED = 1 << 40  # capacity of the waiting line: a rollout's client never gives up
MOST_PREFILL_TOKENS = 16_384  # in one prefill batch: SGLang's default; the step that crosses it is still taken
TOKEN_ROUNDING = 1e-6  # tokens; a sequence this near its end has ended


class SimEngine:
    """See the module. kv_tokens 0 in the model: unbounded."""

    def __init__(
        self,
        engine_id: str,
        model: EngineModel,
        timeline: Timeline,
        listener: StepListener,
        *,
        preempt: bool,
    ) -> None:
        self.engine_id = engine_id
        self.model = model
        self.cache = PrefixCache()
        self.busy_s = 0.0
        self.spans: list[tuple[float, float, int]] | None = None
        self._timeline = timeline
        self._listener = listener
        self._queue = StepQueue(QueuePolicy(model.slots, UNBOUNDED, preempt))
        self._step_s = [0.0, *(model.curve.decode_s(n) for n in range(1, model.slots + 1))]
        self._steps: dict[str, EngineStep] = {}
        self._pending: deque[EngineStep] = deque()  # admitted, not yet prefilled
        self._prefilling: list[EngineStep] = []
        self._decoding: dict[str, EngineStep] = {}
        self._fresh: dict[str, EngineStep] = {}  # of these, those that have sampled too few tokens to be evicted
        self._ends: list[tuple[float, int, EngineStep]] = []
        self._counter = 0.0  # tokens that each decoding sequence has sampled since the engine began
        self._counted_s = 0.0  # when the counter was last brought up to date
        self._kv = 0.0  # KV tokens of decoding sequences
        self._held = 0  # KV tokens promised to admitted steps: their contexts and what they will sample
        self._epoch = 0
        self._pushed = 0
        self._paused_until = 0.0
        self._prefill_began_s = 0.0

    # What the driver calls.

    def submit(self, step: EngineStep, priority: float) -> None:
        """A ticket arrived."""
        self._advance()
        self._steps[step.step_id] = step
        self._queue.add(step.step_id, priority)
        self._decide()

    def receive(self, index: int, tokens: int) -> None:
        """A trajectory's KV has come from another engine; what was left longest ago goes where there is no room."""
        self.cache.put(index, tokens)
        if self.model.kv_tokens:
            self.cache.shrink(self._held + self.cache.tokens - self.model.kv_tokens)

    def reprioritize(self, step_id: str, priority: float) -> None:
        """A new prediction; ignored for a step that is not here."""
        if step_id in self._steps and self._queue.reprioritize(step_id, priority):
            self._advance()
            self._decide()

    def fail(self) -> list[EngineStep]:
        """The engine dies; returns the steps that it loses, each with the tokens that it had sampled."""
        self._advance()
        lost = list(self._steps.values())
        for step in self._decoding.values():
            step.done = step.gen_tokens - (step.end_at - self._counter)
        prefilling = {step.step_id for step in self._prefilling}
        for step in lost:
            what = "decode" if step.step_id in self._decoding else "prefill" if step.step_id in prefilling else "queue"
            step.passed(what, self._timeline.now)
            self._queue.remove(step.step_id)
        self._computed_prefill()
        self._steps.clear()
        self._pending.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._fresh.clear()
        self._ends.clear()
        self._kv, self._held = 0.0, 0
        self._paused_until = 0.0
        self._epoch += 1
        self.cache.clear()
        return lost

    def pause(self, seconds: float) -> None:
        """Stands still, as for an update of the weights: the KV of all contexts is void after it."""
        now = self._timeline.now
        self._advance()
        for step in list(self._decoding.values()):
            self._stop(step, keep=False)
            self._queue.progress(step.step_id, 0)  # it is to be prefilled: nothing of it can be evicted now
            self._pending.append(step)
        self._computed_prefill()
        for step in self._prefilling:
            self._held -= step.context_tokens + step.gen_tokens
            step.passed("prefill", now)
            self._pending.append(step)
        self._prefilling = []
        self.cache.clear()
        self._paused_until = now + seconds
        self._epoch += 1
        self._timeline.at(self._paused_until, self._resume, self._epoch)

    @property
    def waiting(self) -> int:
        """Steps without a slot."""
        return self._queue.waiting

    # What happens by itself.

    def _resume(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._counted_s = self._timeline.now
            self._go_on()

    def _decide(self) -> None:
        """Carries out what the queue wants, then goes on."""
        queue = self._queue
        if queue.waiting and queue.policy.preempt and self._fresh:
            # Only whether a step has sampled enough to be evicted matters: what has is not looked at again.
            enough, fresh = queue.policy.min_run_tokens, {}
            for step_id, step in self._fresh.items():
                tokens = int(step.gen_tokens - (step.end_at - self._counter) - step.done)
                queue.progress(step_id, tokens)
                if tokens < enough:
                    fresh[step_id] = step
            self._fresh = fresh
        actions = queue.decide()
        while actions:
            for action in actions:
                step = self._steps[action.step_id]
                if isinstance(action, Evict):
                    self._evict(step)
                else:
                    self._pending.append(step)
            actions = queue.decide()
        self._go_on()

    def _evict(self, step: EngineStep) -> None:
        """An abort keeps the KV in the radix tree (reference: SGLang), as long as nobody needs the room."""
        self._stop(step, keep=True)  # it decodes: the queue lets each admission sample a few tokens
        step.preemptions += 1
        self._queue.evicted(step.step_id)
        self._listener.step_preempted(step)

    def _stop(self, step: EngineStep, *, keep: bool) -> None:
        del self._decoding[step.step_id]
        self._fresh.pop(step.step_id, None)
        step.done = step.gen_tokens - (step.end_at - self._counter)
        self._kv -= step.context_tokens + step.done
        self._held -= step.context_tokens + step.gen_tokens
        self._ends = [entry for entry in self._ends if entry[2] is not step]
        heapq.heapify(self._ends)
        step.passed("decode", self._timeline.now)
        if keep:
            self.cache.put(step.index, step.context_tokens + int(step.done))

    def _go_on(self) -> None:
        """Starts a prefill where one can start and none runs, else lets the batch decode to its next end."""
        now = self._timeline.now
        if self._prefilling or now < self._paused_until:
            return
        self._epoch += 1
        if self._pending and self._start_prefill(now):
            return
        if self._decoding:
            left = self._ends[0][0] - self._counter
            self._timeline.at(now + self._decode_s(left), self._decoded, self._epoch)

    def _start_prefill(self, now: float) -> bool:
        seconds = 0.0
        batch_tokens = 0
        capacity = self.model.kv_tokens
        while self._pending and batch_tokens < MOST_PREFILL_TOKENS:
            step = self._pending[0]
            need = step.context_tokens + step.gen_tokens
            if capacity and self._held + need > capacity and self._held:
                break  # first come, first served: nobody overtakes the head of the line
            self._pending.popleft()
            context = step.context_tokens + int(step.done)
            cached = min(max(self.cache.take(step.index), self.cache.prompt(step.prompt_id)), context)
            self._held += need
            if capacity and self._held + self.cache.tokens > capacity:
                self.cache.shrink(self._held + self.cache.tokens - capacity)
            new_tokens = max(context - cached, 1)  # the last token is always computed
            step.prefilled_tokens += new_tokens
            batch_tokens += new_tokens
            seconds += self.model.curve.prefill_s(new_tokens, cached) - (
                self.model.curve.prefill_fixed_s if self._prefilling else 0.0
            )
            step.passed("queue", now)
            self._prefilling.append(step)
            if not step.started:
                step.started = True
                self._listener.step_started(step)
        if not self._prefilling:
            return False
        self._prefill_began_s = now
        self._timeline.at(now + seconds, self._prefilled, self._epoch)
        return True

    def _computed_prefill(self) -> None:
        """Books the prefill that runs, if any: it is over, or cut short."""
        now = self._timeline.now
        if self._prefilling:
            self.busy_s += now - self._prefill_began_s
            if self.spans is not None:
                self.spans.append((self._prefill_began_s, now, -1))

    def _prefilled(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        now = self._timeline.now
        self._counted_s = now
        self._computed_prefill()
        steps, self._prefilling = self._prefilling, []
        for step in steps:
            step.passed("prefill", now)
            context = step.context_tokens + step.done
            self.cache.saw_prompt(step.prompt_id, step.prompt_tokens)
            self._decoding[step.step_id] = self._fresh[step.step_id] = step
            step.end_at = self._counter + step.gen_tokens - step.done
            self._kv += context
            self._pushed += 1
            heapq.heappush(self._ends, (step.end_at, self._pushed, step))
        self._finish_ended()
        self._decide()

    def _decoded(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._advance()
        if self._ends:  # exactly, whatever the rounding of the quadratic
            self._counter = max(self._counter, self._ends[0][0])
        self._finish_ended()
        self._decide()

    def _finish_ended(self) -> None:
        now = self._timeline.now
        while self._ends and self._ends[0][0] <= self._counter + TOKEN_ROUNDING:
            step = heapq.heappop(self._ends)[2]
            del self._decoding[step.step_id]
            self._fresh.pop(step.step_id, None)
            del self._steps[step.step_id]
            self._queue.remove(step.step_id)
            total = step.context_tokens + step.gen_tokens
            self._kv = self._kv - total if self._decoding else 0.0
            self._held -= total
            step.done = float(step.gen_tokens)
            step.passed("decode", now)
            self.cache.put(step.index, total)
            self._listener.step_finished(step)

    # Decoding as a fluid: tokens and seconds of a constant batch.

    def _decode_s(self, tokens: float) -> float:
        n = len(self._decoding)
        k = self.model.curve.per_kv_token_s
        return tokens * self._step_s[n] + k * (self._kv * tokens + 0.5 * n * tokens * tokens)

    def _advance(self) -> None:
        """Brings the token counter up to now."""
        now = self._timeline.now
        elapsed_s = now - self._counted_s
        self._counted_s = now
        n = len(self._decoding)
        if elapsed_s <= 0.0 or not n or self._prefilling or now < self._paused_until:
            return
        k = self.model.curve.per_kv_token_s
        linear = self._step_s[n] + k * self._kv
        if k > 0.0:
            quadratic = 0.5 * k * n
            tokens = 2.0 * elapsed_s / (linear + math.sqrt(linear * linear + 4.0 * quadratic * elapsed_s))
        else:
            tokens = elapsed_s / linear
        self._counter += tokens
        self._kv += n * tokens
        self.busy_s += elapsed_s
        if self.spans is not None:
            self.spans.append((now - elapsed_s, now, n))
