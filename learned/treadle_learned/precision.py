"""In what numbers a backbone computes here."""

from functools import cache
from pathlib import Path

import torch
from treadle_core.processor import has_bf16

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
