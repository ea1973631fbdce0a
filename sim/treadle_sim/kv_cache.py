"""KV of one simulated engine: running steps, contexts that wait for their next step, and copies in
the host's memory.

A prompt counts once for all samples that share it, as in SGLang's radix tree, and goes with the
last of them. Contexts that do not run leave the engine's memory in the order of their last use. The
host keeps copies of the contexts that were used last, whether the engine still has them or not, as
SGLang's HiCache does when it writes through.
"""

from dataclasses import dataclass

from treadle_sim.batch import EngineStep


@dataclass(slots=True)
class _Prompt:
    """Shared prompt. users: contexts of the tier that begin with it. holds: running steps that use
    it. ready: whether it was prefilled."""

    tokens: int
    users: int = 0
    holds: int = 0
    ready: bool = False


class Tier:
    """Contexts in one memory by trajectory, last use last. tokens: of all, each prompt once.
    held_tokens: of prompts in use."""

    def __init__(self) -> None:
        self.tokens = 0
        self.held_tokens = 0
        self._own: dict[int, tuple[str, int]] = {}  # prompt, and tokens beyond it
        self._prompts: dict[str, _Prompt] = {}

    def __contains__(self, prompt_id: str) -> bool:
        prompt = self._prompts.get(prompt_id)
        return prompt is not None and prompt.ready

    def put(self, index: int, prompt_id: str, prompt_tokens: int, own_tokens: int) -> None:
        """Keep a context, as the one used last."""
        # before its former entry goes, and the prompt with it
        prompt = self._find(prompt_id, prompt_tokens)
        prompt.users += 1
        prompt.ready = True
        self.take(index)
        self._own[index] = (prompt_id, own_tokens)
        self.tokens += own_tokens

    def take(self, index: int) -> None:
        """Remove a context, if it is here."""
        entry = self._own.pop(index, None)
        if entry is not None:
            prompt_id, own_tokens = entry
            self.tokens -= own_tokens
            self._prompts[prompt_id].users -= 1
            self._clear(prompt_id)

    def take_oldest(self) -> bool:
        """Remove the context that was used least recently. Returns False where there is none."""
        if not self._own:
            return False
        self.take(next(iter(self._own)))
        return True

    def context_tokens(self, index: int) -> int:
        """Return the tokens of a context, its prompt included; 0 where it is not here."""
        entry = self._own.get(index)
        return 0 if entry is None else self._prompts[entry[0]].tokens + entry[1]

    def is_held(self, prompt_id: str) -> bool:
        prompt = self._prompts.get(prompt_id)
        return prompt is not None and prompt.holds > 0

    def hold(self, prompt_id: str, prompt_tokens: int) -> None:
        """Note that a running step uses the prompt."""
        prompt = self._find(prompt_id, prompt_tokens)
        self.held_tokens += prompt.tokens if not prompt.holds else 0
        prompt.holds += 1

    def release(self, prompt_id: str, *, ready: bool) -> None:
        """Note that a step of the prompt does not run any more. ready: it has prefilled the
        prompt."""
        prompt = self._prompts[prompt_id]
        prompt.holds -= 1
        prompt.ready = prompt.ready or ready
        self.held_tokens -= prompt.tokens if not prompt.holds else 0
        self._clear(prompt_id)

    def mark_ready(self, prompt_id: str) -> None:
        self._prompts[prompt_id].ready = True

    def _find(self, prompt_id: str, prompt_tokens: int) -> _Prompt:
        prompt = self._prompts.get(prompt_id)
        if prompt is None:
            prompt = self._prompts[prompt_id] = _Prompt(prompt_tokens)
            self.tokens += prompt_tokens
        return prompt

    def _clear(self, prompt_id: str) -> None:
        prompt = self._prompts[prompt_id]
        if not prompt.users and not prompt.holds:
            self.tokens -= prompt.tokens
            del self._prompts[prompt_id]


class KvCache:
    """KV of one engine and of its host. capacity: KV tokens of the engine, 0 without a limit.
    host_tokens: of the copies."""

    def __init__(self, capacity: int, host_tokens: int) -> None:
        self._capacity = capacity
        self._host_capacity = host_tokens
        self.clear()

    def clear(self) -> None:
        """Forget everything, the KV of running steps too."""
        self._gpu, self._host = Tier(), Tier()
        self._running = (
            0  # tokens of running steps beyond their prompts, with what they will sample
        )

    def fits(self, step: EngineStep) -> bool:
        """Return whether the step can run beside those that run; the first one always can."""
        running = self._running + self._gpu.held_tokens
        needed = step.own_tokens + (0 if self._gpu.is_held(step.prompt_id) else step.prompt_tokens)
        return not self._capacity or not running or running + needed <= self._capacity

    def start(self, step: EngineStep) -> tuple[int, int]:
        """Let a step run. Returns how many tokens of its context are cached, and how many of them
        come from the host."""
        here, cached = self.find(step)
        self._gpu.hold(step.prompt_id, step.prompt_tokens)
        self._gpu.take(step.index)
        self._running += step.own_tokens
        self._make_room()
        return cached, cached - here

    def find(self, step: EngineStep) -> tuple[int, int]:
        """Return how many tokens of a step's context are cached in the engine's memory, and in
        either memory."""
        prompt_tokens = step.prompt_tokens
        here = self._gpu.context_tokens(step.index) or (
            prompt_tokens if step.prompt_id in self._gpu else 0
        )
        there = max(
            self._host.context_tokens(step.index),
            prompt_tokens if step.prompt_id in self._host else 0,
        )
        return here, max(here, there)

    def finish_prefill(self, step: EngineStep) -> None:
        """Mark the prompt of the step as prefilled, so that its samples find it from now on."""
        self._gpu.mark_ready(step.prompt_id)

    def stop(self, step: EngineStep, tokens: int) -> None:
        """End a step that runs; `tokens` of its context stay cached, 0 for none."""
        self._running -= step.own_tokens
        if tokens:
            self.put(step.index, step.prompt_id, step.prompt_tokens, tokens)
        self._gpu.release(step.prompt_id, ready=tokens > 0)

    def put(self, index: int, prompt_id: str, prompt_tokens: int, tokens: int) -> None:
        """Keep a context that does not run; the ones used least recently make room."""
        prompt_tokens = min(prompt_tokens, tokens)
        for tier in (self._gpu, self._host):
            tier.put(index, prompt_id, prompt_tokens, tokens - prompt_tokens)
        self._make_room()

    def peek(self, index: int) -> int:
        """Return the tokens of a context that does not run, wherever it is; 0 for none."""
        return self._gpu.context_tokens(index) or self._host.context_tokens(index)

    def drop(self, index: int) -> None:
        """Forget a context, its copy included."""
        self._gpu.take(index)
        self._host.take(index)

    def _make_room(self) -> None:
        while (
            self._capacity
            and self._running + self._gpu.tokens > self._capacity
            and self._gpu.take_oldest()
        ):
            pass
        while self._host.tokens > self._host_capacity and self._host.take_oldest():
            pass
