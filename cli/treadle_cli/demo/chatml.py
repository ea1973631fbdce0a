"""ChatML, token in and token out: the pieces of a conversation as token ids.

Purpose: build prompts and observations for models that speak ChatML (SmolLM2, Qwen). Invariant: only text that we
wrote is ever tokenised; ids that the model generated are appended as they are, because decoding and encoding them
again need not give the same ids, and a trainer must see exactly what was sampled.
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
                f"the demo speaks ChatML, and the model's tokenizer has no {START} and {END}: choose another --model"
            )
        self.end_id: int = end_id

    @classmethod
    def of_model(cls, model_path: str) -> "ChatML":
        """From the model's folder. Raises UsageProblem where there is no tokenizer.json."""
        path = Path(model_path) / "tokenizer.json"
        if not path.is_file():
            raise UsageProblem(
                f"{path} is not there: the demo needs the model as a local folder with its tokenizer.json"
            )
        return cls(Tokenizer.from_file(str(path)))

    def system(self, text: str) -> list[int]:
        """The opening of a conversation."""
        return self._encode(f"{START}system\n{text}{END}\n")

    def user(self, text: str, lead: str = "") -> list[int]:
        """A user's message, and the opening of the assistant's turn, which goes on from the words `lead`."""
        return self._encode(f"{START}user\n{text}{END}\n{START}assistant\n{lead}")

    def after_turn(self, generated: list[int], text: str, lead: str = "") -> list[int]:
        """Closes the assistant's turn, says `text` as the user and opens the next turn.

        The model's own end token is not said twice: a turn that was cut at its length has none.
        """
        ended = bool(generated) and generated[-1] == self.end_id
        return self._encode("\n" if ended else f"{END}\n") + self.user(text, lead)

    def text(self, ids: list[int]) -> str:
        """What the model said, without its markers."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
