"""What a processor says of itself.

Without instructions for bf16, which have to be emulated then, it takes five times as long and more with bf16 as with
float32: engines and learned models on a CPU ask here which to compute in.
"""

BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # the last is ARM's


def has_bf16(cpu_info: str) -> bool:
    """Whether the text of Linux's /proc/cpuinfo names instructions for bf16; False for no text."""
    lines = cpu_info.lower().splitlines()
    flags = {flag for line in lines if line.startswith(("flags", "features")) for flag in line.split()}
    return bool(flags & BF16_FLAGS)
