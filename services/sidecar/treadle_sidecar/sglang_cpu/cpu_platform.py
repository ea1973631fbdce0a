"""Run the stock SGLang 0.5.23 engine on a CPU, without the sgl_kernel build.

SGLang's own CPU platform needs compiled kernels. This one declares no capabilities, so that the engine picks its
torch-native paths: attention by torch's scaled dot product, eager compilation, native layers. HiCache and seeds work
after three replacements, made in `init_backend`, which every worker calls once (`replacements`).

SGLang honours `sampling_seed` only with --enable-deterministic-inference, which requires a batch-invariant attention
backend and Triton kernels. torch-native attention works sequence by sequence, so it is registered as one; the kernels
are left out, so logits may still differ in the last bit between batch sizes. The seed's noise depends on the seed and
the position alone: a step that is preempted and resumed draws what it would have drawn.
"""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from treadle_sidecar.sglang_cpu import replacements


class TreadleCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """CpuDeviceMixin describes the device; this class makes the engine's choices."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.arg_groups import choices

        choices.add_deterministic_attention_backend_choices(["torch_native"])
        choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])

    def init_backend(self) -> None:
        from sglang.srt import batch_invariant_ops

        replacements.install_transfers()
        replacements.install_page_hashes()
        replacements.install_seeded_noise()
        batch_invariant_ops.enable_batch_invariant_mode = lambda *_args, **_kwargs: None
