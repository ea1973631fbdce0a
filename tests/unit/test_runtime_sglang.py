"""The client of SGLang's HTTP server, and the table of sampling fields."""

import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import treadle
from support.fake_sglang import expected, fake_sglang
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle_runtime.http.sglang import (
    SAMPLING,
    EngineClient,
    EngineLost,
    EngineRequest,
    end_token_ids,
    sglang_sampling,
)

PROMPT = [5, 6, 7]


async def read(client: EngineClient, rid: str) -> list[int]:
    """Six tokens, as they come."""
    tokens: list[int] = []
    request = EngineRequest(rid, PROMPT, {"max_new_tokens": 6})
    async with aclosing(client.generate(request)) as chunks:
        async for chunk in chunks:
            tokens += chunk.token_ids
    return tokens


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_stream_is_read_whether_its_chunks_have_new_tokens_or_all(
    incremental: bool,
) -> None:
    """A client that does not know how its engine streams. Result: the tokens, each once; a client
    that was given the wrong way refuses to guess."""
    async with fake_sglang(incremental=incremental) as engine:
        client = EngineClient(engine.url)
        try:
            assert await read(client, "a") == expected(PROMPT, 6)
            client.incremental = not incremental
            with pytest.raises(EngineLost, match="as it says that it runs"):
                await read(client, "b")
        finally:
            await client.close()


def test_the_table_has_every_sampling_field_of_the_protos_and_of_the_client() -> None:
    assert SAMPLING.keys() == {field.name for field in SamplingParams.DESCRIPTOR.fields}
    assert SAMPLING.keys() == vars(treadle.Sampling(max_new_tokens=1)).keys()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("max_new_tokens", [1, 2**31 - 1], [0, -4, 2**31, 1.0, True]),
        ("temperature", [0, 0.0, 1.5], [-0.1, float("nan"), float("inf"), "1"]),
        ("top_p", [1, 0.1], [0, 1.1, float("nan")]),
        ("top_k", [-1, 1], [0, -2, 2**31, 1.0]),
        ("min_p", [0, 1], [-0.1, 1.5]),
        ("seed", [0, 2**63 - 1], [-1, 2**63, 0.5]),
        ("stop", [(), ("a",)], [("",), ("a",) * 33, (1,)]),
        ("stop_token_ids", [(), (0,)], [(-3,), (2**31,), ("a",)]),
        ("ignore_eos", [True, False], [1, "yes"]),
    ],
)
def test_a_sampling_field_says_what_is_right_in_place_of_a_wrong_value(
    name: str, right: list[object], wrong: list[object]
) -> None:
    field = SAMPLING[name]
    assert [field.problem(value) for value in right] == [""] * len(right)
    assert all(field.problem(value).startswith("must ") for value in wrong)


def test_sglang_gets_what_has_a_value_under_its_own_names() -> None:
    sampling = treadle.Sampling(max_new_tokens=3, seed=0, temperature=0.0, stop=("a",))
    assert sglang_sampling(vars(sampling).items()) == {
        "max_new_tokens": 3,
        "sampling_seed": 0,
        "temperature": 0.0,
        "stop": ["a"],
        "ignore_eos": False,
        "skip_special_tokens": False,
    }


IM_END = {"content": "<|im_end|>", "special": True}
FILES_OF_ENDS: list[tuple[dict[str, dict[str, Any]], set[int]]] = [
    (
        {"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": [2, 7]}},
        {0, 2, 7},
    ),
    (
        {
            "config.json": {"eos_token_id": 1},
            "tokenizer_config.json": {
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": {"4": IM_END, "5": {"content": "<|im_start|>"}},
            },
        },
        {1, 4},
    ),
    (
        {
            "tokenizer_config.json": {"eos_token": IM_END},
            "tokenizer.json": {"added_tokens": [{"id": 9, "content": "<|im_end|>"}], "model": {}},
        },
        {9},
    ),
    (
        {
            "special_tokens_map.json": {"eos_token": "</s>"},
            "tokenizer.json": {"model": {"vocab": {"<s>": 0, "</s>": 3}}},
        },
        {3},
    ),
    (
        {
            "tokenizer.json": {
                "added_tokens": [{"id": 8, "content": "<|eom_id|>"}],
                "model": {"vocab": []},
            }
        },
        {8},
    ),
    ({}, set()),
]


@pytest.mark.parametrize(("files", "ends"), FILES_OF_ENDS)
def test_the_ends_of_answers_are_those_of_the_model_and_of_its_tokenizer(
    tmp_path: Path, files: dict[str, dict[str, Any]], ends: set[int]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_token_ids(tmp_path) == ends


def test_an_engine_without_a_tokenizer_ends_at_the_tokens_of_the_model_alone(
    tmp_path: Path,
) -> None:
    for name, content in FILES_OF_ENDS[1][0].items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_token_ids(tmp_path, tokenizer=False) == {1}
