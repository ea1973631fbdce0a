"""What the sidecar knows of its engine: read from SGLang's /server_info and /model_info, and from the model's own
files where they are here.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle_sidecar.engine_process import SPARE_REQUESTS

GIB = 1024**3
# SGLang keeps these below its context length (Scheduler: max_req_len, and num_reserved tokens of max_req_input_len).
INPUT_MARGIN_TOKENS = 4


@dataclass(frozen=True)
class EngineProfile:
    """One running engine. Sizes in tokens; `vocab_size` 0 and empty `end_token_ids` where they could not be learned."""

    model_path: str
    weight_version: str
    max_input_tokens: int
    max_sequence_tokens: int  # prompt and output together
    kv_tokens: int
    kv_bytes_per_token: int
    slots: int
    page_tokens: int
    tensor_parallel: int
    storage: bool  # HiCache with a storage backend: KV can move
    deterministic: bool  # honours seeds, and dies of min_p together with them
    vocab_size: int
    end_token_ids: frozenset[int]

    @property
    def storage_suffixes(self) -> tuple[str, ...]:
        """What HiCache's file backend appends to a page's key: for KV by rank, and for KV that ranks share (MLA)."""
        name = self.model_path.replace("/", "-")
        return (f"_{name}_0_{self.tensor_parallel}.bin", f"_{name}.bin")


def read_profile(server: Mapping[str, Any], model: Mapping[str, Any], vocab_size: int) -> EngineProfile:
    """From the two answers of the engine; `vocab_size` as the engine's own error message tells it, 0 where it does
    not.
    """
    state = (server.get("internal_states") or [{}])[0]
    memory = state.get("memory_usage") or {}
    kv_tokens = int(memory.get("token_capacity") or server.get("max_total_num_tokens") or 0)
    max_input = int(server.get("max_req_input_len") or 0)
    requests = int(state.get("effective_max_running_requests_per_dp") or server.get("max_running_requests") or 1)
    model_path = str(model["model_path"])
    configs = list(_model_files(model_path))
    return EngineProfile(
        model_path=model_path,
        weight_version=str(model["weight_version"]),
        max_input_tokens=max_input,
        max_sequence_tokens=max_input + INPUT_MARGIN_TOKENS,
        kv_tokens=kv_tokens,
        kv_bytes_per_token=round(float(memory.get("kvcache") or 0.0) * GIB / kv_tokens) if kv_tokens else 0,
        slots=max(requests - SPARE_REQUESTS, 1),
        page_tokens=int(server.get("page_size") or 1),
        tensor_parallel=int(server.get("tp_size") or 1),
        storage=bool(server.get("hicache_storage_backend")),
        deterministic=bool(server.get("enable_deterministic_inference")),
        vocab_size=vocab_size,
        end_token_ids=frozenset(token for config in configs for token in _end_tokens(config)),
    )


def _model_files(model_path: str) -> Iterator[dict[str, Any]]:
    """config.json and generation_config.json of a local model, or of a hub model in its cache beside the engine."""
    folder = Path(model_path)
    if not folder.is_dir():
        hub = Path.home() / ".cache" / "huggingface" / "hub" / f"models--{model_path.replace('/', '--')}" / "snapshots"
        folder = max(hub.glob("*"), default=folder)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.is_file():
            yield json.loads(file.read_text())


def _end_tokens(config: Mapping[str, Any]) -> list[int]:
    tokens = config.get("eos_token_id")
    if isinstance(tokens, int):
        return [tokens]
    return [int(token) for token in tokens or ()]
