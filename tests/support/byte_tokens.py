"""A tokenizer whose tokens are bytes, so that a character may need several, as those of real models
do."""

import json
from pathlib import Path

from support.fake_sglang import END_TOKEN
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FIRST = 3  # of the bytes; END_TOKEN is below


def ids_of(text: str) -> list[int]:
    """The tokens of a text."""
    return [FIRST + byte for byte in text.encode()]


def write_byte_tokenizer(folder: Path) -> Path:
    """A model's folder with this tokenizer."""
    folder.mkdir()
    # ByteLevel writes a byte as a printable character: those that are printable as they are, the
    # others from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + at) for at, byte in enumerate(others)
    }
    vocabulary = {f"<{token}>": token for token in range(FIRST)} | {
        sign: FIRST + byte for byte, sign in signs.items()
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<{END_TOKEN}>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END_TOKEN}))
    return folder
