"""In what numbers a backbone computes here: bf16 halves what is read from memory, but a processor without instructions
for it takes five to twenty times as long as with float32."""

from functools import cache
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # the last is ARM's


@cache
def fitting_dtype(device: str, cpu_info: Path = CPU_INFO) -> torch.dtype:
    """bf16 on a GPU and on a processor that says it has it, else float32. Not tried: on a busy machine a trial errs."""
    if device != "cpu":
        return torch.bfloat16
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return torch.float32
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}
    return torch.bfloat16 if flags & BF16_FLAGS else torch.float32
