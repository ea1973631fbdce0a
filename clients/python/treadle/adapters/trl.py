"""Give TRL's asynchronous GRPO rollouts that are trajectories in the mesh, and send its weights to
the mesh's engines.

Pass `rollout_worker=RolloutWorker.of(...)` and `weight_transfer=WeightTransfer(...)` to
AsyncGRPOTrainer. TRL's own worker plays the conversations, in its child process; only its requests
go elsewhere. Set `token_budget` in the trainer's config: without it, the trainer requests it from a
vLLM server. Written against TRL 1.16.0, where both are experimental.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop

from treadle.adapters.calls import (
    address_of,
    call_mesh,
    leave,
    link_to,
    one_run,
    require_unset,
    sampling_of,
)

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
KEPT_VERSIONS = 2  # an engine may still load the one before


class RolloutLoop(_AsyncRolloutLoop):  # type: ignore[misc]
    """TRL's loop in the child process, with turns that are steps in the mesh. address: of the
    mesh."""

    def __init__(self, *, address: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.address = address

    async def _run_loops(self, stop_event: Any) -> None:
        try:
            await super()._run_loops(stop_event)
        finally:
            await leave()

    async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
        async with one_run(self.address):
            return await super()._generate_one(*args, **kwargs)

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        params = {name: getattr(self, name) for name in SAMPLED}
        link = await link_to(self.address)
        answer = await link.generate_whole(prompt_ids, sampling_of(params, self.max_tokens))
        return answer.token_ids, answer.logprobs


class RolloutWorker(AsyncRolloutWorker):  # type: ignore[misc]
    """TRL's own worker, a RolloutWorkerProtocol, with a RolloutLoop in its child process."""

    _loop_cls = RolloutLoop

    def __init__(self, *, address: str = "", **kwargs: Any) -> None:
        sampling_of({name: kwargs[name] for name in SAMPLED if name in kwargs}, 1)
        require_unset("the worker's arguments", lora_name=kwargs.get("lora_name"))
        # TRL's class refuses to be made where vLLM is not installed, which this one does not use.
        with patch.object(async_rollout_worker, "is_vllm_available", lambda: True):
            super().__init__(address=address_of(address), **kwargs)

    @classmethod
    def of(
        cls,
        args: Any,
        *,
        model_name: str,
        dataset: Any,
        reward_funcs: Sequence[Callable[..., Any]],
        processing_class: Any,
        eos_token_ids: Sequence[int] = (),
        address: str = "",
        **others: Any,
    ) -> RolloutWorker:
        """Make the worker as AsyncGRPOTrainer would make it from its config `args`. eos_token_ids:
        by default the tokenizer's. others: `tools`, `environment_factory`."""
        names = (
            *(
                "num_generations",
                "queue_maxsize",
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "repetition_penalty",
            ),
            *(
                "request_timeout",
                "chat_template_kwargs",
                "max_tool_calling_iterations",
                "log_completions",
            ),
            *("num_completions_to_print", "fork_threshold_tokens"),
        )
        inflight = args.max_inflight_tasks
        if inflight < 0:
            samples_a_step = (
                args.per_device_train_batch_size
                * args.gradient_accumulation_steps
                * args.world_size
            )
            inflight = max(args.max_staleness, 1) * samples_a_step
        return cls(
            address=address,
            model_name=model_name,
            dataset=dataset,
            reward_funcs=list(reward_funcs),
            processing_class=processing_class,
            eos_token_ids=list(eos_token_ids) or [processing_class.eos_token_id],
            max_inflight_tasks=inflight,
            max_tokens=args.max_completion_length,
            **{name: getattr(args, name) for name in names},
            **others,
        )


class WeightTransfer:
    """A WeightTransferProtocol that saves each version in a folder, from which all engines load it.

    folder: of this run alone, where trainer and engines can reach it. model_folder: of the model's
    own files: its config.json and tokenizer go with each version. Running steps wait, and resume
    under the new weights.
    """

    def __init__(self, folder: str | Path, model_folder: str | Path, address: str = "") -> None:
        self._folder, self._model_folder, self._address = (
            Path(folder),
            Path(model_folder),
            address_of(address),
        )
        self._run, self._sent, self._paused = uuid.uuid4().hex[:8], list[Path](), False

    def init_weight_transfer(self) -> None:
        """Prepare the folder. Raises OSError, ValueError for a model_folder without config.json."""
        if not (self._model_folder / "config.json").is_file():
            raise ValueError(f"model_folder: there is no config.json in {self._model_folder}")
        self._folder.mkdir(parents=True, exist_ok=True)

    def pause(self) -> None:
        """Stop the engines; steps keep their tokens."""
        self._paused = True
        call_mesh(self._address, lambda client: client.pause())

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Save the weights and have the engines load them. Raises RuntimeError that names the
        engines which could not."""
        from safetensors.torch import save_file

        number = len(self._sent) + 1
        version, path = f"{self._run}-{number}", self._folder / f"{self._run}-{number}"
        path.mkdir()
        self._sent.append(path)
        for file in self._model_folder.iterdir():
            if (
                file.is_file()
                and file.suffix not in (".safetensors", ".bin", ".pt")
                and "index" not in file.name
            ):
                shutil.copy(file, path)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in iterator}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        call_mesh(self._address, lambda client: client.update_weights(str(path), version))
        for old in self._sent[:-KEPT_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)

    def resume(self) -> None:
        """Resume the engines."""
        call_mesh(self._address, lambda client: client.resume())
        self._paused = False

    def destroy(self) -> None:
        """Resume the engines where training has ended in a pause, as others may use the mesh. The
        newest weights stay for engines that start again."""
        if self._paused:
            self.resume()
