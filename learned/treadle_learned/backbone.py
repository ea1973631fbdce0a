"""The pretrained decoder that reads a trajectory (Heddle 4.1: Qwen3-0.6B): any Hugging Face one, in a local folder or
by a hub's name.

Invariants: the tokenizer and the embeddings fit each other, and `fingerprint` names both; `hidden` and `read_on` give
the same states for the same ids, read at once or after a prefix that was read before.

In what numbers a backbone computes here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, DynamicCache, PreTrainedModel
from treadle_core.compiled import has_bf16

from treadle_learned.errors import BackboneError
from treadle_learned.reading import Read

CPU_INFO = Path("/proc/cpuinfo")


@cache
def fitting_dtype(device: str, cpu_info: Path = CPU_INFO) -> torch.dtype:
    """bf16 on a GPU and on a processor that says it has it, else float32. Not tried: on a busy machine a trial errs."""
    if device != "cpu":
        return torch.bfloat16
    try:
        return torch.bfloat16 if has_bf16(cpu_info.read_text()) else torch.float32
    except OSError:
        return torch.float32


DEFAULT = "Qwen/Qwen3-0.6B"
LOADING_ERRORS = (OSError, ValueError, KeyError)  # of transformers
PROBE = "The plan: 1. read the file; 2. run the tests.\n日本語 {x}"  # a tokenizer is known by what it makes of this


class Backbone:
    """See the module. `device`: cpu, or cuda where it is there."""

    def __init__(self, name: str, tokenizer: Any, model: PreTrainedModel, device: str) -> None:
        self.name = name
        self.tokenizer = tokenizer
        torch.nn.Module.to(model, device)  # in place
        self.model = model.eval()
        self.device = device
        self.hidden_size = int(model.config.hidden_size)

    @classmethod
    def load(cls, name: str = DEFAULT, *, device: str | None = None, dtype: torch.dtype | None = None) -> Backbone:
        """From a folder, or by a hub's name; without `dtype` in the numbers that fit the device (`precision`). Raises
        BackboneError."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or fitting_dtype(device)
        try:
            config = AutoConfig.from_pretrained(name)
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModel.from_pretrained(name, config=config, dtype=dtype)
        except LOADING_ERRORS as error:
            raise _not_loaded("backbone", name, error) from error
        rows = model.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > rows:
            raise BackboneError(
                f"backbone: the tokenizer of {name!r} has {len(tokenizer)} tokens and the model embeds {rows}: "
                "they are of different models"
            )
        return cls(name, tokenizer, model, device)

    @cached_property
    def fingerprint(self) -> str:
        """Of the architecture and the tokenizer, not of where they were found."""
        config = self.model.config
        shape = [config.model_type, config.hidden_size, config.num_hidden_layers, config.vocab_size]
        told = json.dumps([shape, len(self.tokenizer), self.tokenize(PROBE)])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def tokenize(self, text: str) -> list[int]:
        """Ids without special tokens; none for no text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Last hidden states, float32 [len(ends), hidden_size], after so many of the ids each (1 to len(ids))."""
        states = self.model(input_ids=torch.tensor([list(ids)], device=self.device)).last_hidden_state[0]
        found: Tensor = states[torch.tensor(ends, device=self.device) - 1].float().cpu()
        return found

    @torch.inference_mode()
    def read_on(self, ids: Sequence[int], before: Read | None) -> tuple[Tensor, Read]:
        """The last hidden state, float32 [hidden_size], after all ids. What `before` has read of their beginning is not
        read again; it is used up."""
        ids = tuple(ids)
        known = before.usable_for(ids) if before is not None else None
        done = len(known.ids) if known is not None else 0
        cache = known.cache if known is not None else DynamicCache()
        answer = self.model(
            input_ids=torch.tensor([ids[done:]], device=self.device), past_key_values=cache, use_cache=True
        )
        return answer.last_hidden_state[0, -1].float().cpu(), Read(ids, answer.past_key_values)


def load_tokenizer(name: str) -> Any:
    """A tokenizer alone, e.g. the policy's, from a folder or by a hub's name. Raises BackboneError."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except LOADING_ERRORS as error:
        raise _not_loaded("tokenizer", name, error) from error


def _not_loaded(what: str, name: str, error: BaseException) -> BackboneError:
    where = "folder" if Path(name).exists() else "hub name"
    return BackboneError(
        f"{what}: {where} {name!r} cannot be loaded ({str(error).splitlines()[0]}); "
        "pass a folder with config.json, weights and tokenizer, or a name that this machine can fetch"
    )
