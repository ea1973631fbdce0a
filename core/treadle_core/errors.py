"""The root of what pure policy can refuse.

Purpose: every error of `treadle_core` says which input was wrong, so that a service can name the field to its caller.
Invariant: `field` is the path of the input as the caller of the core function wrote it, e.g.
`trajectories[3].remaining_tokens`.
"""

from __future__ import annotations


class CoreError(ValueError):
    """An input that a policy cannot work with; `field` is its path, `description` what would be right."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description
