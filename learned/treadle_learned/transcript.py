"""What a learned predictor is trained on: trajectories that have ended, with what they said where that is known.

Invariant: a transcript is as it was; nothing here cuts it. Texts may have been cut by who recorded them.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Turn:
    """One step: tokens sampled, tokens that its tool's answer added, and the texts of both where they are known."""

    gen_tokens: int
    obs_tokens: int = 0
    text: str = ""
    obs_text: str = ""


@dataclass(frozen=True)
class Transcript:
    """One trajectory. rollout_id: of the batch it was sampled in, which with prompt_id makes its group. censored: it
    was cut and would have gone on. max_total_tokens: the cap on sampled tokens, 0 for none. weight_version: the
    policy's that sampled it, empty where it is not known."""

    trajectory_id: str
    rollout_id: str
    prompt_id: str
    prompt_tokens: int
    turns: tuple[Turn, ...]
    censored: bool = False
    prompt: str = ""
    max_total_tokens: int = 0
    weight_version: str = ""

    @cached_property
    def gen_tokens(self) -> int:
        """Sampled over all turns."""
        return sum(turn.gen_tokens for turn in self.turns)

    @property
    def version_number(self) -> int | None:
        """See `version_number`."""
        return version_number(self.weight_version)

    @property
    def has_text(self) -> bool:
        """Whether it says anything at all."""
        return bool(self.prompt) or any(turn.text for turn in self.turns)


def version_number(weight_version: str) -> int | None:
    """Of weights that are numbered, as RL loops number them; None of others, whose distance nobody knows."""
    return int(weight_version) if weight_version.isdecimal() else None
