"""Train the policy: a small Llama with LoRA, on packed rows on the CPU; its base is pretrained here
in minutes.

An engine serves the base with the adapters merged into it, in the folder format of transformers.
Only the adapters and the optimizer's state are in a checkpoint.
"""

import copy
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from sums import Demonstration, Sums
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from treadle.training import IGNORED, PackedRow, pack

# The first 320 ids of SmolLM2's tokenizer stay, all bytes among them. The other 48,832 would be
# most of this model.
VOCABULARY = 320
WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 128, 2, 4, 2, 352
LONGEST = 1_024
ROW_TOKENS = 576
PRETRAIN_BATCH, PRETRAIN_RATE, WARM_UP = 32, 4e-3, 50
RANK, ALPHA = 16, 32
CLIP = 0.2
GRADIENT_NORM = 1.0
TOKENIZER, COPIED = "tokenizer.json", ("tokenizer.json", "tokenizer_config.json")


def cut_tokenizer(whole: Path, out: Path) -> None:
    """Write a tokenizer with the first VOCABULARY ids of another one, and the merges among them."""
    tokenizer = json.loads(whole.read_text())
    model = tokenizer["model"]
    vocabulary = {token: index for token, index in model["vocab"].items() if index < VOCABULARY}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merges = [pair for pair in pairs if {*pair, "".join(pair)} <= set(vocabulary)]
    tokenizer["model"] = {**model, "vocab": vocabulary, "merges": merges}
    out.write_text(json.dumps(tokenizer))


def pretrain(folder: Path, tokenizer_file: Path, steps: int, seed: int = 0) -> list[float]:
    """Train the base from random weights on demonstrations and write it, whole or not at all.
    Return the losses.

    tokenizer_file: SmolLM2's tokenizer.json.
    """
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as beside:
        cut_tokenizer(tokenizer_file, Path(beside) / TOKENIZER)
        shutil.copy(tokenizer_file.with_name("tokenizer_config.json"), beside)
        return _pretrain(folder, Path(beside), steps, seed)


def _pretrain(folder: Path, tokenizer_from: Path, steps: int, seed: int) -> list[float]:
    draw, sums = random.Random(seed), Sums(str(tokenizer_from / TOKENIZER))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=sums.end_id,
        pad_token_id=sums.end_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PRETRAIN_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 1.0) * (0.1 + 0.9 * (1.0 - step / steps))
    )
    losses = []
    for _ in range(steps):
        rows = pack(
            [_short(sums, draw) for _ in range(PRETRAIN_BATCH)], ROW_TOKENS, normalise="token"
        )
        loss = torch.stack(
            [-(_tensor(row.weights) * logprobs_of(model, row)).sum() for row in rows]
        ).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    _write(folder, model.save_pretrained, tokenizer_from)
    return losses


def _short(sums: Sums, draw: random.Random) -> Demonstration:
    """Make a demonstration that fits into a row."""
    while True:
        made = sums.demonstrate(draw)
        if len(made.tokens) <= ROW_TOKENS:
            return made


class Policy:
    """The model that is trained. base: a folder of `pretrain`. seed: of the adapters."""

    def __init__(self, base: Path, learning_rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self._base = base
        lora = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self._model = get_peft_model(
            LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), lora
        )
        trained = [each for each in self._model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[PackedRow]) -> list[np.ndarray]:
        """Return the logprobs of the labels, under the present weights."""
        return [logprobs_of(self._model, row).numpy() for row in rows]

    def update(self, rows: Sequence[PackedRow], minibatches: int) -> dict[str, float]:
        """Pass once over the rows in so many optimizer steps, with PPO's clipped ratio to the
        rollout's logprobs."""
        count = max(min(minibatches, len(rows)), 1)
        losses, norms = 0.0, []
        for start in range(count):
            for row in rows[start::count]:
                advantages = _tensor(row.advantages)
                ratio = (logprobs_of(self._model, row) - _tensor(row.old_logprobs)).exp()
                gain = torch.minimum(
                    ratio * advantages, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages
                )
                loss = -(_tensor(row.weights) * gain).sum()
                (loss * count).backward()
                losses += float(loss.detach())
            norms.append(
                float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), GRADIENT_NORM))
            )
            self._optimizer.step()
            self._optimizer.zero_grad()
        return {"loss": losses, "gradient_norm": max(norms)}

    def write_weights(self, folder: Path) -> None:
        """Write the base with the adapters merged into it, as an engine loads it; whole or not at
        all. Merged in a copy: to merge and unmerge in place would move the base a little at every
        step."""
        merged = copy.deepcopy(self._model).merge_and_unload()
        _write(folder, merged.save_pretrained, self._base)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "adapters": get_peft_model_state_dict(self._model),
            "optimizer": self._optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        set_peft_model_state_dict(self._model, state["adapters"])
        self._optimizer.load_state_dict(state["optimizer"])


def logprobs_of(model: torch.nn.Module, row: PackedRow) -> torch.Tensor:
    """Return the logprob [n] of the label at each position at temperature 1, 0 where there is none.
    Attention is block diagonal."""
    segments = torch.from_numpy(row.segments)
    allowed = (segments[:, None] == segments[None, :]).tril()
    logits = model(
        input_ids=torch.from_numpy(row.tokens)[None],
        position_ids=torch.from_numpy(row.position_ids)[None],
        attention_mask=allowed[None, None],
        use_cache=False,
    ).logits[0]
    return -cross_entropy(
        logits, torch.from_numpy(row.labels), reduction="none", ignore_index=IGNORED
    )


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values)


def _write(folder: Path, save: Callable[[Path], object], tokenizer_from: Path) -> None:
    """Fill a folder beside and rename it, so that no engine loads a part of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    save(partial)
    for name in COPIED:
        if (tokenizer_from / name).is_file():
            shutil.copy(tokenizer_from / name, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.chmod(0o755)
    partial.rename(folder)
