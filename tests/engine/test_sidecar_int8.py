"""8-bit weights on a real engine, against an engine with the model's own weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
from support.real_engines import RealEngine
from treadle_sidecar.engine.process import choose_weights

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        choose_weights("auto", cpu=True) == "float", reason="8-bit weights need avx512_vnni"
    ),
]

COUNTING = ", ".join(str(number) for number in range(1, 21)) + ","
TEXTS = (
    COUNTING,
    "The water of the sea evaporates, rises as vapour, and falls again as rain. Rivers carry it "
    "back to the sea.",
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n "
    "   return area(",
    "Paris is the capital of France, Rome is the capital of Italy, and Berlin is the capital of "
    "Germany.",
)
MEAN_DIFFERENCE = 0.25  # of a token's logprob; 0.1 was measured
SAME_GREEDY = 0.8  # share of tokens; 0.95 was measured
CHANGED = tuple(f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(15, 30))


def scores(engine: RealEngine, salt: str) -> list[tuple[float, int]]:
    """The logprob of each token of TEXTS after its text's first, and the token that would have been
    likeliest."""
    found = []
    for text in TEXTS:
        body = {
            "text": text,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "cache_salt": salt,
        }
        meta = engine.ask("/generate", {**body, "logprob_start_len": 0, "top_logprobs_num": 1})[
            "meta_info"
        ]
        pairs = zip(meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:], strict=True)
        found += [(own[0], top[0][1]) for own, top in pairs]
    return found


def mean_difference(left: Sequence[tuple[float, int]], right: Sequence[tuple[float, int]]) -> float:
    return fmean(abs(one[0] - other[0]) for one, other in zip(left, right, strict=True))


def changed_model(folder: Path, out: Path) -> str:
    """A copy of the model with the signs of some weights changed."""
    shutil.copytree(folder, out)
    content = bytearray((folder / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    for name in CHANGED:
        first, last = header[name]["data_offsets"]
        assert header[name]["dtype"] == "BF16"
        signs = slice(begin + first + 1, begin + last, 2)  # the high byte of each number
        content[signs] = bytes(byte ^ 0x80 for byte in content[signs])
    (out / "model.safetensors").write_bytes(content)
    return str(out)


def test_8_bit_weights_serve_nearly_the_same_logprobs_also_after_an_update(
    int8_engine: RealEngine, text_engine: RealEngine, tmp_path: Path
) -> None:
    """Result: greedy text makes sense, logprobs are near those of the float engine; after an update
    of both engines they are near each other again and far from what they were, and the old weights
    bring the old logprobs back."""
    sampling = {"max_new_tokens": 20, "temperature": 0.0}
    int8_engine.wait_ready()
    answer = int8_engine.ask("/generate", {"text": COUNTING, "sampling_params": sampling})
    assert answer["text"].startswith(" 21, 22, 23, 24,")

    before, exact = scores(int8_engine, "old"), scores(text_engine, "old")
    assert mean_difference(before, exact) < MEAN_DIFFERENCE
    assert fmean(one[1] == other[1] for one, other in zip(before, exact, strict=True)) > SAME_GREEDY

    path = changed_model(Path(text_engine.spec.model_path), tmp_path / "changed")
    for each in (int8_engine, text_engine):
        each.ask("/update_weights_from_disk", {"model_path": path})
    after, exact_after = scores(int8_engine, "new"), scores(text_engine, "new")
    assert mean_difference(after, before) > 1.0
    assert mean_difference(after, exact_after) < mean_difference(after, before) / 3

    for each in (int8_engine, text_engine):
        each.ask("/update_weights_from_disk", {"model_path": text_engine.spec.model_path})
    assert mean_difference(scores(int8_engine, "again"), before) < 0.01
