"""Treadle's CPU platform for SGLang 0.5.23: the stock engine on a CPU, without the sgl_kernel build.

SGLang's own CPU platform needs compiled kernels. This one says that it has no capabilities at all, so that the engine
picks its torch-native paths: attention by torch's scaled dot product, eager compilation, native layers. HiCache and
seeds work after three changes (`hicache_transfers`, `page_hashes`, `seeded_noise`), made in `init_backend`, which
every worker calls once.

Seeds: SGLang honours `sampling_seed` only with --enable-deterministic-inference, which asks for a batch-invariant
attention backend and Triton kernels. torch-native attention works sequence by sequence, so it is named as one; the
kernels are left out, so logits may still differ in the last bit between batch sizes. The seed's noise depends on the
seed and the position alone: a step that is cut and resumed draws what it would have drawn.
"""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TreadleCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """CPU, out of tree: CpuDeviceMixin answers for the device, this class for the engine's choices."""

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

        from treadle_sidecar.sglang_cpu import hicache_transfers, page_hashes, seeded_noise

        hicache_transfers.install()
        page_hashes.install()
        seeded_noise.install()
        batch_invariant_ops.enable_batch_invariant_mode = lambda *_args, **_kwargs: None
