"""One simulated engine behind a sidecar's queue: continuous batching, prefill first, slots and KV limits, radix cache.

The queue is the sidecar's own (`treadle_core.steps.queue`), the batch a fluid between events (decode_batch.py). What
comes or is to be aborted while a decode step is under way waits for the end of that step. Prefills run alone and before
decodes, as SGLang schedules them (chunks of one prefill do not let decodes in between); what arrives during one waits
for the next. Equations and assumptions: docs/simulator.md. Owner: the driver submits, reprioritizes and cancels; it
hears of steps through `StepListener`.

What an engine keeps of contexts that do not run: a radix cache by trajectory, least recently used out first.

Invariant: `tokens` is the sum over the entries. The prompt that samples share is counted with each of them, which
overstates the memory; once seen it is found until the cache is cleared, which overstates the hits by a prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from treadle_core.steps.queue import Admit, Evict, QueuePolicy, StepQueue

from treadle_sim.batch import DecodeBatch, EngineStep, StepListener
from treadle_sim.engine_model import EngineModel
from treadle_sim.timeline import Timeline


class PrefixCache:
    """Tokens of KV by trajectory; the caller owns the capacity."""

    def __init__(self) -> None:
        self.tokens = 0
        self._entries: dict[int, int] = {}  # by last use, oldest first
        self._prompts: dict[str, int] = {}

    def put(self, index: int, tokens: int) -> None:
        """Keeps a context that has just stopped running, or has just arrived from elsewhere."""
        self.tokens += tokens - self._entries.pop(index, 0)
        self._entries[index] = tokens

    def take(self, index: int) -> int:
        """Removes and returns what is kept of a trajectory; 0 for nothing."""
        kept = self._entries.pop(index, 0)
        self.tokens -= kept
        return kept

    def peek(self, index: int) -> int:
        """What is kept of a trajectory."""
        return self._entries.get(index, 0)

    def shrink(self, tokens: int) -> int:
        """Forgets the oldest until at least `tokens` are free or nothing is left; returns how many were freed."""
        freed = 0
        while freed < tokens and self._entries:
            index = next(iter(self._entries))
            freed += self.take(index)
        return freed

    def saw_prompt(self, prompt_id: str, tokens: int) -> None:
        """A prompt has been prefilled here: its samples find it."""
        self._prompts[prompt_id] = tokens

    def prompt(self, prompt_id: str) -> int:
        """Tokens of a prompt that a sibling has prefilled here; 0 where none has."""
        return self._prompts.get(prompt_id, 0)

    def clear(self) -> None:
        """Forgets all, as an update of the weights does."""
        self.tokens = 0
        self._entries.clear()
        self._prompts.clear()


UNBOUNDED = 1 << 40  # capacity of the waiting line: a rollout's client never gives up
MOST_PREFILL_TOKENS = 16_384  # in one prefill batch: SGLang's default; the step that crosses it is still taken


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
        self._steps: dict[str, EngineStep] = {}
        self._pending: deque[EngineStep] = deque()  # admitted, not yet prefilled
        self._prefilling: list[EngineStep] = []
        self._batch = DecodeBatch(model)
        self._fresh: dict[str, EngineStep] = {}  # of the batch, those that have sampled too few tokens to be evicted
        self._evicting: list[EngineStep] = []  # of the batch, those that leave it when its step under way ends
        self._advanced_s = 0.0  # when the batch was last brought up to date
        self._held = 0  # KV tokens promised to admitted steps: their contexts and what they will sample
        self._epoch = 0
        self._paused_until = 0.0
        self._prefill_began_s = 0.0

    # What the driver calls.

    def submit(self, step: EngineStep, priority: float, *, preemptible: bool = True) -> None:
        """A ticket arrived."""
        self._advance()
        self._steps[step.step_id] = step
        self._queue.add(step.step_id, priority, preemptible=preemptible)
        self._decide()

    def receive(self, index: int, tokens: int) -> None:
        """A trajectory's KV has come from another engine; what was left longest ago goes where there is no room."""
        self.cache.put(index, tokens)
        if self.model.kv_tokens:
            self.cache.shrink(self._held + self.cache.tokens - self.model.kv_tokens)

    def reprioritize(self, step_id: str, priority: float) -> None:
        """A new prediction; ignored for a step that is not here."""
        if self._queue.reprioritize(step_id, priority) and self._queue.waiting:
            self._advance()
            self._decide()

    def fail(self) -> list[EngineStep]:
        """The engine dies; returns the steps that it loses, each with the tokens that it had sampled."""
        self._advance()
        lost = list(self._steps.values())
        prefilling = {step.step_id for step in self._prefilling}
        for step in lost:
            what = "prefill" if step.step_id in prefilling else "queue"
            if step.step_id in self._batch.steps:
                what = "decode"
                self._batch.leave(step)
            step.passed(what, self._timeline.now)
            self._queue.remove(step.step_id)
        self._computed_prefill()
        self._steps.clear()
        self._pending.clear()
        self._prefilling.clear()
        self._fresh.clear()
        self._evicting.clear()
        self._held = 0
        self._paused_until = 0.0
        self._epoch += 1
        self.cache.clear()
        return lost

    def pause(self, seconds: float) -> None:
        """Stands still, as for an update of the weights: the KV of all contexts is void after it."""
        now = self._timeline.now
        self._advance()
        self._evict_all()
        for step in list(self._batch.steps.values()):
            self._stop(step)
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
            self._advanced_s = self._timeline.now
            self._decide()

    def _decide(self) -> None:
        """Carries out what the queue wants, then goes on."""
        self._count_fresh()
        self._carry_out(self._queue.decide())
        if not self._prefilling and self._batch.between_steps:
            self._evict_all()
        self._go_on()

    def _count_fresh(self) -> None:
        """Tells the queue which steps may be evicted by now: what has sampled enough is not looked at again."""
        if not (self._fresh and self._queue.waiting and self._queue.policy.preempt):
            return
        fresh = {}
        for step_id, step in self._fresh.items():
            tokens = self._batch.sampled(step)
            self._queue.progress(step_id, tokens)
            if tokens < self._queue.policy.min_run_tokens:
                fresh[step_id] = step
        self._fresh = fresh

    def _carry_out(self, actions: Iterable[Admit | Evict]) -> None:
        for action in actions:
            step = self._steps[action.step_id]
            (self._evicting if isinstance(action, Evict) else self._pending).append(step)

    def _evict_all(self) -> None:
        """Carries out the evictions, and what the queue wants then. An abort keeps the KV in the radix tree (reference:
        SGLang), but for the last token, as long as nobody needs the room."""
        while self._evicting:
            step = self._evicting.pop(0)
            if step.step_id not in self._batch.steps:
                continue  # it ended first
            self._stop(step)
            self.cache.put(step.index, step.context_tokens + step.done - 1)
            step.preemptions += 1
            self._queue.evicted(step.step_id)
            self._listener.step_preempted(step)
            self._carry_out(self._queue.decide())

    def _stop(self, step: EngineStep) -> None:
        self._batch.leave(step)
        self._fresh.pop(step.step_id, None)
        self._held -= step.context_tokens + step.gen_tokens
        step.passed("decode", self._timeline.now)

    def _go_on(self) -> None:
        """Starts a prefill where one can start and none runs, else lets the batch decode until something is due."""
        now = self._timeline.now
        if self._prefilling or now < self._paused_until:
            return
        self._epoch += 1
        between = self._batch.between_steps
        if between and self._pending and self._start_prefill(now):
            return
        if self._batch:
            due = not between and (self._pending or self._evicting)
            count = self._batch.step_end if due else self._next_count()
            self._timeline.at(now + self._batch.seconds_to(count), self._decoded, self._epoch, count)

    def _next_count(self) -> float:
        """The count of the batch at which a sequence ends, or may be evicted for one that waits."""
        queue, count = self._queue, self._batch.next_end
        if self._fresh and queue.waiting and queue.policy.preempt:
            first = next(iter(self._fresh.values()))
            count = min(count, first.end_at - first.gen_tokens + first.done + queue.policy.min_run_tokens)
        return count

    def _start_prefill(self, now: float) -> bool:
        curve, computed_s, batch_tokens, kv_tokens = self.model.curve, 0.0, 0, 0
        capacity = self.model.kv_tokens
        while self._pending and batch_tokens < MOST_PREFILL_TOKENS:
            step = self._pending[0]
            need = step.context_tokens + step.gen_tokens
            if capacity and self._held + need > capacity and self._held:
                break  # first come, first served: nobody overtakes the head of the line
            self._pending.popleft()
            context = step.context_tokens + step.done
            cached = self._hit(step, context)
            self._held += need
            if capacity and self._held + self.cache.tokens > capacity:
                self.cache.shrink(self._held + self.cache.tokens - capacity)
            new_tokens = context - cached
            step.prefilled_tokens += new_tokens
            batch_tokens += new_tokens
            computed_s += curve.prefill_computed_s(new_tokens, cached)
            kv_tokens += context
            step.passed("queue", now)
            self._prefilling.append(step)
        if not self._prefilling:
            return False
        self._prefill_began_s = now
        seconds = curve.prefill_batch_s(computed_s, len(self._prefilling), kv_tokens)
        self._timeline.at(now + seconds, self._prefilled, self._epoch)
        return True

    def _hit(self, step: EngineStep, context: int) -> int:
        """Tokens of the context that are cached: whole pages, and never the last token."""
        kept = max(self.cache.take(step.index), self.cache.prompt(step.prompt_id))
        kept = min(kept, context - 1)
        return kept - kept % self.model.page_tokens

    def _computed_prefill(self) -> None:
        """Books the prefill that runs, if any: it is over, or cut short."""
        if self._prefilling:
            self._busy(self._prefill_began_s, -1)

    def _prefilled(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        now = self._timeline.now
        self._advanced_s = now
        self._computed_prefill()
        steps, self._prefilling = self._prefilling, []
        for step in steps:
            step.passed("prefill", now)
            self.cache.saw_prompt(step.prompt_id, step.prompt_tokens)
            self._batch.join(step)
            self._fresh[step.step_id] = step
        self._finish_ended()
        self._decide()

    def _decoded(self, epoch: int, count: float) -> None:
        if epoch != self._epoch:
            return
        self._busy(self._advanced_s, len(self._batch))
        self._advanced_s = self._timeline.now
        self._batch.reach(count)
        self._finish_ended()
        self._decide()

    def _finish_ended(self) -> None:
        while (step := self._batch.take_ended()) is not None:
            self._fresh.pop(step.step_id, None)
            del self._steps[step.step_id]
            self._queue.remove(step.step_id)
            total = step.context_tokens + step.gen_tokens
            self._held -= total
            step.passed("decode", self._timeline.now)
            self.cache.put(step.index, total - 1)  # the last token was sampled and never read
            self._listener.step_finished(step)

    def _advance(self) -> None:
        """Brings the batch up to now."""
        now = self._timeline.now
        began_s, self._advanced_s = self._advanced_s, now
        if now > began_s and self._batch and not self._prefilling and now >= self._paused_until:
            self._busy(began_s, len(self._batch))
            self._batch.advance(now - began_s)
            self._finish_ended()

    def _busy(self, began_s: float, batch: int) -> None:
        """Books what the engine did until now: a prefill where `batch` is -1."""
        now = self._timeline.now
        self.busy_s += now - began_s
        if self.spans is None or now <= began_s:
            return
        if self.spans and self.spans[-1][1:] == (began_s, batch) and batch > 0:
            began_s = self.spans.pop()[0]
        self.spans.append((began_s, now, batch))
