"""Stand-in for TRL 1.16.0, after the wheel on PyPI. Its worker runs the loop in a thread of this
process, in place of a child process; a conversation is the tokens of its prompt, and ends when
`turns` turns are there."""

from __future__ import annotations

import asyncio
import queue
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

SOURCES = {
    "trl/experimental/async_grpo/async_rollout_worker.py": (
        *(
            "_AsyncRolloutLoop._run_loops",
            "_AsyncRolloutLoop._generate_one",
            "_AsyncRolloutLoop._generate_one_turn",
        ),
        *(
            "AsyncRolloutWorker.__init__",
            "AsyncRolloutWorker.update_model_version",
            "AsyncRolloutWorker.check_health",
        ),
    ),
    "trl/experimental/async_grpo/async_grpo_trainer.py": (
        *(
            "RolloutWorkerProtocol.start",
            "RolloutWorkerProtocol.stop",
            "RolloutWorkerProtocol.update_model_version",
        ),
        *("RolloutWorkerProtocol.check_health", "WeightTransferProtocol.init_weight_transfer"),
        *(
            "WeightTransferProtocol.pause",
            "WeightTransferProtocol.send_weights",
            "WeightTransferProtocol.resume",
        ),
        "WeightTransferProtocol.destroy",
    ),
}
FIELDS = {"trl/experimental/async_grpo/async_grpo_trainer.py": ("RolloutWorkerProtocol",)}


class RolloutWorkerProtocol:
    rollout_buffer: Any
    metrics_queue: Any

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


class WeightTransferProtocol:
    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


@dataclass(frozen=True)
class TurnRecord:
    prompt_ids: list[int]
    output_ids: list[int]
    output_log_probs: list[float]


class _AsyncRolloutLoop:
    turns = 2

    def __init__(
        self,
        *,
        max_tokens: int = 32,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        **others: Any,
    ) -> None:
        self.max_tokens, self.temperature, self.top_p = max_tokens, temperature, top_p
        self.top_k, self.min_p, self.repetition_penalty = top_k, min_p, repetition_penalty
        self.others = others
        self.conversations: list[list[TurnRecord]] = []

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        prompts = self.others["dataset"]
        self.conversations = list(
            await asyncio.gather(
                *(self._generate_one(prompt, {}, [], index) for index, prompt in enumerate(prompts))
            )
        )

    async def _generate_one(
        self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0
    ) -> Any:
        turns: list[TurnRecord] = []
        context = list(prompt)
        for _ in range(self.turns):
            tokens, logprobs = await self._generate_one_turn(context)
            turns.append(TurnRecord(context, tokens, logprobs))
            context = [*context, *tokens, 7, 8]
        return turns

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        raise AssertionError("the mesh takes its place")


class AsyncRolloutWorker:
    _loop_cls: type[_AsyncRolloutLoop] = _AsyncRolloutLoop

    def __init__(
        self, *, queue_maxsize: int = 0, child_ready_timeout: int = 300, **loop_kwargs: Any
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queue_maxsize)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.loop_kwargs, self.model_version = loop_kwargs, 0

    def make_loop(self) -> _AsyncRolloutLoop:
        """As the child process does."""
        return self._loop_cls(**self.loop_kwargs)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None: ...


def score_by_length(completions: list[Any], **_: Any) -> list[float]:
    """A reward function that a child process can import."""
    return [float(len(completion)) for completion in completions]


def config() -> SimpleNamespace:
    """What of AsyncGRPOConfig a worker is made of: two samples a device and step, four devices, two
    steps of staleness."""
    names = (
        *(
            "queue_maxsize",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "request_timeout",
        ),
        *(
            "chat_template_kwargs",
            "max_tool_calling_iterations",
            "log_completions",
            "num_completions_to_print",
        ),
        "fork_threshold_tokens",
    )
    own = {
        "num_generations": 8,
        "max_inflight_tasks": -1,
        "max_completion_length": 64,
        "max_staleness": 2,
    }
    steps = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "world_size": 4}
    return SimpleNamespace(**dict.fromkeys(names, 1), **own, **steps)


def contents() -> dict[str, dict[str, Any]]:
    """Name → what is in the module."""
    name = "trl.experimental.async_grpo"
    worker = {
        "AsyncRolloutWorker": AsyncRolloutWorker,
        "_AsyncRolloutLoop": _AsyncRolloutLoop,
        "is_vllm_available": lambda: False,
    }
    return {f"{name}.async_rollout_worker": worker}
