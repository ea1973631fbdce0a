"""SGLang's GPU memory over HTTP: released to the host and resumed (SGLang 0.5, `/release_memory_occupation` and
`/resume_memory_occupation`).

What SGLang leaves to its caller, and this module and `residents.py` see to: a release while anything runs, or a resume
of what is not released, ends the server's scheduler (an assertion, a KeyError). So the cache is flushed first, which is
refused while anything runs; and who asks knows the state. No endpoint tells it, but a server that was started anew can
be told from one that was not by how long its start took.
"""

import hashlib
import json
from typing import Any

import aiohttp
from treadle_runtime.errors import Unavailable

CONNECT_S = 2.0
ANSWER_S = 10.0  # of a question
IDLE_WAIT_S = 20.0  # for the last requests to end before a release
MEMORY_S = 120.0  # 140 GB over PCIe take seconds, a busy host some more
RETRY_S = 2.0


class EngineAway(Unavailable):
    """No server answers at this address."""


class EngineTrouble(Unavailable):
    """It answers, and does not do as it should; the message says what to do about it."""


class EngineMemory:
    """See the module. Owns the HTTP session."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession()

    async def close(self) -> None:
        """Breaks what is under way."""
        await self._session.close()

    async def identity(self, url: str) -> str:
        """Of this start of the server: another one after each. Raises EngineAway; EngineTrouble for one that would lose
        its weights.
        """
        info = json.loads(await self._ask("GET", url, "/server_info", ANSWER_S))
        saves = bool(info.get("enable_memory_saver"))
        if saves and not info.get("enable_weights_cpu_backup"):
            raise EngineTrouble(
                "ENGINE_LOSES_WEIGHTS",
                f"{url} would resume without its weights: start it with --enable-weights-cpu-backup",
                retry_after_s=RETRY_S,
            )
        start = [info.get("startup_time"), info.get("random_seed"), saves]
        return hashlib.blake2b(json.dumps(start, sort_keys=True).encode(), digest_size=8).hexdigest()

    async def release(self, url: str) -> None:
        """Returns once its GPU memory is free. Raises EngineAway, EngineTrouble where it does not become idle."""
        await self._ask("POST", url, f"/flush_cache?timeout={IDLE_WAIT_S:g}", IDLE_WAIT_S + ANSWER_S)
        await self._ask("POST", url, "/release_memory_occupation", MEMORY_S, {})

    async def resume(self, url: str) -> None:
        """Returns once it can be asked. It must have been released. Raises EngineAway, EngineTrouble."""
        await self._ask("POST", url, "/resume_memory_occupation", MEMORY_S, {})

    async def _ask(self, method: str, url: str, path: str, within_s: float, body: Any = None) -> str:
        timeout = aiohttp.ClientTimeout(total=within_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(method, url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status == 200:
                    return text
                said = " ".join(text.split())[:300]
                raise EngineTrouble(
                    "ENGINE_REFUSED", f"{url}{path} answered HTTP {response.status}: {said}", retry_after_s=RETRY_S
                )
        except TimeoutError as error:
            raise EngineTrouble(
                "ENGINE_SILENT", f"{url}{path} did not answer within {within_s:g} s", retry_after_s=RETRY_S
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineAway("ENGINE_AWAY", f"{url}{path} does not answer: {error!r}", retry_after_s=RETRY_S) from error
