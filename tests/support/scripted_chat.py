"""A model's chat template and tokenizer for tests, where a script says what the model's tokens
mean.

A letter is one token, LETTERS and more, which no fake engine samples: so a test can tell what was
written from what was sampled, and read it.
"""

from collections.abc import Iterable, Sequence
from itertools import cycle

from treadle.environments import Chat, Message
from treadle.environments.episode import ToolSchema

LETTERS = 60_000
END = "$"  # ends a message


def render(messages: Sequence[Message], tools: Sequence[ToolSchema], begins: bool) -> str:
    """`role: content$` for each message, behind the names of the tools."""
    names = [tool["function"]["name"] for tool in tools]
    said = "".join(f"{message['role']}: {message['content']}{END}" for message in messages)
    return f"{names if names else ''}{said}{'assistant: ' if begins else ''}"


def scripted_chat(replies: Iterable[str], letters: int = LETTERS) -> Chat:
    """The model says these in turn, and then again from the first one, whatever it samples.
    letters: where the tokens of letters begin."""
    script = cycle(replies)
    return Chat(
        render, lambda text: [letters + ord(letter) for letter in text], lambda ids: next(script)
    )


def read(tokens: Sequence[int]) -> str:
    """What a trajectory's tokens say, with `~` for each run of sampled ones."""
    letters = [chr(token - LETTERS) if token >= LETTERS else "~" for token in tokens]
    return "".join(
        letter
        for letter, before in zip(letters, ["", *letters], strict=False)
        if letter + before != "~~"
    )
