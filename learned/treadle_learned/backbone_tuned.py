"""A backbone that is trained with the head: small matrices beside its projections (LoRA), or all of its weights.

Invariants: weights are float32 while they are trained; what was saved and loaded again gives the same states; an
adapter is merged into the weights when it is loaded, so that reading costs no more than before.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import peft
import torch
from safetensors import SafetensorError
from torch import Tensor

from treadle_learned.backbone import Backbone, fitting_dtype
from treadle_learned.errors import BackboneError

ADAPTER, WHOLE = "adapter", "backbone"  # folders of a checkpoint
RANK = 8
SCALE = 16  # of what the adapter adds: SCALE / RANK


class Tune(StrEnum):
    """What is trained beside the head."""

    FROZEN = "frozen"
    LORA = "lora"
    FULL = "full"


class Tunable:
    """A backbone, loaded in float32, and what of it is trained. Changes the backbone in place."""

    def __init__(self, backbone: Backbone, tune: Tune, seed: int = 0) -> None:
        if tune is Tune.FROZEN:
            raise ValueError("tune must be lora or full, is frozen")
        self.backbone = backbone
        self._adapter: peft.PeftModel | None = None
        if tune is Tune.LORA:
            torch.manual_seed(seed)
            how = peft.LoraConfig(
                r=RANK,
                lora_alpha=SCALE,
                target_modules="all-linear",  # attention's and the MLP's projections, whatever they are called
                task_type=peft.TaskType.FEATURE_EXTRACTION,
            )
            self._adapter = peft.get_peft_model(backbone.model, how)
        else:
            backbone.model.requires_grad_(True)
        self.trained = {name: each for name, each in backbone.model.named_parameters() if each.requires_grad}

    def states(self, ids: tuple[int, ...], ends: list[int]) -> Tensor:
        """As `Backbone.hidden`, with gradients."""
        found = self.backbone.model(input_ids=torch.tensor([ids], device=self.backbone.device)).last_hidden_state[0]
        last: Tensor = found[torch.tensor(ends, device=self.backbone.device) - 1].float().cpu()
        return last

    def weights(self) -> dict[str, Tensor]:
        """A copy of what is trained."""
        return {name: each.detach().cpu().clone() for name, each in self.trained.items()}

    @torch.no_grad()
    def put(self, weights: Mapping[str, Tensor]) -> None:
        """What `weights` gave."""
        for name, each in self.trained.items():
            each.copy_(weights[name])

    def save(self, beside: Path) -> Path:
        """Writes it into a folder of its own in `beside`, and returns that. Raises OSError."""
        if self._adapter is None:
            folder = beside / WHOLE
            self.backbone.model.save_pretrained(folder)
            self.backbone.tokenizer.save_pretrained(folder)
        else:
            folder = beside / ADAPTER
            self._adapter.save_pretrained(str(folder))
            (folder / "README.md").unlink(missing_ok=True)  # a form that nobody has filled in
        return folder


def load_tuned(name: str, tuned: Path, *, device: str | None = None, dtype: torch.dtype | None = None) -> Backbone:
    """The backbone `name` as `Tunable.save` left it in `tuned`. Raises BackboneError."""
    if tuned.name == WHOLE:
        return Backbone.load(str(tuned), device=device, dtype=dtype)
    base = Backbone.load(name, device=device, dtype=torch.float32)
    try:
        merged = peft.PeftModel.from_pretrained(base.model, str(tuned)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise BackboneError(
            f"{tuned}: does not fit backbone {name!r} ({str(error).splitlines()[0]}); put back the backbone that "
            "it was trained on, or train again"
        ) from error
    return Backbone(name, base.tokenizer, merged.to(dtype or fitting_dtype(base.device)), base.device)
