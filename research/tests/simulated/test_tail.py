"""`bench tail`: what a replay accepts, a cell of variants, its page, and what engines gain by
batch."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_cli.exits import UsageProblem

from treadle_bench.bench import BenchOptions
from treadle_bench.tail.acceptance import (
    MOST_SUFFIX,
    Sample,
    find_draft,
    measure_acceptance,
    replay,
    speculation_of,
    yield_of,
)
from treadle_bench.tail.measure import BENCH, find_gains, make_batch, measure, play_cell

TAU, SWEBENCH = "tau_airline_gpt4o", "swebench_verified_mini_gemini3"


def sample(*turns: str, prompt: str = "", words: dict[str, int] | None = None) -> Sample:
    """Of texts that it generated; its tool says the same each time."""
    return Sample(prompt, [(turn, " ok") for turn in turns], words if words is not None else {})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with two samples of one prompt, and one of a prompt without others."""
    step = {
        "gen": "look up the user and book the flight",
        "tool": None,
        "obs": "done",
        "gen_tokens": 9,
    }
    rows = {
        TAU: [
            {
                "prompt_id": "a",
                "sample": n,
                "reward": 1.0,
                "first_user": "book",
                "steps": [{**step, "obs_tokens": 3}] * 3,
            }
            for n in range(2)
        ],
        SWEBENCH: [{"prompt_id": "b", "sample": 0, "prompt": "fix it", "steps": [step]}],
    }
    for (name, of), file in zip(
        rows.items(), ("steps_text.jsonl.gz", "steps_text_trunc.jsonl.gz"), strict=True
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(
            gzip.compress("".join(json.dumps(row) + "\n" for row in of).encode())
        )
    return tmp_path


def test_what_a_sample_repeats_is_accepted_and_what_is_new_is_not() -> None:
    words: dict[str, int] = {}
    text = "a b c d e f g h"
    fresh = sample(text, words=words)
    assert list(replay(fresh, [], 3)) == [1] * 7, "no token comes twice; the first is its prefill's"
    assert list(replay(fresh, [sample(text, words=words)], 3)) == [4, 3], (
        "three drafts and one more"
    )
    assert list(replay(sample(text, text), [], 11))[7:] == [7], "the second turn repeats the first"
    assert yield_of([], 3) == 1.0


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(1, 12))
def test_a_replay_samples_every_token_and_its_draft_follows_the_longest_suffix(
    tokens: list[int], most: int
) -> None:
    one = sample(" ".join("abc"[token] for token in tokens))
    yielded = list(replay(one, [], most))
    assert sum(yielded) == len(one.tokens) - 2  # the first token, and what the tool said
    assert all(1 <= each <= most + 1 for each in yielded)

    text = one.tokens
    at = len(tokens)

    def shared(place: int) -> int:
        """Tokens before `place` that are those before `at`."""
        count = 0
        while count < min(place, MOST_SUFFIX) and text[place - 1 - count] == text[at - 1 - count]:
            count += 1
        return count

    best = max(range(1, at), key=lambda place: (shared(place), place))
    assert find_draft(text, at) == (best if shared(best) else at)


async def test_a_cell_is_played_with_and_without_drafts_and_its_page_needs_the_json_alone(
    data: Path, tmp_path: Path
) -> None:
    accepted = measure_acceptance(data)
    assert accepted["siblings"] == [0, 1]
    assert accepted["tokens"]["11"][0] < accepted["tokens"]["11"][1]
    speculation = speculation_of(accepted)
    batches = [make_batch("tau", 2, 0.1, 0.1, seed, data) for seed in (0, 1)]
    row = await play_cell("tau", 0.1, batches, speculation, BenchOptions(workers=1))
    assert row["ratio_to_treadle"] > 1.0
    assert row["ratio_of_baselines"] > 1.0
    low, high = row["spread"]["ratio_to_best_baseline"]
    assert low <= row["ratio_to_best_baseline"] <= high

    gains = find_gains(batches[0], speculation)
    assert {row["drafts"] for row in gains if row["gain"] == 1.0} <= {0}
    assert all(row["gain"] >= 1.0 for row in gains)
    figures: dict[str, Any] = {
        "accelerator": "H200",
        "model": "Qwen3-14B",
        "seeds": [0, 1],
        "scale": None,
    }
    figures |= {"accepted": accepted, "gains": gains, "cells": [row]}
    BENCH.write(figures, tmp_path)
    assert json.loads((tmp_path / "tail.json").read_text()) == figures
    page = (tmp_path / "tail.md").read_text()
    assert "| tau | 2 GPUs, 0.1 a slot, tools × 0.1 | 16 |" in page
    assert (tmp_path / "tail.png").stat().st_size > 0
    slower = {**row, "ratio_to_treadle": 0.9, "ratio_to_best_baseline": 0.8}
    replace(BENCH, draw=None).write(figures | {"cells": [slower]}, tmp_path)
    page = (tmp_path / "tail.md").read_text()
    assert "- tau, 2 GPUs, 0.1 a slot, tools × 0.1: 0.90" in page
    assert "- tau, 2 GPUs, 0.1 a slot, tools × 0.1: 0.80 (" in page


async def test_it_needs_the_folder_of_traces() -> None:
    with pytest.raises(UsageProblem, match="needs --data"):
        await measure(BenchOptions())
