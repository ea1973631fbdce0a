"""Entry point of the group `sglang.srt.platforms`: offers Treadle's CPU platform to SGLang, only where it was asked
for.

Without TREADLE_SGLANG_CPU=1 this answers None and touches nothing, so that Treadle may be installed beside a SGLang
that runs on GPUs. Imports nothing but the standard library until then.
"""

import os

PLATFORM_CLASS = "treadle_sidecar.sglang_cpu.cpu_platform.TreadleCpuPlatform"


def activate() -> str | None:
    """The platform class's name for SGLang to load, or None where the plugin was not chosen."""
    if os.environ.get("TREADLE_SGLANG_CPU") != "1":
        return None
    from treadle_sidecar.sglang_cpu.vision_operators import define_vision_operators

    define_vision_operators()
    return PLATFORM_CLASS
