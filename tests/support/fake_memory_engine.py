"""FakeMemoryEngine: an SGLang server as far as GPU memory and chat go, on GPUs that it shares with
others of its kind.

It is honest where it hurts: a release while it runs something, a resume of what is not released,
and a question while it is released each end it, as they end SGLang's scheduler; and no endpoint
says whether it is released.
"""

import asyncio
import itertools
from dataclasses import dataclass, field

from aiohttp import web
from support.conditions import SHUTDOWN_S
from support.processes import free_port

_STARTS = itertools.count()


@dataclass
class FakeGpu:
    """Memory that servers hold at a time must never be more than there is."""

    total_bytes: int
    held: dict[str, int] = field(default_factory=dict)
    most_bytes: int = 0

    def hold(self, name: str, count: int) -> None:
        """Note it, also where it does not fit."""
        self.held[name] = count
        self.most_bytes = max(self.most_bytes, sum(self.held.values()))


class FakeMemoryEngine:
    """One server. says: the score it gives. answer_s: how long it thinks. name: of the service, for
    the logs."""

    def __init__(
        self, name: str, gpus: list[FakeGpu], bytes_per_gpu: int, answer_s: float = 0.0
    ) -> None:
        self.name = name
        self.answer_s = answer_s
        self.may_change = asyncio.Event()  # a release or a resume that has begun waits for it
        self.may_change.set()
        self.log: list[str] = []
        self.died_of = ""
        self.saves_weights = True
        self.most_at_once = 0
        self._gpus, self._bytes = gpus, bytes_per_gpu
        self._running = 0
        self._released = False
        self._runner: web.AppRunner | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        """http://127.0.0.1:<port>"""
        return f"http://127.0.0.1:{self.port}"

    @property
    def released(self) -> bool:
        """Whether its memory is free: not yet while a release is under way."""
        return all(self.name not in gpu.held for gpu in self._gpus)

    async def start(self) -> None:
        """Takes its memory and listens; again after `stop` it is another start of the same
        server."""
        self._start = next(_STARTS)
        self._released = False
        for gpu in self._gpus:
            gpu.hold(self.name, self._bytes)
        app = web.Application()
        app.add_routes(
            [
                web.get("/server_info", self._info),
                web.post("/flush_cache", self._flush),
                web.post("/release_memory_occupation", self._release),
                web.post("/resume_memory_occupation", self._resume),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.log.append("start")

    async def stop(self) -> None:
        """As a killed process: its memory is free."""
        self.may_change.set()
        for gpu in self._gpus:
            gpu.held.pop(self.name, None)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _dies(self, of: str) -> web.Response:
        self.died_of = self.died_of or of
        return web.json_response({"error": {"message": f"the scheduler died: {of}"}}, status=500)

    async def _info(self, request: web.Request) -> web.Response:
        flags = {"enable_memory_saver": True, "enable_weights_cpu_backup": self.saves_weights}
        return web.json_response(
            {"startup_time": {"total": self._start}, "random_seed": 1, **flags}
        )

    async def _flush(self, request: web.Request) -> web.Response:
        ends_at = asyncio.get_running_loop().time() + float(request.query.get("timeout", "0"))
        while self._running:
            if asyncio.get_running_loop().time() > ends_at:
                return web.Response(status=400, text="Flush cache failed.")
            await asyncio.sleep(0.01)
        return web.Response(text="Cache flushed.")

    async def _release(self, request: web.Request) -> web.Response:
        await request.json()
        if self._running:
            return self._dies("release while it runs something")
        if self._released:
            return self._dies("released twice")
        self._released = True
        self.log.append("release")
        await self.may_change.wait()
        for gpu in self._gpus:
            gpu.held.pop(self.name, None)
        return web.Response()

    async def _resume(self, request: web.Request) -> web.Response:
        await request.json()
        if not self._released:
            return self._dies("resumed what is not released")
        for gpu in self._gpus:
            gpu.hold(self.name, self._bytes)
            if sum(gpu.held.values()) > gpu.total_bytes:
                return self._dies("out of GPU memory")
        self._released = False
        self.log.append("resume")
        await self.may_change.wait()
        return web.Response()

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self._released:
            return self._dies("asked while it is released")
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            await asyncio.sleep(self.answer_s)
        finally:
            self._running -= 1
        self.log.append("ask")
        text = f"{self.name} read {body['messages'][-1]['content']!r}. Score: 5"
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})
