"""Give AReaL an inference engine whose requests are steps of trajectories in the mesh.

`use(address)` has AReaL's trainer make a MeshEngine where it would make its RemoteSGLangEngine. The
engines stay AReaL's own; its pauses and weights go through the mesh, so that a request that an
update interrupts continues where it was, and `output_versions` has the version that sampled each
token. Written against AReaL 1.0.4.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from areal.api import ModelRequest, ModelResponse, RolloutWorkflow, WeightUpdateMeta, WorkflowLike
from areal.api.cli_args import InferenceEngineConfig
from areal.api.io_struct import HttpRequest, ParamSpec
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.infra.remote_inf_engine import (
    GroupedRolloutWorkflow,
    RemoteInfBackendProtocol,
    RemoteInfEngine,
)
from areal.infra.utils.concurrent import get_executor
from areal.utils import name_resolve, names

from treadle.adapters.calls import (
    address_of,
    call_mesh,
    link_to,
    one_run,
    require_text,
    require_unset,
    sampling_of,
)

PAUSED_S = 0.5  # between two checks whether rollouts may resume; AReaL's own value
SAVE_S = 120.0  # longest wait for a checkpoint; AReaL's own value


def use(address: str = "") -> None:
    """Have AReaL's trainer reach its engines through the mesh at `address`, here and in the
    processes that it starts. Call it before the trainer is made."""
    from areal.trainer import rl_trainer

    os.environ["TREADLE_ADDRESS"] = address_of(address)
    rl_trainer.RemoteSGLangEngine = MeshEngine


class MeshEngine(RemoteSGLangEngine):  # type: ignore[misc]
    """AReaL's engine for SGLang servers, which reaches them through the mesh that TREADLE_ADDRESS
    names."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        super().__init__(config)
        self._engine = MeshClient(config, SGLangBackend())


class MeshClient(RemoteInfEngine):  # type: ignore[misc]
    """AReaL's client of its servers, which workflows call and whose requests go through the
    mesh."""

    def __init__(self, config: InferenceEngineConfig, backend: RemoteInfBackendProtocol) -> None:
        super().__init__(config, backend)
        self.address = address_of()
        self._taken: int | None = (
            None  # version of the weights that the engines have loaded and not yet named
        )
        self._loaded_path = ""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generate one response as AReaL's method does: return once the request is complete,
        whatever pauses and updates come in between.

        output_versions: of each token, the weights that sampled it; where the engines do not name
        theirs by numbers, the version at the beginning. Raises ValueError and RuntimeError as
        AReaL's method, and TreadleError.
        """
        gconfig = req.gconfig
        if gconfig.n_samples != 1:
            raise ValueError("n_samples must be 1: call agenerate once for each sample")
        for where, experts in (
            ("the engine's config", self.config.return_routed_experts),
            ("the request's metadata", req.metadata.get("return_routed_experts")),
        ):
            require_unset(where, return_routed_experts=experts or None)
        require_unset("the engine's config", use_lora=self.config.use_lora or None)
        require_text(image_data=req.image_data, vision_msg_vllm=req.vision_msg_vllm)
        limit = min(gconfig.max_tokens - len(req.input_ids), gconfig.max_new_tokens)
        if limit <= 0:
            raise RuntimeError(
                f"max_new_tokens ({limit}) is not positive: max_tokens={gconfig.max_tokens}, "
                f"prompt_len={len(req.input_ids)}, max_new_tokens={gconfig.max_new_tokens}"
            )
        prompt, params = [int(token) for token in req.input_ids], _parameters(gconfig)
        tokens, logprobs, versions = list[int](), list[float](), list[int]()
        began_s, first_s, reason = time.perf_counter(), 0.0, "abort"
        link = await link_to(self.address)
        while reason == "abort" and len(tokens) < limit:
            while self.workflow_executor.is_paused():  # noqa: ASYNC110 - AReaL has no event for it
                await asyncio.sleep(PAUSED_S)
            version = self.get_version()
            answer = await link.generate(prompt + tokens, sampling_of(params, limit - len(tokens)))
            first_s = first_s or answer.queue_s + answer.prefill_s
            tokens += answer.token_ids
            logprobs += answer.logprobs
            versions += answer.versions(otherwise=version)
            reason = answer.finish_reason
        return ModelResponse(
            input_tokens=prompt,
            input_images=req.image_data,
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason="length" if reason == "abort" else reason,
            latency=time.perf_counter() - began_s,
            ttft=first_s,
            tokenizer=req.tokenizer,
            processor=req.processor,
        )

    def pause_generation(self) -> None:
        """Stop the mesh and then the engines; requests wait, and keep their tokens."""
        call_mesh(self.address, lambda client: client.pause())
        super().pause_generation()

    def continue_generation(self) -> None:
        """Resume the engines and the mesh, under the name of the weights that the engines have
        loaded meanwhile."""
        if self._taken is not None:
            name = {"new_version": str(self._taken), "abort_all_requests": False}
            self._run_request_on_all_servers(
                HttpRequest(endpoint="/update_weight_version", payload=name)
            )
            self._taken = None
        super().continue_generation()
        call_mesh(self.address, lambda client: client.resume())

    def update_weights_from_distributed(
        self, meta: WeightUpdateMeta, param_specs: list[ParamSpec]
    ) -> Future[None]:
        """Broadcast weights to AReaL's servers as its method does; the version is named when
        generation resumes."""
        self._taken = self._version_of(meta)
        return super().update_weights_from_distributed(  # type: ignore[no-any-return]
            meta, param_specs
        )

    def update_weights_from_disk(self, meta: WeightUpdateMeta) -> Future[None]:
        """Have all engines of the mesh load a checkpoint once it is saved; engines that join later
        load it too. With clear_checkpoint_after_load, its folder is removed when the next
        checkpoint is loaded."""
        require_unset("the update of weights", use_lora=meta.use_lora or None)
        return get_executor().submit(self._load, meta)  # type: ignore[no-any-return]

    def _load(self, meta: WeightUpdateMeta) -> None:
        config = self.config
        saved = names.update_weights_from_disk(
            config.experiment_name, config.trial_name, self.get_version()
        )
        name_resolve.wait(saved, timeout=SAVE_S)
        path, version = str(meta.path), str(self._version_of(meta))
        call_mesh(self.address, lambda client: client.update_weights(path, version))
        before, self._loaded_path = self._loaded_path, path
        if meta.clear_checkpoint_after_load and before and before != path:
            shutil.rmtree(before, ignore_errors=True)

    def _version_of(self, meta: WeightUpdateMeta) -> int:
        return int(meta.version if meta.version is not None else self.get_version() + 1)

    def _resolve_workflow(
        self,
        workflow: WorkflowLike | None,
        workflow_kwargs: dict[str, Any] | None,
        group_size: int = 1,
        proxy_addr: str | None = None,
    ) -> RolloutWorkflow:
        """Resolve a workflow as AReaL's method does, and end an episode's trajectories with the
        episode."""
        run = _Run(
            super()._resolve_workflow(workflow, workflow_kwargs, 1, proxy_addr), self.address
        )
        return GroupedRolloutWorkflow(run, group_size, self.logger) if group_size > 1 else run


class _Run(RolloutWorkflow):  # type: ignore[misc]
    """A workflow of which each episode is one run in the mesh."""

    def __init__(self, workflow: RolloutWorkflow, address: str) -> None:
        self._workflow, self._address = workflow, address

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        async with one_run(self._address):
            return await self._workflow.arun_episode(engine, data)


# Fields that are read elsewhere, or mean nothing without LoRA
_NO_PARAMETERS = frozenset({"n_samples", "max_tokens", "greedy", "lora_name"})


def _parameters(gconfig: Any) -> Mapping[str, Any]:
    """Return all sampling parameters of AReaL; of those that the mesh does not carry, `sampling_of`
    names the one that is set."""
    found = {name: value for name, value in vars(gconfig).items() if name not in _NO_PARAMETERS}
    return {**found, "temperature": 0.0} if gconfig.greedy else found
