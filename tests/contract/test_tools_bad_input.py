"""Bad input to every RPC of ToolsService: the right code, naming the field or the reason."""

import json
from typing import Any

import grpc
from support.rpc import refusal_of, refused
from support.tools import CALL_S, ToolsCalls, limits, serve
from treadle.tools.v1 import tools_pb2 as pb

CODE = json.dumps({"code": "1"})
service = serve("python", "frozen_lake", "reasoning_gym")


def invoke_request(**fields: Any) -> pb.InvokeRequest:
    return pb.InvokeRequest(
        **{"request_id": "r", "tool": "python", "arguments_json": CODE, **fields}
    )


def open_request(**fields: Any) -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        **{"request_id": "r", "tool": "frozen_lake", "arguments_json": "{}", **fields}
    )


INVOKES = [
    (invoke_request(request_id=""), "request_id"),
    (invoke_request(tool=""), "tool"),
    (invoke_request(tool="frozen_lake", arguments_json='{"action": "up"}'), "session_id"),
    (invoke_request(session_id="not an id"), "session_id"),
    (invoke_request(trajectory_id="t 1"), "trajectory_id"),
    (invoke_request(arguments_json="{"), "arguments_json"),
    (invoke_request(arguments_json="[1]"), "arguments_json"),
    (invoke_request(arguments_json='{"code": NaN}'), "arguments_json"),
    (invoke_request(arguments_json="[" * 100_000), "arguments_json"),
    (invoke_request(arguments_json=json.dumps({"code": "x" * 1024 * 1024})), "arguments_json"),
    (invoke_request(arguments_json=""), "arguments_json.code"),
    (invoke_request(arguments_json='{"code": 1}'), "arguments_json.code"),
    (invoke_request(arguments_json='{"code": "1", "cwd": "/"}'), "arguments_json.cwd"),
    (invoke_request(limits=pb.Limits(cpu_cores=-1)), "limits.cpu_cores"),
    (invoke_request(limits=pb.Limits(cpu_cores=65)), "limits.cpu_cores"),
    (invoke_request(limits=pb.Limits(memory_bytes=-1)), "limits.memory_bytes"),
    (invoke_request(limits=pb.Limits(memory_bytes=1 << 50)), "limits.memory_bytes"),
    (invoke_request(limits=limits(-1.0)), "limits.wall_time"),
    (invoke_request(limits=limits(3600.0)), "limits.wall_time"),
    (invoke_request(limits=pb.Limits(output_bytes=-5)), "limits.output_bytes"),
]
OPENS = [
    (open_request(request_id=""), "request_id"),
    (open_request(tool=""), "tool"),
    (open_request(tool="python"), "tool"),
    (open_request(trajectory_id="/"), "trajectory_id"),
    (open_request(arguments_json="nope"), "arguments_json"),
    (open_request(arguments_json='{"size": 5}'), "arguments_json.size"),
    (open_request(arguments_json='{"seed": -1}'), "arguments_json.seed"),
    (open_request(arguments_json='{"slippery": "yes"}'), "arguments_json.slippery"),
    (open_request(arguments_json='{"lake": 1}'), "arguments_json.lake"),
    (open_request(tool="reasoning_gym"), "arguments_json.task"),
    (
        open_request(tool="reasoning_gym", arguments_json='{"task": "no_such_task"}'),
        "arguments_json.task",
    ),
    (open_request(limits=pb.Limits(memory_bytes=-1)), "limits.memory_bytes"),
]


async def refused_field(call: Any) -> tuple[str, ...]:
    error = await refusal_of(call)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT, error
    return error.fields


async def test_invoke_and_open_session_name_the_bad_field(calls: ToolsCalls) -> None:
    """What is refused leaves no trace, also not under its request_id."""
    for invoke, field in INVOKES:
        assert await refused_field(calls.stub.Invoke(invoke, timeout=CALL_S)) == (field,), invoke
    for opening, field in OPENS:
        assert await refused_field(calls.stub.OpenSession(opening, timeout=CALL_S)) == (field,), (
            opening
        )
    good = await calls.stub.Invoke(invoke_request(), timeout=CALL_S)
    assert good.result.output == "1\n"


async def test_a_step_names_the_bad_field_and_takes_no_step(calls: ToolsCalls) -> None:
    session = (await calls.open("frozen_lake", trajectory_id="t")).session
    step = {"session_id": session.session_id, "tool": ""}
    bad: list[tuple[dict[str, Any], str]] = [
        ({**step, "tool": "python"}, "tool"),
        ({**step, "trajectory_id": "u"}, "trajectory_id"),
        ({**step, "arguments_json": '{"action": "jump"}'}, "arguments_json.action"),
        ({**step, "arguments_json": "{}"}, "arguments_json.action"),
        (
            {**step, "arguments_json": '{"action": "up"}', "limits": limits(60.0)},
            "limits.wall_time",
        ),
    ]
    for fields, field in bad:
        request = invoke_request(request_id="step", **fields)
        assert await refused_field(calls.stub.Invoke(request, timeout=CALL_S)) == (field,), request
    assert (await calls.session(session.session_id)).steps == 0


async def test_unknown_tools_and_sessions_are_not_found(calls: ToolsCalls) -> None:
    for call in (calls.invoke({}, tool="oracle"), calls.open("oracle")):
        with refused("TOOL_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await call
    for ask in (
        calls.step("s-none", {"action": "up"}),
        calls.close("s-none"),
        calls.session("s-none"),
    ):
        with refused("SESSION_NOT_FOUND", grpc.StatusCode.NOT_FOUND):
            await ask


async def test_close_and_get_session_name_the_bad_field(calls: ToolsCalls) -> None:
    no_request_id, no_session_id = (
        pb.CloseSessionRequest(session_id="s"),
        pb.CloseSessionRequest(request_id="r"),
    )
    assert await refused_field(calls.stub.CloseSession(no_request_id, timeout=CALL_S)) == (
        "request_id",
    )
    assert await refused_field(calls.stub.CloseSession(no_session_id, timeout=CALL_S)) == (
        "session_id",
    )
    assert await refused_field(calls.stub.GetSession(pb.GetSessionRequest(), timeout=CALL_S)) == (
        "session_id",
    )


async def test_every_rpc_needs_a_deadline(calls: ToolsCalls) -> None:
    with refused("DEADLINE_REQUIRED", grpc.StatusCode.INVALID_ARGUMENT):
        await calls.stub.ListTools(pb.ListToolsRequest())


async def test_a_request_id_with_another_request_is_refused(calls: ToolsCalls) -> None:
    await calls.python("1", id="same")
    assert await refused_field(calls.python("2", id="same")) == ("request_id",)
