"""Text of token ids and token ids of text, by the model's own tokenizer.

Only what a person or a template wrote is ever tokenised. What the model sampled stays as it was sampled: `extend` gives
the token ids of a conversation that goes on as the ids that are known and the tokens of the text that follows them.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from treadle_gateway.order import Output, Refused


class TextModel:
    """The tokenizer of a model folder, and the ids that end an answer."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no tokenizer there; set TREADLE_GATEWAY_TOKENIZER to the model's folder")
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        self.end_token_ids = _end_token_ids(folder)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """special: add the tokens with which the model begins a text, if it has some."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special))

    def stream(self, *, skip_special: bool) -> Callable[[Iterable[int]], str]:
        """A function that takes the tokens of a stream, piece by piece, and returns the text that is whole by then."""
        decoder = DecodeStream(skip_special_tokens=skip_special)

        def read(token_ids: Iterable[int]) -> str:
            return "".join(decoder.step(self._tokenizer, token) or "" for token in token_ids)

        return read

    def extend(self, known: Sequence[int], rendered: Sequence[int]) -> list[int] | None:
        """The token ids of a rendered conversation that begins with `known`, with those kept as they are; None where
        its text does not begin with theirs."""
        before = self.decode(known, skip_special=False)
        whole = self.decode(rendered, skip_special=False)
        if not whole.startswith(before):
            return None
        return [*known, *self.encode(whole[len(before) :], special=False)]


def matched_end(
    model: TextModel, output: Output, stop: Sequence[str], stop_token_ids: Iterable[int]
) -> int | str | None:
    """What ended an answer: a token id, or a stop string."""
    last = output.token_ids[-1] if output.token_ids else None
    if last is not None and last in model.end_token_ids | frozenset(stop_token_ids):
        return last
    text = model.decode(output.token_ids, skip_special=False) if stop else ""
    return next((each for each in stop if each in text), None)


def answer_text(model: TextModel, output: Output, matched: int | str | None, *, skip_special: bool, trim: bool) -> str:
    """The text of an answer. trim: without what ended it."""
    ids = output.token_ids
    if trim and isinstance(matched, int) and ids and ids[-1] == matched:
        ids = ids[:-1]
    text = model.decode(ids, skip_special=skip_special)
    if trim and isinstance(matched, str) and matched in text:
        return text[: text.index(matched)]
    return text


def _end_token_ids(folder: Path) -> frozenset[int]:
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.is_file():
            ids = json.loads(file.read_text()).get("eos_token_id")
            found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(found)


def require_model(model: TextModel | None) -> TextModel:
    """Raises Refused where there is no tokenizer."""
    if model is None:
        raise Refused("text needs the model's tokenizer: set TREADLE_GATEWAY_TOKENIZER to its folder", 501)
    return model
