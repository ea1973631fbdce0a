"""Requests of a gateway that are too large in every way, many at once, beside an honest caller.

Whatever is sent: the process lives within the memory that docs/front-door.md states, and the caller
gets its tokens. With `-s` the test says how much later they come.
"""

import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from support.fake_chat import teach_chat, write_tokenizer
from support.fake_sglang import expected
from support.gateway import MODEL, FrontDoor, ask, front_door

pytestmark = pytest.mark.timeout(0)

HOW_MANY = pytest.mark.parametrize("count", [24, pytest.param(2_000, marks=pytest.mark.full)])
AT_ONCE = 32
ALONE = 8  # requests of the honest caller before the others begin
HELD_BYTES, IDLE_TOKENS = 256 * 2**20, 1_000_000
# As docs/front-door.md states it: what requests hold, 40 bytes for each idle token, and the rest.
MOST_BYTES = HELD_BYTES + 40 * IDLE_TOKENS + 1536 * 2**20
KEEP_S = 1.0  # for which what is half sent stays open
MIB = 2**20


@dataclass
class Attacker:
    """Sends requests of all kinds of sizes. seen: statuses; 0: the connection was ended."""

    port: int
    rng: random.Random
    seen: Counter[int] = field(default_factory=Counter)

    async def send(self) -> None:
        """One request, of one kind."""
        kind = self.rng.choice(
            [
                *(self.copies, self.announced, self.endless, self.numbers, self.objects),
                *(self.wide, self.deep, self.head, self.half_heads, self.half_body, self.pipelined),
                *(self.lists, self.names, self.text, self.response, self.session, self.unread),
            ]
        )
        await kind()

    async def post(self, path: str, body: object) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.talk(head(path, f"Content-Length: {len(raw)}\r\n") + raw)

    async def talk(self, *pieces: bytes, keep_s: float = 30.0, reads: bool = True) -> None:
        """Send these bytes and read the answer for at most so long."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(keep_s):
                with contextlib.suppress(ConnectionError):
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                if not reads:
                    await asyncio.sleep(keep_s)
                line = await reader.readline()
                self.seen[int(line.split()[1]) if line else 0] += 1
                while await reader.read(MIB):
                    pass
        except (TimeoutError, ConnectionError):
            self.seen[0] += 1
        finally:
            writer.transport.abort()

    async def copies(self) -> None:
        prompts, copies = self.rng.choice(
            [(24, 1024), (300, 1024), (1, 1024), (64, 16), (4_000, 1)]
        )
        sampling = {"n": copies, "max_new_tokens": 1}
        prompt = [self.rng.randrange(10, 40) for _ in range(self.rng.choice([1, 50]))]
        body = {"input_ids": [prompt] * prompts, "sampling_params": sampling}
        await self.post("/generate", body | {"stream": self.rng.random() < 0.5})

    async def announced(self) -> None:
        await self.talk(head("/generate", "Content-Length: 8000000000\r\n"), b" " * MIB)

    async def endless(self) -> None:
        piece = b"10000\r\n" + b"1," * 0x8000 + b"\r\n"
        first = head("/generate", "Transfer-Encoding: chunked\r\n")
        await self.talk(first, *[piece] * self.rng.choice([10, 400]))

    async def numbers(self) -> None:
        ids = b"10000," * (self.rng.choice([1, 8, 15]) * MIB // 6)
        await self.post("/generate", b'{"input_ids": [' + ids + b"1]}")

    async def objects(self) -> None:
        item = self.rng.choice([b"{},", b"[],", b'{"a":1},', b'"a",', b"1.5,"])
        await self.post("/generate", b'{"nvext": {"a": [' + item * (8 * MIB // len(item)) + b"1]}}")

    async def wide(self) -> None:
        text = ("a" * 8 * MIB + "\U0001f600").encode()
        await self.post("/v1/completions", b'{"prompt": "' + text + b'"}')

    async def deep(self) -> None:
        mark = self.rng.choice([b"[", b'{"a":'])
        await self.post("/generate", mark * self.rng.choice([150, 200_000]))

    async def head(self) -> None:
        way = self.rng.choice([b"GET /%b HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nA: %b\r\n\r\n"])
        await self.talk(way % (b"a" * self.rng.choice([40_000, 3_000_000])))

    async def half_heads(self) -> None:
        half = head("/generate", "A: ")[:-2]
        talks = [self.talk(half, keep_s=KEEP_S) for _ in range(self.rng.choice([1, 1, 1, 400]))]
        await asyncio.gather(*talks)

    async def half_body(self) -> None:
        first = head("/generate", "Content-Length: 16000000\r\n")
        await self.talk(first, b"[" + b"1," * (2 * MIB), keep_s=KEEP_S)

    async def pipelined(self) -> None:
        one = head("/generate", "Content-Length: 2\r\n", ends="") + b"{}"
        await self.talk(one, keep_s=KEEP_S)
        await self.talk(one * 3_000, keep_s=KEEP_S)

    async def lists(self) -> None:
        values: list[tuple[str, Any]] = [
            ("stop", ["a" * 1000] * 1000),
            ("stop", "a" * 4 * MIB),
            ("stop_token_ids", [1] * 500_000),
            ("logit_bias", {str(at): 0.5 for at in range(200_000)}),
            ("stop_regex", "(a|b)*" * 50_000),
            ("stop_token_ids", ["a"] * 500_000),
            ("logit_bias", {f"a{at}": 0.5 for at in range(200_000)}),
            ("a" * MIB, 1),
            ("temperature", [1] * 500_000),
        ]
        name, value = self.rng.choice(values)
        await self.post("/generate", ask(sampling_params={name: value, "max_new_tokens": 1}))

    async def names(self) -> None:
        name = "s" * self.rng.choice([1_000, 1_000_000])
        field = self.rng.choice(["rid", "session_id", "model", "cache_salt"])
        await self.post(
            "/generate", ask() | {field: name, "sampling_params": {"max_new_tokens": 1}}
        )

    async def text(self) -> None:
        text = "a b " * self.rng.choice([1_000, 4 * MIB - 100])
        await self.post("/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 1})

    async def response(self) -> None:
        said = "a" * self.rng.choice([1_000, 100_000])  # which a fake engine reads slowly
        body = {"model": MODEL, "instructions": said, "input": "a", "max_output_tokens": 1}
        await self.post("/v1/responses", body)

    async def session(self) -> None:
        prompt = [self.rng.randrange(10, 40) for _ in range(self.rng.choice([100, 20_000]))]
        name = f"s{self.rng.random()}"
        await self.post(
            "/generate", ask(prompt, session_id=name, sampling_params={"max_new_tokens": 1})
        )

    async def unread(self) -> None:
        body = json.dumps(ask(stream=True, sampling_params={"n": 64, "max_new_tokens": 50}))
        raw = head("/generate", f"Content-Length: {len(body)}\r\n") + body.encode()
        await self.talk(raw, keep_s=KEEP_S, reads=False)


def head(path: str, more: str, *, ends: str = "Connection: close\r\n") -> bytes:
    """Of a POST of JSON, with more headers. ends: whether the answer is the last of its
    connection."""
    kind = "Content-Type: application/json\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{kind}{ends}{more}\r\n".encode()


async def attack(port: int, count: int) -> Counter[int]:
    """Send so many requests, and return the statuses of their answers."""
    attacker, left = Attacker(port, random.Random(0)), iter(range(count))

    async def send_some() -> None:
        for _ in left:
            await attacker.send()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(send_some())
    return attacker.seen


@pytest.fixture
async def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontDoor]:
    """With a gateway that is a process of its own."""
    monkeypatch.setenv("TREADLE_GATEWAY_HELD_BYTES", str(HELD_BYTES))
    monkeypatch.setenv("TREADLE_GATEWAY_IDLE_TOKENS", str(IDLE_TOKENS))
    folder = write_tokenizer(tmp_path / "model")
    async with front_door(tmp_path, token_s=0.005, teach=teach_chat, tokenizer=str(folder)) as door:
        door.url = await door.plane.start_gateway(str(folder))
        await door.until_mesh("there")
        yield door


@HOW_MANY
async def test_no_size_harms_a_gateway_or_its_honest_callers(door: FrontDoor, count: int) -> None:
    process = psutil.Process(door.plane.child("gateway").pid)
    peak_bytes, alone_s, beside_s = 0, list[float](), list[float]()

    async def measure() -> None:
        nonlocal peak_bytes
        while True:
            peak_bytes = max(peak_bytes, process.memory_info().rss)
            await asyncio.sleep(0.02)

    async def call(taken_s: list[float], going_on: Callable[[], bool]) -> None:
        async with aiohttp.ClientSession() as http:
            while going_on():
                began_s = time.monotonic()
                prompt = [5, *(random.randrange(10, 40) for _ in range(20))]
                async with http.post(f"{door.url}/generate", json=ask(prompt)) as response:
                    answer = await response.json()
                assert response.status == 200, answer
                assert answer["output_ids"] == expected(prompt, 12)
                taken_s.append(time.monotonic() - began_s)

    await call(alone_s, lambda: len(alone_s) < ALONE)
    watching = asyncio.create_task(measure())
    # A process of their own, so that the honest caller does not wait for them here.
    attacks = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, door.url.rpartition(":")[2], str(count)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
    )
    answered = asyncio.create_task(attacks.communicate())
    await call(beside_s, lambda: not answered.done())
    seen = json.loads((await answered)[0])
    watching.cancel()
    assert process.is_running() and (await door.get("/health"))["mesh"] == "there"
    assert peak_bytes < MOST_BYTES, f"{peak_bytes / MIB:.0f} MiB"
    assert {"200", "400"} <= seen.keys() and "500" not in seen, seen
    print(
        f"\n{count} requests: {seen}; {peak_bytes / MIB:.0f} MiB at most; the honest "
        f"caller's {len(beside_s)} answers: median {statistics.median(beside_s):.3f} s, alone "
        f"{statistics.median(alone_s):.3f} s; nine of ten within "
        f"{statistics.quantiles(beside_s, n=10)[-1]:.3f} s, alone "
        f"{statistics.quantiles(alone_s, n=10)[-1]:.3f} s"
    )


if __name__ == "__main__":
    print(json.dumps(asyncio.run(attack(int(sys.argv[1]), int(sys.argv[2])))))
