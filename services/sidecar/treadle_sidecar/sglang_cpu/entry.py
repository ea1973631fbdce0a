"""Offer Treadle's CPU platform to SGLang where it was chosen: the entry point of the group
`sglang.srt.platforms`.

Without TREADLE_SGLANG_CPU=1 `activate` returns None and changes nothing, so that Treadle may be
installed beside a SGLang that runs on GPUs. Until then only the standard library is imported.
"""

import os
from typing import Any

PLATFORM_CLASS = "treadle_sidecar.sglang_cpu.cpu_platform.TreadleCpuPlatform"

_definitions: list[Any] = []  # a torch Library that is garbage-collected removes its operators


def activate() -> str | None:
    """Return the name of the platform class for SGLang to load, or None where the plugin was not
    chosen."""
    if os.environ.get("TREADLE_SGLANG_CPU") != "1":
        return None
    define_vision_operators()
    return PLATFORM_CLASS


def define_vision_operators() -> None:
    """Define torchvision::nms and torchvision::qnms where torchvision's own binary does not.

    SGLang imports torchvision at start. A torchvision built for CUDA cannot load its binary beside
    a CPU torch, and then its import fails over these two operators, which no text model calls.
    Their schemas are enough. Where the binary can be loaded, it ends the process if they are
    defined already.
    """
    import torch

    if _definitions:
        return
    try:
        import torchvision  # noqa: F401 - whether it can be
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _definitions.append(library)
