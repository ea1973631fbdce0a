"""Pretrained decoder that reads trajectories (Heddle 4.1: Qwen3-0.6B), and its training: LoRA or
all weights.

Any Hugging Face decoder serves, from a local folder or by a hub name. Invariants: tokenizer and
embeddings fit each other, and `fingerprint` names both. `hidden`, `read_on` and `read_together`
give the same states for the same ids, to rounding, read at once or after a prefix that was read
before. Weights are float32 while they are trained; a saved and loaded backbone gives the same
states. An adapter is merged into the weights when it is loaded, so that reading costs no more than
before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from treadle_core.compiled import has_bf16

from treadle_learned.reading import Read, cut, layers, new_cache
from treadle_learned.transcript import LearnedError

if TYPE_CHECKING:
    import peft
    from transformers import DynamicCache, PreTrainedModel

# peft and transformers take seconds to import, and a head for numbers alone needs neither: the
# functions that load, train or read a backbone import them.

DEFAULT = "Qwen/Qwen3-0.6B"
LOADING_ERRORS = (OSError, ValueError, KeyError)  # of transformers
# A tokenizer is identified by the ids that it makes of this.
PROBE = "The plan: 1. read the file; 2. run the tests.\n日本語 {x}"
CPU_INFO = Path("/proc/cpuinfo")
ADAPTER, WHOLE = "adapter", "backbone"  # folders of a checkpoint
RANK = 8
SCALE = 16  # of what the adapter adds: SCALE / RANK
# Padding may add at most this share to a run of several: a short reading does not wait for a whole
# window.
MOST_PADDING = 0.5


class Backbone:
    """Decoder with its tokenizer. device: cpu or cuda."""

    def __init__(self, name: str, tokenizer: Any, model: PreTrainedModel, device: str) -> None:
        self.name = name
        self.tokenizer = tokenizer
        torch.nn.Module.to(model, device)  # in place
        self.model = model.eval()
        self.device = device
        self.hidden_size = int(model.config.hidden_size)

    @classmethod
    def load(
        cls, name: str = DEFAULT, *, device: str | None = None, dtype: torch.dtype | None = None
    ) -> Backbone:
        """Load from a folder or by a hub name, on the GPU if there is one, in `fitting_dtype`.
        Raises LearnedError."""
        from transformers import AutoConfig, AutoModel, AutoTokenizer

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
            raise LearnedError(
                f"backbone: the tokenizer of {name!r} has {len(tokenizer)} tokens and the model "
                f"embeds {rows}: they are of different models"
            )
        return cls(name, tokenizer, model, device)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the architecture and the tokenizer, wherever they were found."""
        config = self.model.config
        shape = [config.model_type, config.hidden_size, config.num_hidden_layers, config.vocab_size]
        identity = json.dumps([shape, len(self.tokenizer), self.tokenize(PROBE)])
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens; none for no text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int], ends: Sequence[int]) -> Tensor:
        """Return the last hidden states, float32 [len(ends), hidden_size], after the first `end`
        ids for each of `ends`."""
        states = self.model(
            input_ids=torch.tensor([list(ids)], device=self.device)
        ).last_hidden_state[0]
        found: Tensor = states[torch.tensor(ends, device=self.device) - 1].float().cpu()
        return found

    @torch.inference_mode()
    def read_on(self, ids: Sequence[int], before: Read | None) -> tuple[Tensor, Read]:
        """Return the last hidden state, float32 [hidden_size], after all ids. The beginning that
        `before` has read is not read again; `before` cannot be used afterwards."""
        ids = tuple(ids)
        known = before.usable_for(ids) if before is not None else None
        done = len(known.ids) if known is not None else 0
        cache = known.cache if known is not None else new_cache()
        answer = self.model(
            input_ids=torch.tensor([ids[done:]], device=self.device),
            past_key_values=cache,
            use_cache=True,
        )
        return answer.last_hidden_state[0, -1].float().cpu(), Read(ids, answer.past_key_values)


class Tune(StrEnum):
    """Part of the backbone that is trained with the head."""

    FROZEN = "frozen"
    LORA = "lora"
    FULL = "full"


class Tunable:
    """Backbone in float32 with its trainable weights. It changes the backbone in place."""

    def __init__(self, backbone: Backbone, tune: Tune, seed: int = 0) -> None:
        if tune is Tune.FROZEN:
            raise ValueError("tune must be lora or full, is frozen")
        self.backbone = backbone
        self._adapter: peft.PeftModel | None = None
        if tune is Tune.LORA:
            import peft

            torch.manual_seed(seed)
            how = peft.LoraConfig(
                r=RANK,
                lora_alpha=SCALE,
                # attention's and the MLP's projections, whatever they are called
                target_modules="all-linear",
                task_type=peft.TaskType.FEATURE_EXTRACTION,
            )
            self._adapter = peft.get_peft_model(backbone.model, how)
        else:
            backbone.model.requires_grad_(True)
        self.trained = {
            name: each for name, each in backbone.model.named_parameters() if each.requires_grad
        }

    @property
    def is_adapter(self) -> bool:
        """Return whether small matrices beside the weights are trained (LoRA), not the weights
        themselves."""
        return self._adapter is not None

    def states(self, ids: tuple[int, ...], ends: list[int]) -> Tensor:
        """Return the same as `Backbone.hidden`, with gradients."""
        found = self.backbone.model(
            input_ids=torch.tensor([ids], device=self.backbone.device)
        ).last_hidden_state[0]
        last: Tensor = found[torch.tensor(ends, device=self.backbone.device) - 1].float().cpu()
        return last

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the trainable weights."""
        return {name: each.detach().cpu().clone() for name, each in self.trained.items()}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Set the trainable weights to a copy made by `weights`."""
        for name, each in self.trained.items():
            each.copy_(weights[name])

    def save(self, beside: Path) -> Path:
        """Write the trained part into a new folder in `beside`, and return that folder. Raises
        OSError."""
        if self._adapter is None:
            folder = beside / WHOLE
            self.backbone.model.save_pretrained(folder)
            self.backbone.tokenizer.save_pretrained(folder)
        else:
            folder = beside / ADAPTER
            self._adapter.save_pretrained(str(folder))
            (folder / "README.md").unlink(missing_ok=True)  # an empty form
        return folder


def load_tokenizer(name: str) -> Any:
    """Return a tokenizer alone, e.g. the policy's, from a folder or by a hub's name. Raises
    LearnedError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except LOADING_ERRORS as error:
        raise _not_loaded("tokenizer", name, error) from error


def _not_loaded(what: str, name: str, error: BaseException) -> LearnedError:
    where = "folder" if Path(name).exists() else "hub name"
    return LearnedError(
        f"{what}: {where} {name!r} cannot be loaded ({str(error).splitlines()[0]}); pass a folder "
        "with config.json, weights and tokenizer, or a name that this machine can fetch"
    )


def load_tuned(
    name: str, tuned: Path, *, device: str | None = None, dtype: torch.dtype | None = None
) -> Backbone:
    """Return the backbone `name` with what `Tunable.save` wrote to `tuned`. Raises LearnedError."""
    if tuned.name == WHOLE:
        return Backbone.load(str(tuned), device=device, dtype=dtype)
    import peft

    base = Backbone.load(name, device=device, dtype=torch.float32)
    try:
        merged = peft.PeftModel.from_pretrained(base.model, str(tuned)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise LearnedError(
            f"{tuned}: does not fit backbone {name!r} ({str(error).splitlines()[0]}); put back the "
            "backbone that it was trained on, or train again"
        ) from error
    return Backbone(
        name, base.tokenizer, merged.to(dtype or fitting_dtype(base.device)), base.device
    )


@cache
def fitting_dtype(device: str, cpu_info: Path = CPU_INFO) -> torch.dtype:
    """Return bf16 on a GPU and on a processor that reports it, else float32."""
    if device != "cpu":
        return torch.bfloat16
    try:
        return torch.bfloat16 if has_bf16(cpu_info.read_text()) else torch.float32
    except OSError:
        return torch.float32


def read_together(
    backbone: Backbone, asked: Sequence[tuple[Sequence[int], Read | None]]
) -> list[tuple[Tensor, Read]]:
    """Return the results of `Backbone.read_on` for several (ids, before): on a GPU eight in one run
    take as long as one. Those with much more to read than others get a run of their own."""
    before = [read.usable_for(tuple(ids)) if read is not None else None for ids, read in asked]
    more = [
        len(ids) - (len(read.ids) if read is not None else 0)
        for (ids, _), read in zip(asked, before, strict=True)
    ]
    found: dict[int, tuple[Tensor, Read]] = {}
    for run in runs(more):
        if len(run) == 1:
            found[run[0]] = backbone.read_on(asked[run[0]][0], before[run[0]])
        else:
            answers = _one_run(
                backbone, [tuple(asked[at][0]) for at in run], [before[at] for at in run]
            )
            found.update(zip(run, answers, strict=True))
    return [found[at] for at in range(len(asked))]


def runs(more: Sequence[int]) -> list[list[int]]:
    """Return the indexes of `more` (tokens to read), shortest first, in runs whose padding adds at
    most MOST_PADDING."""
    found: list[list[int]] = []
    tokens = 0
    for at in sorted(range(len(more)), key=more.__getitem__):
        padded = more[at] * (len(found[-1]) + 1) if found else 0
        if found and padded <= (1.0 + MOST_PADDING) * (tokens + more[at]):
            found[-1].append(at)
            tokens += more[at]
        else:
            found.append([at])
            tokens = more[at]
    return found


@torch.inference_mode()
def _one_run(
    backbone: Backbone, asked: Sequence[tuple[int, ...]], before: Sequence[Read | None]
) -> list[tuple[Tensor, Read]]:
    """Read several texts in one run, padded on both sides; padding is masked, and cut off again."""
    done = [len(read.ids) if read is not None else 0 for read in before]
    more = [ids[start:] for ids, start in zip(asked, done, strict=True)]
    most_done, most_more = max(done), max(map(len, more))
    ids = torch.zeros(len(asked), most_more, dtype=torch.long)
    mask = torch.zeros(len(asked), most_done + most_more, dtype=torch.long)
    positions = torch.zeros(len(asked), most_more, dtype=torch.long)
    for row, (start, new) in enumerate(zip(done, more, strict=True)):
        ids[row, : len(new)] = torch.tensor(new)
        mask[row, most_done - start : most_done + len(new)] = 1
        positions[row] = torch.arange(start, start + most_more)
    device = backbone.device
    answer = backbone.model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        past_key_values=_stacked(before, most_done),
        use_cache=True,
    )
    found = []
    for row, (start, new) in enumerate(zip(done, more, strict=True)):
        state: Tensor = answer.last_hidden_state[row, len(new) - 1].float().cpu()
        cache = cut(answer.past_key_values, row, most_done - start, most_done + len(new))
        found.append((state, Read(asked[row], cache)))
    return found


def _stacked(before: Sequence[Read | None], tokens: int) -> DynamicCache:
    """Return one cache of all readings, each aligned to the end of `tokens`."""
    stacked = new_cache()
    every = [layers(read.cache) if read is not None else None for read in before]
    some = next((own for own in every if own is not None), [])
    for number in range(len(some)):
        both: list[Tensor] = []
        for part in range(2):
            like = some[number][part]
            joined = like.new_zeros(len(before), like.shape[1], tokens, like.shape[3])
            for row, own in enumerate(every):
                if own is not None:
                    known = own[number][part]
                    joined[row, :, tokens - known.shape[2] :] = known[0]
            both.append(joined)
        stacked.update(both[0], both[1], number)
    return stacked
