"""Hostile and odd requests of the gateway's whole surface, on a real engine.

Whatever is sent: the engine lives, and each answer is an error that names the field, or what the
engine itself answers to the same request. Answers that the mesh carries, that the gateway forwards
and that are streamed are alike.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from support.gateway import FrontDoor, front_door
from support.hostile_requests import (
    CHAT,
    COMPLETE,
    CONTEXT_TOKENS,
    DETOKENIZE,
    FORWARDED,
    FUNCTION,
    GENERATE,
    GOOD,
    TOKENIZE,
    Hostile,
    hostile_requests,
    requests_that_kill,
    with_more,
)
from support.real_engines import RealEngine, model_folder, small_model_folder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LEAST = 200  # requests
AT_ONCE = 4
AWAY = 4  # of so many requests one is sent again while the mesh is away
# Of so many requests one is sent: they are the more, the longer the tests may take.
EVERY = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
ANSWER_S = 120.0  # an engine that has not answered by then has lost the request
TOLERANCE = 5e-3  # of logprobs
NOT_CARRIED = 501
# Paths that an engine has too, so that it can be sent the same body.
OF_ENGINE = (GENERATE, CHAT, COMPLETE, TOKENIZE, DETOKENIZE)
ADDED = ("text", "content")  # texts of a stream, each event of which has some more
# Fields of an answer that are of one call, or of one server.
OF_ONE_CALL = {
    *("id", "rid", "created", "model", "index", "object", "e2e_latency", "trajectory_id"),
    *("cached_tokens", "cached_tokens_details", "prompt_tokens_details", "weight_version"),
    *("weight_versions", "metadata", "queue_time", "decode_throughput", "first_token_latency"),
    *("num_retractions", "output_token_logprobs_length", "text_offset"),
    "prompt",  # by which vLLM's clients know what /detokenize answers
}
# Fields that the gateway's answers in OpenAI's forms have and SGLang's lack.
MORE = ("token_ids", "response_token_ids", "prompt_token_ids")
OF_ONE_CALL_END = ("_time", "_ts", "_wait")  # of the names of SGLang's times


@dataclass(frozen=True)
class Said:
    """An answer; a stream's `body` is a list of its events."""

    status: int
    streamed: bool
    body: Any
    raw: str

    @property
    def error(self) -> str | None:
        """The words of an error, in the forms of OpenAI and SGLang; None where it is none."""
        events = self.body if self.streamed else [self.body]
        for event in events:
            if isinstance(event, dict) and (self.status >= 400 or event.get("error")):
                error = event.get("error") or event
                return str(error.get("message")) if isinstance(error, dict) else str(error)
        return None


@dataclass
class Prober:
    """Sends requests to a gateway and to its engine, and judges the answers. seen: how many were
    answered, refused."""

    door: FrontDoor
    engine: RealEngine
    process: psutil.Process
    http: aiohttp.ClientSession
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def lives(self) -> bool:
        """Whether the process that generates is the one that was there at first."""
        return self.engine.running and self.process.is_running()

    async def send(self, url: str, request: Hostile) -> Said:
        kind = {"Content-Type": "application/json"}
        async with self.http.post(
            f"{url}{request.path}", data=request.raw, headers=kind
        ) as response:
            raw = (await response.read()).decode()
            streamed = "event-stream" in response.headers.get("Content-Type", "")
            return Said(response.status, streamed, read(raw, streamed=streamed), raw[:300])

    async def answer(self, url: str, path: str, body: dict[str, Any]) -> Any:
        """The whole answer to a request that is served."""
        said = await self.send(url, Hostile(path, (), body))
        assert said.status == 200, said.raw
        return whole(path, said)

    async def problem(self, request: Hostile) -> str | None:
        """Return what is wrong with the answer to a request; None where nothing is."""
        try:
            said = await self.send(self.door.url, request)
        except TimeoutError:
            return "no answer"
        if not self.lives:
            return f"the engine died, and the answer was {said.status} {said.raw}"
        if said.status == 200 and said.error is None:
            self.seen["answered"] += 1
            return await self._problem_of_answer(request, said)
        self.seen["refused"] += 1
        return await self._problem_of_error(request, said)

    async def problems(self, requests: Iterable[Hostile]) -> list[str]:
        """Return what is wrong with the answers to these requests, until the engine ends."""
        found: list[str] = []
        waiting = iter(requests)

        async def work() -> None:
            for request in waiting:
                if (problem := await self.problem(request)) is not None:
                    found.append(f"{request}\n    {problem}")
                if not self.lives:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
        return found

    async def _problem_of_answer(self, request: Hostile, said: Said) -> str | None:
        if request.path not in OF_ENGINE:
            return None
        # The engine refuses null where the gateway reads that nothing is asked.
        direct = await self._send_directly(without_null(request))
        if direct is None or direct.status != 200 or direct.error is not None:
            return f"answered, and the engine refuses: {direct.raw if direct else 'it died'}"
        if not request.greedy:
            return None
        unlike = list(differences(whole(request.path, said), whole(request.path, direct)))
        return f"the gateway's answer and the engine's differ: {unlike}" if unlike else None

    async def _problem_of_error(self, request: Hostile, said: Said) -> str | None:
        if said.error is None or (said.status >= 500 and said.status != NOT_CARRIED):
            return f"answered {said.status} {said.raw}"
        if names(said.error, request.named):
            return None
        if said.status < 500 and request.path in OF_ENGINE:
            direct = await self._send_directly(request)
            if direct is not None and (direct.status, direct.error) == (said.status, said.error):
                return None
        return f"the error names no field: {said.status} {said.error[:300]}"

    async def _send_directly(self, request: Hostile) -> Said | None:
        """The engine's answer without the gateway; None where it died."""
        try:
            return await self.send(self.engine.url, request)
        except (aiohttp.ClientError, TimeoutError):
            return None


def read(raw: str, *, streamed: bool) -> Any:
    """The JSON of an answer, or of each event of a stream."""
    if not streamed:
        try:
            return json.loads(raw)
        except ValueError:
            return None
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def names(message: str, fields: Iterable[str]) -> bool:
    """Whether a message has one of the names as a word."""
    return any(re.search(rf"(?<!\w){re.escape(each)}(?!\w)", message) for each in fields)


def whole(path: str, said: Said) -> Any:
    """An answer as it would be without a stream."""
    if not said.streamed:
        return said.body
    found: dict[int, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    for event in said.body:
        last |= {"usage": event["usage"]} if event.get("usage") else {}
        for part in event["choices"] if path != GENERATE else [event]:
            before = found.setdefault(part.get("index", 0), {})
            if (
                path == GENERATE
                and len(part["output_ids"]) == part["meta_info"]["completion_tokens"]
            ):
                before.clear()  # each event has all tokens so far
            if "delta" in part:
                part["message"] = part.pop("delta")
            add(before, part)
    parts = [found[at] for at in sorted(found)]
    if path == GENERATE:
        return parts if len(parts) > 1 else parts[0]
    return {"choices": parts, **last}


def add(before: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add what an event has to what the events before it had."""
    for name, value in part.items():
        if isinstance(value, dict) and isinstance(before.get(name), dict):
            add(before[name], value)
        elif (isinstance(value, str) and name in ADDED) or (
            isinstance(value, list) and name != "prompt_token_ids"
        ):
            before[name] = before[name] + value if before.get(name) else value
        elif value is not None:
            before[name] = value


def differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Return what differs between two answers, apart from what is of one call. Nothing, an empty list and 0
    are alike."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted(ours.keys() | theirs.keys()):
            more = name in MORE and theirs.get(name) is None
            if not more and name not in OF_ONE_CALL and not name.endswith(OF_ONE_CALL_END):
                yield from differences(ours.get(name), theirs.get(name), f"{at}.{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{at}[{place}]")
    elif isinstance(ours, float) and isinstance(theirs, float):
        if ours != pytest.approx(theirs, abs=TOLERANCE):
            yield f"{at}: {ours} and {theirs}"
    elif (ours or None) != (theirs or None):
        yield f"{at}: {ours!r:.120} and {theirs!r:.120}"


def without_null(request: Hostile) -> Hostile:
    """The request without the fields that are null."""
    if isinstance(request.body, bytes):
        return request
    body = {name: value for name, value in request.body.items() if value is not None}
    if isinstance(sampling := body.get("sampling_params"), dict):
        body["sampling_params"] = {
            name: value
            for name, value in sampling.items()
            if value is not None or name == "max_new_tokens"  # null is no limit there
        }
    return replace(request, body=body)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """An engine with a context so short that a request may fill it."""
    folder = tmp_path_factory.mktemp("engine")
    short = ("--dtype", "float32", "--context-length", str(CONTEXT_TOKENS))
    model = small_model_folder(folder)
    one = RealEngine(0, folder, short, weights="float", model=model)
    one.start()
    one.wait_ready()
    yield one
    one.kill()


@pytest.fixture
async def prober(tmp_path: Path, engine: RealEngine) -> AsyncIterator[Prober]:
    # A connection each: nothing is sent on one that the other side closes at that moment.
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        timeout=aiohttp.ClientTimeout(total=ANSWER_S),
        headers={"Content-Type": "application/json"},
    )
    door = front_door(tmp_path, urls={"e0": engine.url}, tokenizer=model_folder())
    async with session as http, door as opened:
        yield Prober(opened, engine, engine.scheduler_process(), http)


@EVERY
async def test_no_request_harms_the_engine_and_each_gets_an_error_or_its_answer(
    prober: Prober, every: int
) -> None:
    requests = (await requests_to(prober))[::every]
    assert len(requests) >= LEAST
    problems = await prober.problems(requests_that_kill() + requests)
    assert not problems, f"{len(problems)} of {len(requests)}\n" + "\n".join(problems)
    assert min(prober.seen["answered"], prober.seen["refused"]) > LEAST // 8, prober.seen


@EVERY
async def test_no_request_harms_the_engine_while_the_mesh_is_away(
    prober: Prober, every: int
) -> None:
    requests = (await requests_to(prober))[:: AWAY * every]
    await prober.door.kill_mesh(signal.SIGKILL)
    await prober.door.until_mesh("away")
    problems = await prober.problems(requests_that_kill() + requests)
    assert not problems, f"{len(problems)}\n" + "\n".join(problems)


@EVERY
async def test_an_answer_does_not_depend_on_the_way_that_its_request_takes(
    prober: Prober, every: int
) -> None:
    problems: list[str] = []
    waiting = iter(ODD[:: every // 2 or 1])

    async def compare(path: str, more: dict[str, Any]) -> None:
        body = {**GOOD[path], **more}
        stream = STREAM | ({} if path == GENERATE else USAGE)
        streams = "n" not in body and not isinstance(body.get("prompt"), list)
        carried, forwarded = body, with_more(path, body, FORWARDED)
        direct = await prober.answer(prober.engine.url, path, body)
        pairs = {"carried": (carried, direct), "forwarded": (forwarded, direct)}
        if streams:
            # SGLang leaves logprobs out of some streams, so the forwarded one is compared with it.
            streamed = await prober.answer(prober.engine.url, path, body | stream)
            pairs["carried, streamed"] = (carried | stream, direct)
            pairs["forwarded, streamed"] = (forwarded | stream, streamed)
        for way, (sent, wanted) in pairs.items():
            answer = await prober.answer(prober.door.url, path, sent)
            found = differences(answer, wanted)
            problems.extend(f"{path} {more} {way}: {each}" for each in found)

    async def work() -> None:
        for path, more in waiting:
            await compare(path, more)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())
    assert not problems, "\n".join(problems)


async def requests_to(prober: Prober) -> list[Hostile]:
    """Hostile requests, by what the engine says of itself."""

    async def ask(path: str) -> Any:
        async with prober.http.get(f"{prober.engine.url}{path}") as response:
            return await response.json()

    [model] = (await ask("/v1/models"))["data"]
    return hostile_requests(await ask("/openapi.json"), model["id"])


def eight(**sampling: Any) -> dict[str, Any]:
    return {"sampling_params": {"max_new_tokens": 8, "temperature": 0, **sampling}}


STREAM: dict[str, Any] = {"stream": True}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
AND = 284  # the token of " and", which the small model samples often
LAST_OF_ASSISTANT = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Well"}]
# What a person may ask for, so that each way has something to get wrong.
ODD: list[tuple[str, dict[str, Any]]] = [
    (GENERATE, {"return_logprob": True}),
    (GENERATE, {"return_prompt_token_ids": True}),
    (GENERATE, eight(stop=[" and"])),
    (GENERATE, eight(stop=[" and"], no_stop_trim=True)),
    (GENERATE, eight(stop_token_ids=[AND]) | {"return_logprob": True}),
    (GENERATE, eight(stop_token_ids=[AND], ignore_eos=True)),
    (GENERATE, eight(skip_special_tokens=False)),
    (GENERATE, eight(n=2)),
    (CHAT, {"model": "a model"}),
    (CHAT, {"logprobs": True}),
    (CHAT, {"max_tokens": 8, "stop": [" and"]}),
    (CHAT, {"max_tokens": 8, "stop_token_ids": [AND], "logprobs": True}),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 3}),
    (CHAT, {"messages": LAST_OF_ASSISTANT, "continue_final_message": True}),
    (CHAT, {"tools": [FUNCTION], "tool_choice": "none"}),
    (CHAT, {"tools": [FUNCTION]}),
    (CHAT, {"n": 2}),
    (COMPLETE, {"model": "a model"}),
    (COMPLETE, {"logprobs": 0}),
    (COMPLETE, {"max_tokens": 8, "stop": " and", "no_stop_trim": True}),
    (COMPLETE, {"prompt": ["Say hi", "to me"]}),
    (COMPLETE, {"prompt": [5, 6, 7], "n": 2}),
]
