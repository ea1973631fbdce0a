"""The noun: an LLM judge. Standard library only, as `tool.py` that names it."""

import string
from dataclasses import dataclass


@dataclass(frozen=True)
class Judge:
    """A model that reads a trajectory and gives a score.

    prompt, system: templates in which `$name` stands for an argument; `$$` is a dollar. model: as its server calls it.
    endpoints: base URLs of servers with OpenAI's chat API, such as SGLang's; or service: a GPU service that is brought
    into memory for it. authorization_from_env: the environment variable with the Authorization header, such as
    `Bearer ...`; empty: none is sent.
    score: a regular expression whose one group is the score; its last match counts, since models reason first. low,
    high: the scores that the prompt allows; they become 0 and 1. tries: answers in all, until one has a score.
    at_once: questions under way.
    """

    prompt: str
    model: str
    endpoints: tuple[str, ...] = ()
    service: str = ""
    system: str = ""
    authorization_from_env: str = ""
    score: str = r"(?i)score\W{0,10}?(-?\d+(?:\.\d+)?)"
    low: float = 0.0
    high: float = 10.0
    temperature: float = 0.0
    max_tokens: int = 1024
    tries: int = 3
    at_once: int = 64
    wall_s: float = 300.0

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the templates ask for, each once."""
        names = [*string.Template(self.system).get_identifiers(), *string.Template(self.prompt).get_identifiers()]
        return tuple(dict.fromkeys(names))
