"""What happens before the clock of an arm starts, so that neither arm pays for being first.

Every engine generates a few tokens (the first batch of a fresh engine is slow), and every environment is opened and
closed once (the tools service imports its libraries at first use). None of it goes through the scheduler, so no
predictor learns from it.
"""

import asyncio
import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import grpc
from treadle import Prompt
from treadle.tools.v1 import tools_pb2, tools_pb2_grpc

from treadle_cli.engines import Engine
from treadle_cli.problems import UsageProblem

WARM_TOKENS = 8
WARM_BATCHES = (1, 4)  # both ends of the batch sizes that an arm starts with
ENGINE_TIMEOUT_S = 120.0
TOOLS_TIMEOUT_S = 120.0  # bounded by the imports of gymnasium and reasoning-gym beside two busy engines


async def warm_engines(engines: Sequence[Engine], token_ids: list[int]) -> None:
    """Generates WARM_TOKENS on each engine, alone and as a batch."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ENGINE_TIMEOUT_S), raise_for_status=True) as http:

        async def generate(engine: Engine, body: dict[str, Any]) -> None:
            async with http.post(f"{engine.url}/generate", json=body) as answer:
                await answer.read()

        for batch in WARM_BATCHES:
            body = {
                "input_ids": [token_ids] * batch,
                "sampling_params": {"max_new_tokens": WARM_TOKENS, "ignore_eos": True},
            }
            await asyncio.gather(*[generate(engine, body) for engine in engines])


async def warm_tools(address: str, prompts: Iterable[Prompt]) -> None:
    """Opens and closes one session of each environment. Raises UsageProblem where the sandbox is not available."""
    openings = {prompt.data.environment: prompt.data.arguments for prompt in prompts}
    async with grpc.aio.insecure_channel(address) as channel:
        tools = tools_pb2_grpc.ToolsServiceStub(channel)
        for name, arguments in openings.items():
            request = tools_pb2.OpenSessionRequest(
                request_id=uuid.uuid4().hex, tool=name, arguments_json=json.dumps(arguments)
            )
            try:
                opened = await tools.OpenSession(request, timeout=TOOLS_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise UsageProblem(f"the tools service cannot open {name}: {error.details()}") from error
            closing = tools_pb2.CloseSessionRequest(request_id=uuid.uuid4().hex, session_id=opened.session.session_id)
            await tools.CloseSession(closing, timeout=TOOLS_TIMEOUT_S)
