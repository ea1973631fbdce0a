"""The two torchvision operators that its Python part names at import.

SGLang imports torchvision at start; a torchvision wheel built for CUDA cannot load its binary beside a CPU torch, and
then `import torchvision` fails over operators that no text model calls. Their schemas are enough.
"""

import torch

_definitions: list["torch.library.Library"] = []  # a Library that is collected takes its operators with it


def define_vision_operators() -> None:
    """Defines torchvision::nms and torchvision::qnms where they are missing. Calling it twice is fine."""
    missing = [name for name in ("nms", "qnms") if not _has_operator(name)]
    if not missing or _definitions:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _definitions.append(library)


def _has_operator(name: str) -> bool:
    return hasattr(torch.ops.torchvision, name)
