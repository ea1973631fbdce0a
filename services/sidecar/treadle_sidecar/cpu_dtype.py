"""In what numbers an engine on a CPU computes: a processor without instructions for bf16 takes five to twenty times as
long with it as with float32."""

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # the last is ARM's


def cpu_dtype(cpu_info: Path = CPU_INFO) -> str:
    """SGLang's name for them: auto, which is the model's own, where the processor says that it has bf16."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return "float32"
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}
    return "auto" if flags & BF16_FLAGS else "float32"
