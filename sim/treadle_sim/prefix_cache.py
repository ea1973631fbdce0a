"""What an engine keeps of contexts that do not run: a radix cache by trajectory, least recently used out first.

Invariant: `tokens` is the sum over the entries. The prompt that samples share is counted with each of them, which
overstates the memory; once seen it is found until the cache is cleared, which overstates the hits by a prompt.
"""

from __future__ import annotations


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
