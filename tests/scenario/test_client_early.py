"""What treadle.Client does before a ticket is there: calls that open early, and engines that are told of steps."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest
from support.conditions import until
from support.fake_engine import token_at
from support.fake_servicer import Refusal
from support.mesh_in_process import FakeMesh, generate, one_trajectory
from support.processes import free_port
from treadle import connection
from treadle.engine.v1 import engine_pb2
from treadle.steps import early

PROMPT = [11, 12, 13]

one = partial(one_trajectory, "e0", prompt=PROMPT)


def begun(mesh: FakeMesh) -> int:
    """Calls for tickets, also those whose request may not have come."""
    return mesh.scheduler_port.begun["ScheduleStep"]


def came(mesh: FakeMesh) -> tuple[int, int]:
    """Requests for tickets, and to all engines."""
    steps = sum(len(engine.requests("Generate")) for engine in mesh.engines.values())
    return len(mesh.scheduler.requests("ScheduleStep")), steps


def told(mesh: FakeMesh, engine_id: str = "e0") -> list[engine_pb2.BeginStepRequest]:
    """Steps that an engine was told of before their tickets."""
    return mesh.engines[engine_id].requests("BeginStep")


def expected(context: list[int], count: int) -> list[int]:
    return [token_at(context, index) for index in range(count)]


async def test_a_later_turn_is_told_to_its_engine_while_the_ticket_is_on_its_way() -> None:
    async with one() as (mesh, t):
        await generate(t, 2)
        assert not told(mesh), "of a first turn nobody knows where it will run"
        t.observe([7])
        context = list(t.tokens)
        mesh.scheduler.tickets_gate.close()
        turn = asyncio.create_task(generate(t, 3, temperature=0.5))
        await until(lambda: mesh.scheduler.tickets_gate.waiting == 1 and len(told(mesh)) == 1)
        assert came(mesh) == (1, 1)
        mesh.scheduler.tickets_gate.open()
        assert await turn == expected(context, 3)
        early, request = told(mesh)[0], mesh.engines["e0"].requests("Generate")[1]
        assert (early.trajectory_id, early.turn) == (request.ticket.trajectory_id, request.ticket.turn)
        assert (early.prompt, early.sampling) == (request.prompt, request.sampling)
        assert came(mesh) == (2, 2)


async def test_an_engine_without_a_free_slot_is_not_told_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with one() as (mesh, t):
        mesh.engines["e0"].begins = False
        for _ in range(2):
            await generate(t, 2)
        await until(lambda: len(told(mesh)) == 1)
        await until(lambda: not t._mesh.early_steps._telling)  # the answer has come
        await generate(t, 2)
        assert len(told(mesh)) == 1
        monkeypatch.setattr(connection, "FULL_S", 0.0)
        await asyncio.sleep(1.0)
        await generate(t, 2)
        await until(lambda: len(told(mesh)) == 2)
        await generate(t, 2)
        await until(lambda: len(told(mesh)) == 3)
        assert came(mesh) == (5, 5)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE])
async def test_a_step_needs_no_engine_that_can_begin_it(code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older sidecar, and one that has trouble. Result: every step runs; an older one is told once."""
    monkeypatch.setattr(connection, "FULL_S", 0.0)
    async with one() as (mesh, t):
        mesh.engines["e0"].refuse_next("BeginStep", Refusal(code, ""))
        for turn in range(4):
            context = list(t.tokens)
            assert await generate(t, 2) == expected(context, 2)
            if turn == 1:
                await until(lambda: told(mesh))
                await until(lambda: not t._mesh.early_steps._telling)  # the answer has come
        await until(lambda: len(told(mesh)) == (1 if code is grpc.StatusCode.UNIMPLEMENTED else 3))
        assert came(mesh) == (4, 4)


async def test_a_long_prompt_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MOST_PROMPT_BYTES", 4 * len(PROMPT))
    async with one() as (mesh, t):
        for _ in range(3):
            await generate(t, 2)
        assert came(mesh) == (3, 3)
        assert not told(mesh)


async def test_after_two_turns_the_next_ticket_has_an_open_call() -> None:
    async with one() as (mesh, t):
        await generate(t, 2)
        await generate(t, 2)
        await until(lambda: begun(mesh) == 3)
        assert came(mesh)[0] == 2
        context = list(t.tokens)
        assert await generate(t, 2) == expected(context, 2)
        assert came(mesh) == (3, 3)
        await until(lambda: begun(mesh) == 4)  # for the turn after it
        await until(lambda: len(told(mesh)) == 2)
        await until(lambda: mesh.engine_ports["e0"].begun["BeginStep"] == 3)  # the call that tells of it is open too
        await t.close()
        assert mesh.scheduler.open_trajectories == set()


async def test_a_ticket_is_asked_for_again_where_the_connection_fails_as_the_open_call_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC then ends the call by itself, as INTERNAL, before it has heard why the connection failed."""
    refused = 0

    async def fail(call: Any, _: Any) -> None:
        nonlocal refused
        refused += 1
        call._cython_call.set_internal_error("Failed 'execute_batch'")
        await call._raise_for_status()

    async with one() as (mesh, t):
        for _ in range(2):
            await generate(t, 2)
        await until(lambda: begun(mesh) == 3)
        context = list(t.tokens)
        monkeypatch.setattr("grpc.aio._call.StreamStreamCall.write", fail)
        assert await generate(t, 2) == expected(context, 2)
        assert refused >= 1 and came(mesh) == (3, 3)


async def test_a_call_for_a_ticket_that_was_open_for_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "KEPT_S", 0.01)
    async with one() as (mesh, t):
        for _ in range(2):
            await generate(t, 2)
        await until(lambda: begun(mesh) == 3)
        await asyncio.sleep(0.1)
        await generate(t, 2)
        assert came(mesh) == (3, 3)
        assert begun(mesh) >= 4  # the open call was one of them


async def test_a_ticket_for_another_engine_runs_there_once() -> None:
    async with one_trajectory("e0", "e1", prompt=PROMPT) as (mesh, t):
        for turn in range(4):  # the scheduler gives the engines in turns
            context = list(t.tokens)
            assert await generate(t, 2) == expected(context, 2)
            assert t.steps[turn].engine_ids == (f"e{turn % 2}",)
        assert came(mesh) == (4, 4)


async def test_servers_that_came_back_meanwhile_get_the_requests() -> None:
    async with one() as (mesh, t):
        for _ in range(2):
            await generate(t, 2)
        await until(lambda: begun(mesh) == 3)
        for port in (mesh.scheduler_port, mesh.engine_ports["e0"]):
            await port.stop()
            await port.start()
        context = list(t.tokens)
        assert await generate(t, 2) == expected(context, 2)
        assert came(mesh) == (3, 3)


async def test_an_answer_that_is_lost_on_an_open_call_is_asked_for_again() -> None:
    async with one() as (mesh, t):
        for _ in range(2):
            await generate(t, 2)
        mesh.scheduler.refuse_next("ScheduleStep", Refusal(grpc.StatusCode.UNAVAILABLE, "BUSY", after=True))
        context = list(t.tokens)
        assert await generate(t, 2) == expected(context, 2)
        first, again = mesh.scheduler.requests("ScheduleStep")[2:]
        assert first == again
        assert came(mesh)[1] == 3


class _Sees(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self) -> None:
        self.requests = 0

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        self.requests += 1
        return await continuation(client_call_details, request)


async def test_interceptors_see_each_request() -> None:
    sees = _Sees()
    async with one(interceptors=[sees]) as (mesh, t):
        for _ in range(3):
            await generate(t, 2)
        assert sees.requests == 3
        assert came(mesh) == (3, 3)
        assert begun(mesh) == 3, "no call opens early"


@pytest.mark.parametrize("kept_s", [1.0, 60.0])
async def test_a_call_without_a_request_is_cancelled(kept_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "KEPT_S", kept_s)
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def serve(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            return grpc.stream_stream_rpc_method_handler(serve)

    server, address = grpc.aio.server(), f"127.0.0.1:{free_port()}"
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
            call: early.EarlyCall[bytes, bytes] = early.EarlyCall(channel.stream_stream("/any/Thing")())
            await began.wait()
            if kept_s > 1.0:  # else its time ends it
                call.drop()
            await cancelled.wait()
            assert call.take() is None
    finally:
        await server.stop(0)
