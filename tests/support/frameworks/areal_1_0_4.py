"""Stand-in for AReaL 1.0.4, after the wheel on PyPI. Its servers are a list of what they were
asked."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

SOURCES = {
    "areal/infra/remote_inf_engine.py": (
        *(
            "RemoteInfEngine.__init__",
            "RemoteInfEngine.agenerate",
            "RemoteInfEngine.pause_generation",
        ),
        *("RemoteInfEngine.continue_generation", "RemoteInfEngine.update_weights_from_distributed"),
        *("RemoteInfEngine.update_weights_from_disk", "RemoteInfEngine._resolve_workflow"),
        *("RemoteInfEngine._run_request_on_all_servers", "GroupedRolloutWorkflow.__init__"),
    ),
    "areal/engine/sglang_remote.py": (
        "RemoteSGLangEngine.__init__",
        "RemoteSGLangEngine.agenerate",
    ),
    "areal/api/workflow_api.py": ("RolloutWorkflow.arun_episode",),
    "areal/infra/workflow_executor.py": ("WorkflowExecutor.is_paused",),
}
FIELDS = {
    "areal/api/io_struct.py": ("ModelRequest", "ModelResponse", "HttpRequest", "WeightUpdateMeta"),
    "areal/api/cli_args.py": ("GenerationHyperparameters",),
}


@dataclass
class GenerationHyperparameters:
    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int = 32768
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = int(1e8)
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    frequency_penalty: float = 0.0
    lora_name: str = "default_lora"
    use_beam_search: bool = False


@dataclass
class ModelRequest:
    rid: str = ""
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    image_data: list[str] | None = field(default_factory=list)
    processor: Any = None
    vision_msg_vllm: list[Any] | None = None


@dataclass
class ModelResponse:
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"
    tokenizer: Any = None
    input_images: list[Any] = field(default_factory=list)
    processor: Any = None
    latency: float = float("inf")
    ttft: float = float("inf")
    itl: list[float] = field(default_factory=list)
    routed_experts: Any = None


@dataclass
class HttpRequest:
    endpoint: str
    payload: dict[str, Any]
    method: str = "POST"
    best_effort: bool = False


@dataclass
class WeightUpdateMeta:
    type: str
    path: str | None = None
    gen_allocation: Any = None
    nccl_master_address: str | None = None
    nccl_master_port: int | None = None
    nccl_group_name: str | None = None
    weight_chunked_mem_mb: int = 1024
    use_lora: bool = False
    lora_name: str = ""
    lora_int_id: int = 0
    base_model_name: str = ""
    peft_config: dict[str, Any] = field(default_factory=dict)
    lora_keep_versions: int = 0
    clear_checkpoint_after_load: bool = True
    version: int | None = None


class RolloutWorkflow:
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        raise NotImplementedError


class GroupedRolloutWorkflow(RolloutWorkflow):
    def __init__(self, workflow: RolloutWorkflow, group_size: int, logger: Any) -> None:
        self.workflow, self.group_size = workflow, group_size

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return await asyncio.gather(
            *(self.workflow.arun_episode(engine, data) for _ in range(self.group_size))
        )


class WorkflowExecutor:
    paused = False

    def is_paused(self) -> bool:
        return self.paused


class RemoteInfEngine:
    """asked: what its servers were asked, in order."""

    def __init__(self, config: Any, backend: Any) -> None:
        self.config, self.backend, self.logger = config, backend, None
        self.workflow_executor = WorkflowExecutor()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._version = 0

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        raise AssertionError("the mesh takes its place")

    def update_weights_from_distributed(
        self, meta: WeightUpdateMeta, param_specs: list[Any]
    ) -> Future[None]:
        self.asked.append(("/update_weights_from_distributed", {}))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> Future[None]:
        raise AssertionError("the mesh takes its place")

    def pause_generation(self) -> None:
        self.asked.append(("/pause_generation", {}))

    def continue_generation(self) -> None:
        self.asked.append(("/continue_generation", {}))

    def _run_request_on_all_servers(self, req: HttpRequest) -> None:
        self.asked.append((req.endpoint, req.payload))

    def _resolve_workflow(
        self,
        workflow: Any,
        workflow_kwargs: Any,
        group_size: int = 1,
        proxy_addr: str | None = None,
    ) -> RolloutWorkflow:
        assert group_size == 1, "the adapter makes the group"
        found: RolloutWorkflow = workflow
        return found


class RemoteSGLangEngine:
    def __init__(self, config: Any) -> None:
        self.config = config
        self._engine = RemoteInfEngine(config, None)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return await self._engine.agenerate(req)

    def pause_generation(self) -> None:
        self._engine.pause_generation()

    def continue_generation(self) -> None:
        self._engine.continue_generation()

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> Future[None]:
        return self._engine.update_weights_from_disk(meta)

    def set_version(self, version: int) -> None:
        self._engine.set_version(version)


def config() -> Any:
    """What the adapter reads of InferenceEngineConfig."""
    return SimpleNamespace(
        experiment_name="e", trial_name="t", return_routed_experts=False, use_lora=False
    )


def contents() -> dict[str, dict[str, Any]]:
    """Name → what is in the module."""
    executor = ThreadPoolExecutor(max_workers=1)
    return {
        "areal.api": {
            "ModelRequest": ModelRequest,
            "ModelResponse": ModelResponse,
            "RolloutWorkflow": RolloutWorkflow,
            "WeightUpdateMeta": WeightUpdateMeta,
            "WorkflowLike": Any,
        },
        "areal.api.cli_args": {"InferenceEngineConfig": Any},
        "areal.api.io_struct": {"HttpRequest": HttpRequest, "ParamSpec": Any},
        "areal.engine.sglang_remote": {
            "RemoteSGLangEngine": RemoteSGLangEngine,
            "SGLangBackend": object,
        },
        "areal.infra.remote_inf_engine": {
            "GroupedRolloutWorkflow": GroupedRolloutWorkflow,
            "RemoteInfBackendProtocol": Any,
            "RemoteInfEngine": RemoteInfEngine,
        },
        "areal.infra.utils.concurrent": {"get_executor": lambda: executor},
        "areal.trainer.rl_trainer": {"RemoteSGLangEngine": RemoteSGLangEngine},
        "areal.utils": {
            "name_resolve": SimpleNamespace(wait=lambda name, timeout: "0.0"),
            "names": SimpleNamespace(update_weights_from_disk=lambda *of: "/".join(map(str, of))),
        },
    }
