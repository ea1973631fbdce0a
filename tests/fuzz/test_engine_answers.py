"""A sidecar before an engine that answers anything.

Whatever an engine says: the sidecar lives, a step ends whole or with an error that has a reason, no
message to its caller breaks the stream's contract, and once the engine is well again, a step is as
it should be.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from support.conditions import until_said
from support.engine_steps import StepResult, packed, step_request, ticket
from support.fake_sglang import expected
from support.fuzzing import BATCH, EXAMPLES, fuzz
from support.hostile_engine import HostileSglang, Spoil, spoils
from support.rpc import error_of
from support.sidecar_in_process import CALL_S, Sidecar, sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2 as pb
from treadle_core.engine_queue.pace import EngineProgress, EngineWork
from treadle_runtime.http.sglang import EngineClient, EngineLost, EngineRefused, EngineRequest
from treadle_sidecar.engine.watch import EngineNotes, read_profile

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(0)]
PROMPT, TOKENS = list(range(10, 74)), 6
POLL_S = 0.02  # the sidecar looks at its engine often, and so recovers soon
ANSWER_S = 60.0
DEFECTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
PREFIX: dict[str, Any] = {"token_ids": packed(PROMPT)}
# what asks the engine, by the path whose answer it reads
ASKED: dict[str, tuple[str, Callable[[str], Message]]] = {
    "/generate": (
        "PrefetchPrefix",
        lambda id: pb.PrefetchPrefixRequest(request_id=id, trajectory_id=id, **PREFIX),
    ),
    "/flush_cache": ("Sleep", lambda id: pb.SleepRequest(request_id=id, mode=pb.PAUSE_MODE_KEEP)),
    "/release_memory_occupation": (
        "Sleep",
        lambda id: pb.SleepRequest(request_id=id, mode=pb.PAUSE_MODE_KEEP),
    ),
    "/update_weight_version": (
        "Sleep",
        lambda id: pb.SleepRequest(request_id=id, mode=pb.PAUSE_MODE_KEEP),
    ),
    "/update_weights_from_disk": (
        "UpdateWeights",
        lambda id: pb.UpdateWeightsRequest(request_id=id, weight_version=id, model_path="m"),
    ),
    "/server_info": ("GetEngineInfo", lambda id: pb.GetEngineInfoRequest()),
    "/model_info": ("GetEngineInfo", lambda id: pb.GetEngineInfoRequest()),
    "/v1/loads": ("GetLoad", lambda id: pb.GetLoadRequest()),
}


class Hostile:
    """A sidecar, and the engine that it has. ended: steps and calls, by the reason of their
    error."""

    def __init__(self, engine: HostileSglang, side: Sidecar, engine_id: str) -> None:
        self._engine, self._side, self._engine_id = engine, side, engine_id
        self.ended: Counter[str] = Counter()

    async def run_steps(self, batch: Sequence[Spoil]) -> None:
        """Steps whose streams are spoiled, at once; then the engine is well, and a step is as it
        should be."""
        names = [f"spoiled{index}" for index in range(len(batch))]
        self._engine.streams = dict(zip(names, batch, strict=True))
        for result, reason in await asyncio.gather(*(self._step(name) for name in names)):
            self.ended[reason] += 1
            if reason == "OK":
                result.require_whole(honest=False)
        await self._recover()

    async def ask(self, spoiled: Mapping[str, Spoil]) -> None:
        """Ask what reads the spoiled answers; the sidecar does so too by itself."""
        self._engine.answers = spoiled
        await asyncio.sleep(2 * POLL_S)
        for name, request in (ASKED[path] for path in spoiled):
            try:
                await getattr(self._side.stub, name)(
                    request(f"r{uuid.uuid4().hex}"), timeout=ANSWER_S
                )
                self.ended["OK"] += 1
            except grpc.aio.AioRpcError as error:
                self.ended[_reason_of(error)] += 1
        await self._recover()

    async def _step(self, name: str) -> tuple[StepResult, str]:
        """What its stream said, none of which breaks the contract, and the reason of its error; OK:
        it is whole."""
        made = ticket(self._engine_id)
        made.ticket_id += name
        request = step_request(
            made, PROMPT, SamplingParams(max_new_tokens=TOKENS, temperature=0.0, stop=["~"])
        )
        result, reason = StepResult(), "OK"
        try:
            async for response in self._side.stub.Generate(request, timeout=ANSWER_S):
                result.take(response)
        except grpc.aio.AioRpcError as error:
            reason = _reason_of(error)
        assert (
            result.offsets == sorted(set(result.offsets))
            and len(result.logprobs) == len(result.tokens) <= TOKENS
        )
        assert min(result.tokens, default=0) >= 0
        assert all(math.isfinite(logprob) and logprob <= 0.0 for logprob in result.logprobs)
        return result, reason

    async def _recover(self) -> None:
        self._engine.get_well()
        await until_said(
            self._side.load,
            lambda load: (
                load.engine_healthy and load.weight_version == "default" and not load.asleep_tags
            ),
        )
        await self._side.stub.Resume(pb.ResumeRequest(request_id=uuid.uuid4().hex), timeout=CALL_S)
        result, reason = await self._step("well")
        assert (
            reason == "OK"
            and result.require_whole()
            and result.tokens.tolist() == expected(PROMPT, TOKENS)
        )


def _reason_of(error: grpc.aio.AioRpcError) -> str:
    code, reason, *_ = error_of(error)
    assert code not in DEFECTS and reason, error
    return reason


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["incremental", "cumulative"])
async def hostile(request: pytest.FixtureRequest, shared_nats_url: str) -> AsyncIterator[Hostile]:
    name, engine = (
        request.param,
        HostileSglang(token_s=0.0, incremental=request.param == "incremental"),
    )
    await engine.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("treadle_sidecar.engine.watch.POLL_S", POLL_S)
        async with sidecar(shared_nats_url, engine.url, engine_id=name) as side:
            yield Hostile(engine, side, name)
    await engine.stop()


async def run(
    examples: int,
    strategy: st.SearchStrategy[Any],
    check: Callable[[Any], Coroutine[Any, Any, None]],
) -> None:
    """Try the examples in a thread, each in this loop."""
    loop = asyncio.get_running_loop()

    @fuzz(examples)
    @given(strategy)
    def check_example(example: Any) -> None:
        asyncio.run_coroutine_threadsafe(check(example), loop).result()

    await asyncio.to_thread(check_example)


async def test_no_stream_of_an_engine_breaks_the_contract(hostile: Hostile) -> None:
    await run(
        EXAMPLES // BATCH // 2,
        st.lists(spoils(), min_size=BATCH, max_size=BATCH),
        hostile.run_steps,
    )
    assert min(hostile.ended[reason] for reason in ("OK", "ENGINE_LOST", "ENGINE_REFUSED")) > 0, (
        hostile.ended
    )


async def test_no_answer_of_an_engine_ends_its_sidecar(hostile: Hostile) -> None:
    spoiled = st.dictionaries(st.sampled_from(sorted(ASKED)), spoils(), min_size=1, max_size=3)
    await run(EXAMPLES // BATCH // 2, spoiled, hostile.ask)
    assert hostile.ended["OK"] > 0 and len(hostile.ended) > 2, hostile.ended


async def test_what_an_engine_answers_is_read_or_refused() -> None:
    """Each question that a sidecar asks, before each answer."""
    engine = HostileSglang(token_s=0.0)
    await engine.start()
    notes = EngineNotes(EngineWork(lambda *_: None), EngineProgress(60.0))
    client = EngineClient(engine.url, observer=notes)
    client.incremental = True

    async def describe() -> None:
        read_profile(*await client.describe())

    async def generate() -> None:
        request = EngineRequest("spoiled", PROMPT, {"max_new_tokens": TOKENS}, "salt")
        async with aclosing(client.generate(request)) as chunks:
            async for chunk in chunks:
                assert all(0 <= token < 2**31 for token in chunk.token_ids)

    asked: list[Callable[[], Awaitable[object]]] = [
        describe,
        generate,
        client.name_of_weights,
        client.kv_tokens,
        lambda: client.prefill("r", PROMPT, "salt"),
        lambda: client.text_of(PROMPT),
        lambda: client.update_weights("m", "v"),
        client.flush_cache,
    ]

    async def ask(spoil: Spoil) -> None:
        engine.streams = {"spoiled": spoil}
        engine.answers = dict.fromkeys(ASKED.keys() | {"/detokenize"}, spoil)
        for question in asked:
            with suppress(EngineLost, EngineRefused):
                await question()

    await run(EXAMPLES, spoils(), ask)
    await client.close()
    await engine.stop()
