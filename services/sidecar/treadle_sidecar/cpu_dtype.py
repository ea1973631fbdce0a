"""In what numbers an engine on a CPU computes."""

from pathlib import Path

from treadle_core.processor import has_bf16

CPU_INFO = Path("/proc/cpuinfo")


def cpu_dtype(cpu_info: Path = CPU_INFO) -> str:
    """SGLang's name for them: auto, which is the model's own, where the processor has bf16, else float32."""
    try:
        return "auto" if has_bf16(cpu_info.read_text()) else "float32"
    except OSError:
        return "float32"
