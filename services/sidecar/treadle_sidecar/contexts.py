"""The token ids that the sidecar last saw of each trajectory, so that another sidecar can take one over without the
client's help.

Bounded: the least recently used go first, beyond `limit_tokens` in all.
"""

from array import array
from collections import OrderedDict

CONTEXT_LIMIT_TOKENS = 32 * 1024 * 1024  # 128 MiB of int32; a thousand trajectories of 32k tokens


class Contexts:
    """Trajectory id -> whole context, prompt and output."""

    def __init__(self, limit_tokens: int = CONTEXT_LIMIT_TOKENS) -> None:
        self._limit_tokens = limit_tokens
        self._tokens = 0
        self._contexts: OrderedDict[str, array[int]] = OrderedDict()

    def remember(self, trajectory_id: str, context: "array[int]") -> None:
        """Replaces what was known of the trajectory."""
        self.forget(trajectory_id)
        self._contexts[trajectory_id] = context
        self._tokens += len(context)
        while self._tokens > self._limit_tokens and len(self._contexts) > 1:
            _, dropped = self._contexts.popitem(last=False)
            self._tokens -= len(dropped)

    def of(self, trajectory_id: str) -> "array[int] | None":
        """None where the trajectory was never here, or was forgotten."""
        context = self._contexts.get(trajectory_id)
        if context is not None:
            self._contexts.move_to_end(trajectory_id)
        return context

    def forget(self, trajectory_id: str) -> None:
        """Forgetting what is not here is fine."""
        dropped = self._contexts.pop(trajectory_id, None)
        if dropped is not None:
            self._tokens -= len(dropped)
