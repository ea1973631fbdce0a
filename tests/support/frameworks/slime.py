"""What slime sends, in its order. Its package does not install without CUDA, so its requests were
read from github.com/THUDM/slime:

- slime/rollout/sglang_rollout.py at 0044b40: a sample's generation, and the end of a rollout
- slime/backends/sglang_utils/server_control.py at 15b8e50: aborting each worker until it is idle
- slime/backends/sglang_utils/external.py at 130027a: what it asks of engines that it has not
  started
- slime/backends/sglang_utils/sglang_engine.py at 03b32d8: what it asks of each engine
- slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py at 02a644a: new
  weights
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

RETRY_S = 0.05  # 3 s in slime
ATTEMPTS = 100


@dataclass
class Sample:
    """A trajectory. left: tokens that it may still sample."""

    session_id: str
    tokens: list[int]
    left: int
    prompt_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[str] = field(default_factory=list)
    # of the last request, which slime does not keep
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def response(self) -> list[int]:
        """What follows the prompt."""
        return self.tokens[self.prompt_tokens :]


@dataclass
class Slime:
    """router: --sglang-router-ip and -port. engines: URLs of the engines that it updates, as
    --rollout-external-engine-addrs names them."""

    http: aiohttp.ClientSession
    router: str
    engines: Sequence[str]

    async def generate(self, sample: Sample) -> None:
        """One request, which goes on from the sample's tokens."""
        payload = {
            "sampling_params": {
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": sample.left,
                "stop": None,
                "stop_token_ids": None,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            },
            "return_logprob": True,
            "input_ids": sample.tokens,
        }
        headers = {"X-SMG-Routing-Key": sample.session_id}
        output = await self.post(f"{self.router}/generate", payload, headers=headers)
        entries = output["meta_info"]["output_token_logprobs"]
        sample.tokens = sample.tokens + [entry[1] for entry in entries]
        sample.logprobs += [entry[0] for entry in entries]
        sample.left -= len(entries)
        sample.weight_versions.append(output["meta_info"]["weight_version"])
        sample.spans = output["meta_info"]["weight_versions"]
        sample.finish = output["meta_info"]["finish_reason"]["type"]

    async def abort(self) -> None:
        """End what runs: each worker is aborted until it says that it is idle."""
        urls = [worker["url"] for worker in (await self.get(f"{self.router}/workers"))["workers"]]
        await asyncio.gather(*map(self._abort_until_idle, urls))

    async def discover(self) -> list[int]:
        """Accelerators of each engine."""
        found = [await self.get(f"{url}/server_info") for url in self.engines]
        return [
            int(info.get("num_gpus") or info["tp_size"] * (info.get("pp_size") or 1))
            for info in found
        ]

    async def connect(self, gpu_counts: Iterable[int]) -> None:
        """The group over which weights are broadcast; rank 0 is the trainer's."""
        counts, offset = list(gpu_counts), 1
        joins = []
        for url, count in zip(self.engines, counts, strict=True):
            body = {
                "master_address": "127.0.0.1",
                "master_port": 29_500,
                "rank_offset": offset,
                "world_size": sum(counts) + 1,
                "group_name": "slime-pp_0",
                "backend": "nccl",
            }
            joins.append(self.post(f"{url}/init_weights_update_group", body))
            offset += count
        await asyncio.gather(*joins)

    async def update_weights(self, version: int, buckets: Sequence[Sequence[str]]) -> None:
        """buckets: names of tensors."""
        await self._each("pause_generation", {})
        for url in self.engines:
            await self.get(f"{url}/flush_cache")
        for names in buckets:
            body = {
                "names": names,
                "dtypes": ["bfloat16"] * len(names),
                "shapes": [[2, 2]] * len(names),
                "group_name": "slime-pp_0",
                "flush_cache": False,
                "weight_version": str(version),
            }
            await self._each("update_weights_from_distributed", body)
        await self._each("continue_generation", {})

    async def lend_memory(self) -> None:
        """Give all memory to the trainer and take it back, in two stages."""
        await self._each("release_memory_occupation", {})
        await self._each("resume_memory_occupation", {"tags": ["weights"]})
        await self._each("resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})

    async def versions(self) -> list[str]:
        """That the engines say."""
        return [
            (await self.get(f"{url}/get_weight_version"))["weight_version"] for url in self.engines
        ]

    async def post(self, url: str, body: Any, **more: Any) -> Any:
        """JSON, or text. Raises where the status is no success."""
        async with self.http.post(url, json=body or {}, **more) as response:
            assert response.status < 400, (url, await response.text())
            return (
                await response.json()
                if response.content_type == "application/json"
                else await response.text()
            )

    async def get(self, url: str) -> Any:
        """JSON, or text. Raises where the status is no success."""
        async with self.http.get(url) as response:
            assert response.status < 400, (url, await response.text())
            return (
                await response.json()
                if response.content_type == "application/json"
                else await response.text()
            )

    async def _each(self, endpoint: str, body: Any) -> None:
        await asyncio.gather(*(self.post(f"{url}/{endpoint}", body) for url in self.engines))

    async def _abort_until_idle(self, url: str) -> None:
        for _ in range(ATTEMPTS):
            await self.post(f"{url}/abort_request", {"abort_all": True})
            answer = await self.get(f"{url}/v1/loads?include=core,disagg,queues")
            if not any(load.get("num_total_reqs") for load in answer["loads"]):
                return
            await asyncio.sleep(RETRY_S)
        raise AssertionError(f"{url} is not idle")
