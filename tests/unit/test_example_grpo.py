"""The parts of examples/grpo: the task, and the policy that an engine gets."""

import dataclasses
import importlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from treadle.training import IGNORED, pack

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its modules by name."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    torch.set_num_threads(1)
    return importlib.import_module


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, larger than the part that the example keeps, in place of SmolLM2's."""
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
    ]
    merges = [(a, b) for a in "0123456789" for b in "0123456789"]
    tokens += [a + b for a, b in merges]
    tokenizer = Tokenizer(
        BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.add_special_tokens(tokens[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder / "tokenizer.json"


@pytest.fixture
def base(example: Any, tokenizer_file: Path, tmp_path: Path) -> Path:
    """A base model after three steps."""
    losses = example("policy").pretrain(tmp_path / "base", tokenizer_file, steps=3)
    assert len(losses) == 3 and losses[-1] < losses[0]
    return tmp_path / "base"


def test_the_cut_tokenizer_has_the_first_ids_and_encodes_any_text_with_them(
    example: Any, tokenizer_file: Path, tmp_path: Path
) -> None:
    policy = example("policy")
    policy.cut_tokenizer(tokenizer_file, tmp_path / "cut.json")
    cut = Tokenizer.from_file(str(tmp_path / "cut.json"))
    text = "12+99=111 é 漢\n"
    ids = cut.encode(text).ids
    assert max(ids) < policy.VOCABULARY == cut.get_vocab_size()
    assert cut.decode(ids) == text


def test_a_calculation_without_mistakes_ends_in_the_answer_of_the_question(
    example: Any, base: Path
) -> None:
    task = example("sums")
    sums = task.Sums(str(base / "tokenizer.json"))
    for prompt in sums.make_prompts("p", 20, seed=3):
        question = sums._tokenizer.decode(prompt.tokens).strip()
        terms = [int(letter) for letter in question[::2]]
        text = task.calculate(terms, list(question[1::2]), 0.0, random.Random(0))
        answer = [*sums._encode(text), sums.end_id]
        assert sums.read_answer(answer) == prompt.data
        assert sums.read_answer(answer[:-1]) == ""


def test_mistakes_come_as_often_as_they_should(example: Any) -> None:
    draw = random.Random(1)
    right = sum(
        example("sums").calculate([1, 2], ["+"], 0.3, draw) == "1+2=3\n" for _ in range(4_000)
    )
    assert right / 4_000 == pytest.approx(0.7, abs=0.03)


def test_no_two_steps_of_a_run_have_a_question_in_common(example: Any, base: Path) -> None:
    """reasoning-gym's question of seed s and index i is that of seed s + 1 and index i - 1."""
    train = example("train")
    sums = example("sums").Sums(str(base / "tokenizer.json"))
    seeds = [train.question_seed(seed, step) for seed in range(3) for step in range(4)]
    assert all(abs(a - b) >= 500 for a in seeds for b in seeds if a != b) and len(set(seeds)) == 12
    first, second = (sums.make_prompts("p", 16, seed) for seed in seeds[:2])
    shared = {tuple(prompt.tokens) for prompt in first} & {
        tuple(prompt.tokens) for prompt in second
    }
    assert len(shared) <= 2  # by chance: there are some ten thousand questions


def batch_of(example: Any, base: Path, count: int = 6) -> list[Any]:
    """Demonstrations as if they had been sampled with logprob -1 a token."""
    sums, draw = example("sums").Sums(str(base / "tokenizer.json")), random.Random(5)
    made = [sums.demonstrate(draw) for _ in range(count)]
    return [
        dataclasses.replace(each, logprobs=[-1.0 * mask for mask in each.loss_mask])
        for each in made
    ]


def test_a_token_has_the_logprob_in_a_packed_row_that_it_has_in_its_trajectory_alone(
    example: Any, base: Path
) -> None:
    module = example("policy")
    policy, batch = module.Policy(base, 1e-3, seed=0), batch_of(example, base)
    [row] = pack(batch, 4 * module.ROW_TOKENS)
    [together] = policy.logprobs([row])
    for member, start, end in zip(
        row.members, row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True
    ):
        [alone] = policy.logprobs(pack([batch[member]], module.ROW_TOKENS))
        assert np.allclose(together[start:end], alone, atol=1e-5)


def test_the_weights_that_an_engine_loads_compute_what_the_trained_policy_computes(
    example: Any, base: Path, tmp_path: Path
) -> None:
    """After an update the adapters are not zero. Result: base and merged weights differ, merged and
    adapted agree, and writing them leaves the policy as it was."""
    module = example("policy")
    policy = module.Policy(base, 1e-2, seed=0)
    rows = pack(
        batch_of(example, base), module.ROW_TOKENS, advantages=[1.0, -1.0] * 3, normalise="token"
    )
    before = policy.logprobs(rows)
    policy.update(rows, minibatches=2)
    after = policy.logprobs(rows)
    policy.write_weights(tmp_path / "merged")
    merged = module.LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        loaded = [module.logprobs_of(merged, row).numpy() for row in rows]
    assert not np.allclose(before[0], after[0], atol=1e-4)
    assert np.allclose(loaded[0], after[0], atol=1e-5)
    assert np.array_equal(policy.logprobs(rows)[0], after[0])
    assert (
        json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"]
        == module.VOCABULARY
    )


def test_an_update_makes_what_was_rewarded_likelier_and_the_rest_less_likely(
    example: Any, base: Path
) -> None:
    module = example("policy")
    policy = module.Policy(base, 1e-3, seed=0)
    trajectories = batch_of(example, base)
    rows = pack(trajectories, module.ROW_TOKENS, advantages=[1.0, -1.0] * 3, normalise="token")
    before = policy.logprobs(rows)
    fresh = [
        dataclasses.replace(
            row, old_logprobs=np.where(row.labels == IGNORED, 0.0, old).astype(np.float32)
        )
        for row, old in zip(rows, before, strict=True)
    ]
    policy.update(fresh, minibatches=1)
    gain = sum(
        float(((new - old) * row.advantages * row.weights).sum())
        for row, new, old in zip(rows, policy.logprobs(rows), before, strict=True)
    )
    assert gain > 0.0


def test_a_checkpoint_brings_back_adapters_and_optimizer(
    example: Any, base: Path, tmp_path: Path
) -> None:
    """One policy makes two updates; another one loads what it was after the first and makes the
    second."""
    module = example("policy")
    rows = pack(batch_of(example, base), module.ROW_TOKENS, advantages=[1.0, -1.0] * 3)
    first, second = module.Policy(base, 1e-3, seed=0), module.Policy(base, 1e-3, seed=1)
    first.update(rows, 1)
    torch.save(first.state(), tmp_path / "checkpoint.pt")
    second.load(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    first.update(rows, 1)
    second.update(rows, 1)
    assert all(
        np.allclose(a, b, atol=1e-6)
        for a, b in zip(first.logprobs(rows), second.logprobs(rows), strict=True)
    )
