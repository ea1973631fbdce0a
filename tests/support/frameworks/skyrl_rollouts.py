"""Turns by SkyRL's own client, RemoteInferenceClient: `python skyrl_rollouts.py FOLDER`, options on
stdin, answer on stdout, as JSON.

options: url, model, prompts, sessions, sampling, turns, observation. It knows no tokenizer, so
texts come by HTTP.
"""

import asyncio
import json
import sys
import types
from pathlib import Path
from typing import Any

# skyrl/backends/__init__.py imports what needs Python 3.12; its client does not need it.
backends = types.ModuleType("skyrl.backends")
backends.__path__ = [str(Path(sys.argv[1]) / "skyrl/backends")]
sys.modules["skyrl.backends"] = backends


async def roll_out(options: dict[str, Any]) -> dict[str, Any]:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
        RemoteInferenceClient,
    )

    url = options["url"]
    contexts = [list(prompt) for prompt in options["prompts"]]
    turns = []
    # As build_new_inference_client makes it where external_proxy_url alone is set.
    async with RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=options["model"]
    ) as client:
        world_size = await client.get_world_size()
        for _ in range(options["turns"]):
            batch = {
                "prompt_token_ids": contexts,
                "sampling_params": options["sampling"],
                "session_ids": options["sessions"],
                "cache_salt": "7",
            }
            output = await client.generate(batch)
            turns.append({"contexts": [list(context) for context in contexts], **output})
            for context, ids in zip(contexts, output["response_ids"], strict=True):
                context += [*ids, *options["observation"]]
        await client.pause_generation()
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.resume_generation()
        for session in options["sessions"]:
            await client.finish_session(session)
        try:
            await client.start_weight_update()
            refusal = ""
        except Exception as error:  # noqa: BLE001 - the test looks at what it says
            refusal = str(error)
    return {"turns": turns, "world_size": world_size, "refusal": refusal}


print(json.dumps(asyncio.run(roll_out(json.load(sys.stdin)))))
