"""Build prompts and observations as token ids, for models that use ChatML (SmolLM2, Qwen).

Only text that we wrote is tokenized. Ids that the model generated are appended as they are: to decode and encode them
again may give other ids, and a trainer must see exactly what was sampled.
"""

from pathlib import Path

from tokenizers import Tokenizer

from treadle_cli.problems import UsageProblem

START, END = "<|im_start|>", "<|im_end|>"


class ChatML:
    """The tokenizer of one model. end_id: the token that ends a turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        end_id = tokenizer.token_to_id(END)
        if end_id is None or tokenizer.token_to_id(START) is None:
            raise UsageProblem(
                f"the demo needs ChatML, and the tokenizer has no {START} and {END}: choose another --model"
            )
        self.end_id: int = end_id

    @classmethod
    def of_model(cls, model_path: str) -> "ChatML":
        """Read tokenizer.json from the model's folder. Raises UsageProblem where there is none."""
        path = Path(model_path) / "tokenizer.json"
        if not path.is_file():
            raise UsageProblem(
                f"{path} does not exist: the demo needs the model as a local folder with its tokenizer.json"
            )
        return cls(Tokenizer.from_file(str(path)))

    def system(self, text: str) -> list[int]:
        """The system message that begins a conversation."""
        return self._encode(f"{START}system\n{text}{END}\n")

    def user(self, text: str, lead: str = "") -> list[int]:
        """A user's message, and the start of the assistant's turn, whose first words are `lead`."""
        return self._encode(f"{START}user\n{text}{END}\n{START}assistant\n{lead}")

    def after_turn(self, generated: list[int], text: str, lead: str = "") -> list[int]:
        """Close the assistant's turn, add `text` as the user's message and start the next turn.

        The end token is added only where the model has not generated it (a turn that was cut at its length).
        """
        ended = bool(generated) and generated[-1] == self.end_id
        return self._encode("\n" if ended else f"{END}\n") + self.user(text, lead)

    def text(self, ids: list[int]) -> str:
        """Decode what the model generated, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
