"""What prime-rl's orchestrator sends to its inference servers. Its package is in no registry, so
its requests were read from github.com/PrimeIntellect-ai/prime-rl, src/prime_rl/utils/client.py at
005c286.
"""

from typing import Any

import aiohttp


class PrimeRl:
    """admin_url: ClientConfig.admin_base_url."""

    def __init__(self, http: aiohttp.ClientSession, admin_url: str) -> None:
        self._http, self._url = http, admin_url

    async def wait_for_ready(self, model_name: str) -> None:
        """Health, and the model's name among those that are served."""
        async with self._http.get(f"{self._url}/health") as response:
            response.raise_for_status()
        async with self._http.get(f"{self._url}/v1/models") as response:
            assert model_name in [model["id"] for model in (await response.json())["data"]]

    async def update_weights(self, weight_dir: str) -> None:
        """Pause with what runs kept, load, resume."""
        await self.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            await self.post("/update_weights", json={"weight_dir": weight_dir})
        finally:
            await self.post("/resume")

    async def init_broadcaster(self) -> None:
        """The group of its NCCL broadcast."""
        body = {
            "host": "127.0.0.1",
            "port": 29_501,
            "rank_offset": 0,
            "inference_world_size": 2,
            "timeout": 60,
            "quantize_in_weight_transfer": False,
        }
        await self.post("/init_broadcaster", json=body)

    async def post(self, path: str, **more: Any) -> None:
        """Raises where the status is no success."""
        async with self._http.post(f"{self._url}{path}", **more) as response:
            assert response.status < 400, (path, response.status, await response.text())
