"""Run verl's agent loops with turns that are steps of a trajectory in the mesh.

`agent_loop_manager_class=treadle.adapters.verl.AgentLoopManager` puts an LLMClient in the place of
verl's client, in the manager of whichever trainer runs, and ends a trajectory when its agent loop
ends. The engines stay verl's own; `verl_engines` reports to the mesh what the trainer does to them.
Written against verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from verl.utils.ray_utils import auto_await
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from treadle.adapters.calls import (
    address_of,
    limit_of,
    link_to,
    one_run,
    require_text,
    require_unset,
    sampling_of,
)
from treadle.adapters.verl_engines import HOLD, require_registered

# verl's keyword arguments that have no effect on text: the mesh ranks trajectories itself.
_WITHOUT_EFFECT = frozenset({"priority", "mm_processor_kwargs"})


class LLMClient(LLMServerClient):  # type: ignore[misc]
    """verl's client of its LLM servers, through the mesh. verl pickles it for agent loop workers,
    and it connects there."""

    def __init__(
        self, config: Any, load_balancer_handle: Any = None, *, address: str = "", **kwargs: Any
    ) -> None:
        _require_carried(config)
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        self.address = address_of(address)

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Generate one turn as verl's method does. extra_fields: global_steps of the last token,
        min_global_steps and max_global_steps, where the weights' versions are numbers. stop_reason:
        "abort" where the trainer has paused the mesh. Raises ValueError for inputs and parameters
        that the mesh does not carry, TreadleError."""
        more = {name: value for name, value in kwargs.items() if name not in _WITHOUT_EFFECT}
        require_text(image_data=image_data, video_data=video_data, audio_data=audio_data, **more)
        prompt = [int(token) for token in prompt_ids]
        limit = self._limit(len(prompt), sampling_params)
        sampling = sampling_of(sampling_params, max(limit, 1))
        wants_logprobs = bool(sampling_params.get("logprobs"))
        if limit <= 0:
            return TokenOutput(
                token_ids=[],
                log_probs=[] if wants_logprobs else None,
                stop_reason="length",
                num_preempted=0,
                extra_fields=_extra_fields([], cached_tokens=0),
            )
        link = await link_to(self.address)
        answer = await link.generate(prompt, sampling, str(request_id))
        return TokenOutput(
            token_ids=answer.token_ids,
            log_probs=answer.logprobs if wants_logprobs else None,
            stop_reason=answer.finish_reason,
            num_preempted=answer.preemptions,
            extra_fields=_extra_fields(answer.numbered_versions, answer.cached_tokens),
        )

    def _limit(self, prompt_tokens: int, params: Mapping[str, Any]) -> int:
        """Return the largest number of new tokens, by the rule of verl's servers. Raises ValueError
        for a prompt that is longer than the model's context, as they do."""
        rollout = self.config.actor_rollout_ref.rollout
        limit = limit_of(params)
        if limit is None:
            limit = min(
                rollout.response_length,
                rollout.prompt_length + rollout.response_length - prompt_tokens,
            )
        longest = getattr(rollout, "max_model_len", None)
        if not longest:
            return int(limit)
        if prompt_tokens >= int(longest):
            raise ValueError(
                f"prompt_ids: {prompt_tokens} tokens do not fit into rollout.max_model_len "
                f"({longest})"
            )
        return min(int(limit), int(longest) - prompt_tokens - 1)


class FullyAsyncLLMClient(FullyAsyncLLMServerClient, LLMClient):  # type: ignore[misc]
    """The client of verl's asynchronous trainers: verl's own loop continues the same trajectory
    after a pause."""


class AgentLoopManager:
    """The agent loop manager of the trainer that runs, with a client and workers that use the
    mesh."""

    @classmethod
    def create(cls, config: Any, llm_client: LLMServerClient, *args: Any, **kwargs: Any) -> Any:
        """Create verl's manager as its trainers do: outside of a running event loop. Raises
        ValueError for engines that are not SGLang's, RuntimeError where `verl_engines` was not
        loaded."""
        name = config.actor_rollout_ref.rollout.name
        if name != "sglang":
            raise ValueError(
                f"actor_rollout_ref.rollout.name must be sglang for the mesh, is {name}"
            )
        require_registered()
        manager = through_mesh(_manager_class(config))
        return manager.create(config, client_of(llm_client), *args, **kwargs)


def client_of(llm_client: LLMServerClient, address: str = "") -> LLMClient:
    """Return the client that takes the place of verl's."""
    config, balancer = llm_client.config, llm_client._load_balancer
    if isinstance(llm_client, FullyAsyncLLMServerClient):
        return FullyAsyncLLMClient(
            config, balancer, only_hybrid=llm_client._only_hybrid, address=address
        )
    return LLMClient(config, balancer, address=address)


def through_mesh(manager_class: Any) -> Any:
    """Return the manager class with workers that end a trajectory with its agent loop; it generates
    once the mesh is awake."""

    class Manager(manager_class):  # type: ignore[misc]
        agent_loop_workers_class: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.agent_loop_workers_class = ending_trajectories(self.agent_loop_workers_class)

    class OfThread(Manager):
        def generate_sequences(self, prompts: Any) -> Any:
            HOLD.end(self.llm_client.address)
            return super().generate_sequences(prompts)

    class OfLoop(Manager):
        @auto_await  # type: ignore[untyped-decorator]
        async def generate_sequences(self, prompts: Any) -> Any:
            await asyncio.to_thread(HOLD.end, self.llm_client.address)
            return await super().generate_sequences(prompts)

    own = inspect.unwrap(manager_class.generate_sequences)
    return OfLoop if inspect.iscoroutinefunction(own) else OfThread


def ending_trajectories(worker: Any) -> Any:
    """Return the actor class of an agent loop worker that ends each trajectory with its agent
    loop."""
    import ray

    class Worker(worker.__ray_metadata__.modified_class):  # type: ignore[misc]
        async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
            async with one_run(self.llm_client.address):
                return await super()._run_agent_loop(*args, **kwargs)

    return ray.remote(Worker)


def _require_carried(config: Any) -> None:
    """Raise ValueError that names a setting by which verl's servers would sample or answer
    otherwise than the mesh does."""
    rollout = config.actor_rollout_ref.rollout
    model = getattr(config.actor_rollout_ref, "model", None)
    lora = getattr(model, "lora", None) or {}
    rank = getattr(model, "lora_rank", None) or lora.get("rank")
    disaggregation = getattr(rollout, "disaggregation", None)
    refused = {
        "rollout.enable_rollout_routing_replay": getattr(
            rollout, "enable_rollout_routing_replay", None
        ),
        "model.lora_rank": None if lora.get("merge") else rank,
        "rollout.disaggregation.enabled": getattr(disaggregation, "enabled", None),
    }
    require_unset("actor_rollout_ref", **{name: value or None for name, value in refused.items()})


def _manager_class(config: Any) -> Any:
    if config.transfer_queue.enable:  # the trainer takes what workers put there
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        return AgentLoopManagerTQ
    from verl.experimental.agent_loop import AgentLoopManager as OfV0

    return OfV0


def _extra_fields(versions: list[int], cached_tokens: int) -> dict[str, Any]:
    found = (versions[-1], min(versions), max(versions)) if versions else (None, None, None)
    fields = dict(zip(("global_steps", "min_global_steps", "max_global_steps"), found, strict=True))
    return {**fields, "num_cached_tokens": cached_tokens}
