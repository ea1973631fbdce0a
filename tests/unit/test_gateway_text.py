"""The text of a stream: it only ever grows, and is the text of the whole answer in the end."""

import asyncio
import random
from pathlib import Path

import pytest
from support.byte_tokens import ids_of, write_byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from treadle import Sampling
from treadle_gateway.order import Refused
from treadle_gateway.text import LONG_CHARACTERS, TextModel, TextStream

TEXT = "Grüße, 世界! 👩‍👩‍👧 naïve — done"


@pytest.fixture
def model(tmp_path: Path) -> TextModel:
    return TextModel(write_byte_tokenizer(tmp_path / "bytes"))


def read_all(stream: TextStream, token_ids: list[int], piece: int) -> list[str]:
    """What each piece of so many tokens adds."""
    return [stream.add(token_ids[at : at + piece]) for at in range(0, len(token_ids), piece)]


@pytest.mark.parametrize("piece", [1, 2, 3, 7])
def test_characters_of_several_tokens_come_once_they_are_whole(
    model: TextModel, piece: int
) -> None:
    stream = TextStream(model, Sampling(max_new_tokens=1), skip_special=True, trim=True)
    pieces = read_all(stream, ids_of(TEXT), piece)
    assert "".join(pieces) == TEXT and not any("\ufffd" in each for each in pieces)


@pytest.mark.parametrize("piece", [1, 5])
def test_no_part_of_a_stop_string_is_sent_nor_what_its_last_token_has_behind_it(
    model: TextModel, piece: int
) -> None:
    stops = ("STOP", "OPEN")
    stream = TextStream(model, Sampling(max_new_tokens=1, stop=stops), skip_special=True, trim=True)
    assert "".join(read_all(stream, ids_of("one ST two STOPEN three"), piece)) == "one ST two "
    kept = TextStream(model, Sampling(max_new_tokens=1, stop=stops), skip_special=True, trim=False)
    assert "".join(read_all(kept, ids_of("two STOP"), piece)) == "two STOP"


def test_bytes_that_are_no_text_do_not_end_a_stream(model: TextModel, tmp_path: Path) -> None:
    """Sampled bytes need not be UTF-8. Result: also where the tokenizer falls back to bytes, as
    Llama's does."""
    fallback = tmp_path / "fallback"
    fallback.mkdir()
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "b": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save(str(fallback / "tokenizer.json"))
    rng = random.Random(1)
    for _ in range(300):
        token_ids = [
            rng.choice([*range(3, 256), 0xE2, 0x82, 0xAC, 0x41]) for _ in range(rng.randrange(40))
        ]
        for each in (model, TextModel(fallback)):
            stream = TextStream(each, Sampling(max_new_tokens=1), skip_special=True, trim=True)
            sent = "".join(read_all(stream, token_ids, rng.randrange(1, 4)))
            assert each is not model or each.decode(token_ids, skip_special=True).startswith(sent)


async def test_while_a_long_prompt_is_read_others_go_on(model: TextModel) -> None:
    """Result: its tokens are those of a short one's, and what can fit in no context is not read."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    long = "ab" * LONG_CHARACTERS
    [(field, ids)] = await model.encode_prompts([("text", long)], 0)
    counting.cancel()
    assert field == "text" and ids == model.encode(long) and turns > 2
    named = [("prompt[0]", "ab"), ("prompt[1]", "cd")]
    assert await model.encode_prompts(named, 8) == [(at, model.encode(text)) for at, text in named]
    with pytest.raises(Refused, match=r"prompt\[1\]: .*maximum context length"):
        await model.encode_prompts([("prompt[0]", "a"), ("prompt[1]", long)], 100)
