"""Convert token ids to text and text to token ids, by the model's own tokenizer.

Only what a person or a template wrote is ever tokenised. What the model sampled stays as it was
sampled: `extend` returns, for a conversation that continues, the ids that are known and then the
tokens of the text that follows them.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from treadle import Sampling
from treadle_runtime.http.sglang import end_token_ids

from treadle_gateway.order import Output, Refused

# Values of sampling that a chat takes from the model's generation_config.json, as in SGLang.
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LONG_CHARACTERS = 64 * 1024  # from here on a text takes some 50 ms
TAIL_TOKENS = 64  # enough for the text of a stop string


class TextModel:
    """The tokenizer of a model folder, and the ids that end an answer."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file}: no tokenizer there; set TREADLE_GATEWAY_TOKENIZER to the model's folder"
            )
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        self.end_token_ids = end_token_ids(folder)
        self.chat_defaults = chat_defaults(folder)
        self._long = asyncio.Lock()  # held while long texts are read, which takes a core
        by_bytes = isinstance(self._tokenizer.decoder, ByteLevel)
        self._byte_of = _byte_letters() if by_bytes else {}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text. special: add the tokens with which the model begins a
        text, if it has some."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    async def encode_prompts(
        self, named: Sequence[tuple[str, str]], context_tokens: int
    ) -> list[tuple[str, list[int]]]:
        """Return the token ids of texts, each with the field where a caller wrote it. Long ones are
        read beside other work. context_tokens: of the longest sequence that an engine takes; 0: not
        known. Raises Refused for a text that fits in no number of tokens."""
        for field, text in named:
            if 0 < context_tokens < len(text) and len(text) > context_tokens * self._longest_token:
                raise Refused(
                    f"{field}: has {len(text)} characters, more than the {context_tokens} tokens "
                    "of this model's maximum context length can have; shorten the prompt",
                    code="context_length_exceeded",
                )
        if sum(len(text) for _, text in named) < LONG_CHARACTERS:
            return [(field, self.encode(text)) for field, text in named]
        async with self._long:
            return await asyncio.to_thread(
                lambda: [(field, self._encode_aside(text)) for field, text in named]
            )

    def _encode_aside(self, text: str) -> list[int]:
        """Return the tokens of a text as `encode` does, and let other threads run meanwhile."""
        return list(self._tokenizer.encode_batch_fast([text])[0].ids)

    @cached_property
    def _longest_token(self) -> int:
        """Return the most characters of a token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special))

    def name(self, token_id: int, *, by_id: bool = False) -> str:
        """Return how logprobs name a token: by its text, or by its id."""
        return f"token_id:{token_id}" if by_id else self.decode([token_id], skip_special=False)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_of and all(letter in self._byte_of for letter in token):
            return bytes(self._byte_of[letter] for letter in token)
        return self.decode([token_id], skip_special=False).encode()

    def extend(self, known: Sequence[int], rendered: Sequence[int]) -> list[int] | None:
        """Return the token ids of a rendered conversation that begins with `known`, with those kept
        as they are; None where its text does not begin with theirs."""
        before = self.decode(known, skip_special=False)
        whole = self.decode(rendered, skip_special=False)
        if not whole.startswith(before):
            return None
        return [*known, *self.encode(whole[len(before) :], special=False)]


def _byte_letters() -> Mapping[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for: a printable one
    stands for itself, the others for letters from 256 on (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + at): byte for at, byte in enumerate(others)
    }


def chat_defaults(folder: Path) -> Mapping[str, float]:
    """Return the sampling values that the files of a model name."""
    file = folder / "generation_config.json"
    named = json.loads(file.read_text()) if file.is_file() else {}
    return {name: named[name] for name in DEFAULTS if named.get(name) is not None}


class TextStream:
    """The text of an answer while its tokens come. trim: leave out what will end it, a token or a
    stop string; else it ends with that."""

    def __init__(
        self, model: TextModel, sampling: Sampling, *, skip_special: bool, trim: bool
    ) -> None:
        self._model, self._skip_special = model, skip_special
        trims_tokens = trim and not sampling.ignore_eos
        self._ends = (
            model.end_token_ids | frozenset(sampling.stop_token_ids)
            if trims_tokens
            else frozenset[int]()
        )
        self._stops, self._trim = sampling.stop, trim
        self._ids: list[int] = []
        self._known = 0  # ids whose text was read, and stands before that of the others
        self._held = ""  # text in which a stop string may begin
        self._stopped = False

    def add(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; return the text that is certain now, after that of earlier
        calls."""
        if self._stopped:
            return ""
        self._held += self._read(token for token in token_ids if token not in self._ends)
        at, stop = first_stop(self._held, self._stops)
        self._stopped = bool(stop)
        end = len(self._held) - max(map(len, self._stops), default=1) + 1
        if stop:
            end = at if self._trim else at + len(stop)
        text, self._held = self._held[: max(end, 0)], self._held[max(end, 0) :]
        return text

    def _read(self, token_ids: Iterable[int]) -> str:
        """Return the text of new tokens, once the last of their characters is whole."""
        self._ids += token_ids
        before = self._model.decode(self._ids[: self._known], skip_special=self._skip_special)
        text = self._model.decode(self._ids, skip_special=self._skip_special)
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
        return text[len(before) :]


def matched_end(
    model: TextModel, output: Output, stop: Sequence[str], stop_token_ids: Iterable[int]
) -> int | str | None:
    """Return what ended an answer: a token id, or a stop string."""
    last = output.token_ids[-1] if output.token_ids else None
    if last is not None and last in model.end_token_ids | frozenset(stop_token_ids):
        return last
    text = model.decode(output.token_ids, skip_special=False) if stop else ""
    return next((each for each in stop if each in text), None)


def first_stop(text: str, stops: Iterable[str]) -> tuple[int, str]:
    """Return the first stop string in a text, and its place; empty where there is none."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=(-1, ""))


def is_whole(model: TextModel | None, token_ids: Sequence[int], sampling: Sampling) -> bool:
    """Return whether tokens end as an answer does: by a token that ends it, or with a stop string
    in the last of its text."""
    ends = (model.end_token_ids if model is not None else frozenset()) | frozenset(
        sampling.stop_token_ids
    )
    if token_ids and token_ids[-1] in ends and not sampling.ignore_eos:
        return True
    tail = (
        model.decode(token_ids[-TAIL_TOKENS:], skip_special=False)
        if model is not None and sampling.stop
        else ""
    )
    return any(stop in tail for stop in sampling.stop)


def answer_text(
    model: TextModel, output: Output, matched: int | str | None, *, skip_special: bool, trim: bool
) -> str:
    """Return the text of an answer, up to what ended it. trim: without that."""
    ids = output.token_ids
    if trim and isinstance(matched, int) and ids and ids[-1] == matched:
        ids = ids[:-1]
    text = model.decode(ids, skip_special=skip_special)
    if isinstance(matched, str) and matched in text:
        return text[: text.index(matched) + (0 if trim else len(matched))]
    return text


def require_model(model: TextModel | None) -> TextModel:
    """Return the model. Raises Refused where there is no tokenizer."""
    if model is None:
        raise Refused(
            "text needs the model's tokenizer: set TREADLE_GATEWAY_TOKENIZER to its folder", 501
        )
    return model
