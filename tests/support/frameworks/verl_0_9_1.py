"""Stand-in for verl 0.9.1, after the wheel on PyPI. What its classes would do on Ray, they do in
this process."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from pydantic import BaseModel

# Where each name stands in the package.
SOURCES = {
    "verl/workers/rollout/llm_server.py": (
        *("LLMServerClient.__init__", "LLMServerClient.generate"),
        *("FullyAsyncLLMServerClient.__init__", "FullyAsyncLLMServerClient.generate"),
    ),
    "verl/workers/rollout/replica.py": (
        *("RolloutReplica.resume_generation", "RolloutReplica.sleep", "RolloutReplica.wake_up"),
        "RolloutReplicaRegistry.register",
    ),
    "verl/workers/rollout/sglang_rollout/async_sglang_server.py": (
        *(
            "SGLangReplica.__init__",
            "SGLangReplica.abort_all_requests",
            "SGLangReplica.resume_generation",
        ),
        *("SGLangHttpServer.set_global_steps", "SGLangHttpServer.get_server_address"),
        "SGLangHttpServer.launch_server",
    ),
    "verl/experimental/agent_loop/agent_loop.py": (
        *(
            "AgentLoopManager.__init__",
            "AgentLoopManager.create",
            "AgentLoopManager.generate_sequences",
        ),
        *("AgentLoopWorker.__init__", "AgentLoopWorker._run_agent_loop"),
    ),
    "verl/trainer/ppo/v1/agent_loop_tq.py": (
        "AgentLoopManagerTQ.__init__",
        "AgentLoopManagerTQ.generate_sequences",
    ),
}
FIELDS = {"verl/workers/rollout/replica.py": ("TokenOutput",)}


class TokenOutput(BaseModel):
    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = {}


def auto_await(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a coroutine where no loop runs, and hands it on where one does."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work) if inspect.iscoroutine(work) else work
        return work

    return wrapper


class LLMServerClient:
    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        self.config, self._load_balancer = config, load_balancer_handle

    async def generate(
        self,
        request_id: Any,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        raise AssertionError("the mesh takes its place")


class FullyAsyncLLMServerClient(LLMServerClient):
    def __init__(
        self,
        config: Any,
        load_balancer_handle: Any = None,
        only_hybrid: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        self._only_hybrid = only_hybrid

    async def generate(
        self,
        request_id: Any,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Goes on after an abort, from all tokens so far."""
        final, first_steps = TokenOutput(token_ids=[], log_probs=[], num_preempted=0), None
        limit = sampling_params["max_tokens"]
        while True:
            output = await super().generate(
                request_id=request_id,
                prompt_ids=prompt_ids + final.token_ids,
                sampling_params={**sampling_params, "max_tokens": limit - len(final.token_ids)},
                image_data=image_data,
                video_data=video_data,
                audio_data=audio_data,
                mm_processor_kwargs=mm_processor_kwargs,
                **kwargs,
            )
            final.token_ids += output.token_ids
            final.log_probs = [*(final.log_probs or ()), *(output.log_probs or ())]
            steps = output.extra_fields.get("global_steps")
            first_steps = steps if first_steps is None else first_steps
            final.stop_reason = output.stop_reason
            if len(final.token_ids) >= limit:
                final.stop_reason = "length"
            elif output.stop_reason in ("abort", "aborted"):
                await asyncio.sleep(0)
                continue
            final.extra_fields = {
                "global_steps": steps,
                "min_global_steps": first_steps,
                "max_global_steps": steps,
            }
            return final


class AgentLoopWorker:
    """Its agent loop is `loops[agent_name]`: (client, sampling parameters, the sample's fields) →
    its output."""

    loops: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:
        self.config, self.llm_client = config, llm_client

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        return await self.loops[agent_name](self.llm_client, sampling_params, **kwargs)

    async def generate_sequences(self, batch: list[dict[str, Any]]) -> list[Any]:
        return list(
            await asyncio.gather(
                *(self._run_agent_loop({"logprobs": True}, {}, **each) for each in batch)
            )
        )


class AgentLoopManager:
    def __init__(
        self,
        config: Any,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:
        self.config, self.llm_client = config, llm_client
        if not hasattr(self, "agent_loop_workers_class"):
            self.agent_loop_workers_class = remote(AgentLoopWorker)

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls(*args, **kwargs)
        worker = made.agent_loop_workers_class.__ray_metadata__.modified_class
        made.worker = worker(made.config, made.llm_client)  # type: ignore[attr-defined]
        return made

    @auto_await
    async def generate_sequences(self, prompts: Any) -> Any:
        return await self.worker.generate_sequences(prompts)  # type: ignore[attr-defined]


class AgentLoopManagerTQ(AgentLoopManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = remote(AgentLoopWorker)
        super().__init__(*args, **kwargs)

    def generate_sequences(self, prompts: Any) -> None:
        asyncio.run(self.worker.generate_sequences(prompts))  # type: ignore[attr-defined]


class RolloutReplica:
    """done: what was asked of the engine, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def wake_up(self) -> None:
        self.done.append("wake_up")

    async def sleep(self) -> None:
        self.done.append("sleep")

    async def resume_generation(self) -> None:
        self.done.append("resume_generation")


class TokenizerManager:
    """SGLang's, through which both verl's server and SGLang's HTTP give memory away and take it
    back."""

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None: ...

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None: ...


class SGLangHttpServer:
    """address: of the fake of SGLang that it would have launched."""

    address = ("127.0.0.1", 0)
    node_rank = 0

    async def launch_server(self, master_address: Any = None, master_port: Any = None) -> None:
        self.tokenizer_manager = TokenizerManager()

    async def sleep(self) -> None:
        await self.tokenizer_manager.release_memory_occupation(
            SimpleNamespace(tags=["kv_cache", "weights"]), None
        )

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    def get_server_address(self) -> tuple[str, int]:
        return self.address


class SGLangReplica(RolloutReplica):
    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        super().__init__()
        self.replica_rank, self.is_reward_model, self.is_teacher_model = (
            replica_rank,
            is_reward_model,
            is_teacher_model,
        )
        self.server_class = remote(SGLangHttpServer)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.done.append("abort_all_requests")

    async def resume_generation(self) -> None:
        await super().resume_generation()


class RolloutReplicaRegistry:
    _registry: ClassVar[dict[str, Callable[[], Any]]] = {}

    @classmethod
    def register(cls, name: str, loader: Callable[[], Any]) -> None:
        cls._registry[name] = loader

    @classmethod
    def get(cls, name: str) -> Any:
        return cls._registry[name]()


def remote(actor: type) -> Any:
    """ray.remote: as much of an actor class as tells which class it is of."""
    return SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=actor))


def contents() -> dict[str, dict[str, Any]]:
    """Name → what is in the module."""
    RolloutReplicaRegistry._registry = {"sglang": lambda: SGLangReplica}
    return {
        "ray": {"remote": remote},
        "verl.utils.ray_utils": {"auto_await": auto_await},
        "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
        "verl.workers.rollout.llm_server": {
            "LLMServerClient": LLMServerClient,
            "FullyAsyncLLMServerClient": FullyAsyncLLMServerClient,
        },
        "verl.workers.rollout.replica": {
            "TokenOutput": TokenOutput,
            "RolloutReplicaRegistry": RolloutReplicaRegistry,
        },
        "verl.experimental.agent_loop": {"AgentLoopManager": AgentLoopManager},
        "verl.trainer.ppo.v1": {"AgentLoopManagerTQ": AgentLoopManagerTQ},
    }


def config(*, in_queue: bool = False, **rollout: Any) -> Any:
    """What the adapter reads of a trainer's config."""
    own = {
        "name": "sglang",
        "response_length": 64,
        "prompt_length": 64,
        "max_model_len": None,
        **rollout,
    }
    return SimpleNamespace(
        transfer_queue=SimpleNamespace(enable=in_queue),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(**own)),
    )
