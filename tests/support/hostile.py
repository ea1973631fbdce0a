"""Answers that no honest tool gives, and tools whose code sends them over the link of its own
process."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from treadle_tools.sandbox.inside import messages

# A stateless tool, a reward and an environment, each called `hostile...`; an argument `bytes`
# (base64 of zlib) is the answer.
HOSTILE_TOOLS = """
from treadle_tools.tool import Kind, Tool

ANY = {"type": "object"}
def tool(name, kind, **more):
    return Tool(name=name, kind=kind, description="", entry=f"own_code:{name}", arguments_schema=ANY, **more)

TOOLS = [
    tool("hostile_call", Kind.STATELESS),
    tool("hostile_score", Kind.REWARD, reward_range=(0.0, 1.0)),
    tool("HostileWorld", Kind.ENVIRONMENT),
]
"""
HOSTILE_CODE = """
import base64, os, sys, zlib
from treadle_tools.tool import Outcome

def send(arguments):
    frame = sys._getframe()
    while "link" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["link"].sendall(zlib.decompress(base64.b64decode(arguments["bytes"])))

def hostile_call(arguments):
    if "bytes" in arguments:
        send(arguments)
        os._exit(0)
    return Outcome(output="fine")

def hostile_score(arguments):
    if "bytes" in arguments:
        send(arguments)
        os._exit(0)
    return Outcome(reward=0.5)

class HostileWorld:
    def __init__(self, arguments, sandbox):
        pass
    def first(self):
        return Outcome(output="first")
    def step(self, arguments):
        if "bytes" in arguments:
            send(arguments)
            if arguments.get("ends"):
                os._exit(0)
        return Outcome(output="fine", reward=1.0)
"""
# What breaks each field of an answer.
VALUES: list[Any] = [
    None,
    True,
    -1,
    0.5,
    10**500,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
    "abc",
    "é" * 400_000,
    "\ud800",
    "\0" * 1000,
    [],
    {},
    [1],
    {"a": {"b": []}},
    ["x", "y"],
    ["é" * 400_000, "é" * 400_000],
    "[" * 100_000,
    "soiled",
    '{"a": NaN}',
]
FIELDS = (
    "status",
    "output",
    "error",
    "reward",
    "done",
    "data_json",
    "invalid",
    "retry_after_s",
    "alive",
    "soiled",
    "again",
    "id",
    "execution_s",
    "cpu_s",
    "fatal",
    "python",
    "file",
    "oom_kills",
    "truncated",
)
# Mostly an answer; also what else there is, and what is not.
SENT_KINDS = (*[messages.ANSWER] * 6, messages.LAST, messages.ORDER, 0, 255)


def framed(body: bytes, kind: int = messages.ANSWER) -> bytes:
    return messages.ANSWER_HEAD.pack(kind, len(body)) + body


def _fields(rng: Random) -> bytes:
    fields = {name: rng.choice(VALUES) for name in rng.sample(FIELDS, rng.randint(1, 4))}
    return framed(json.dumps({"status": "ok", **fields}).encode(), rng.choice(SENT_KINDS))


def _any_json(rng: Random) -> bytes:
    return framed(json.dumps(rng.choice(VALUES)).encode())


def _deep(rng: Random) -> bytes:
    depth = rng.choice([500, 5_000, 200_000])
    return framed(b'{"status":"ok","data_json":' + b"[" * depth + b"]" * depth + b"}")


def _noise(rng: Random) -> bytes:
    return rng.randbytes(rng.randint(0, 300))


def _cut(rng: Random) -> bytes:
    whole = _fields(rng)
    return whole[: rng.randint(0, len(whole) - 1)]


def _large(rng: Random) -> bytes:
    return (
        messages.ANSWER_HEAD.pack(
            messages.ANSWER, rng.choice([5_000_000, 16 * 1024 * 1024 + 1, 2**32 - 1])
        )
        + b"x" * 1000
    )


def _honest(_: Random) -> bytes:
    return framed(b'{"status":"ok","output":"honest","reward":0.5}')


KINDS: list[Callable[[Random], bytes]] = [
    _honest,
    _fields,
    _fields,
    _fields,
    _any_json,
    _deep,
    _noise,
    _cut,
    _large,
]


def hostile_answer(rng: Random) -> bytes:
    """What a tool's process sends, header included."""
    return rng.choice(KINDS)(rng)


def hostile_body(rng: Random) -> bytes:
    """What a function or a judge sends as JSON."""
    body = hostile_answer(rng)
    return body[messages.ANSWER_HEAD.size :] if rng.random() < 0.9 else body
