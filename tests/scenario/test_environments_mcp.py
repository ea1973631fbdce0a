"""Tools of a real MCP server, as a child process on stdin and stdout, and over HTTP."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mcp
import psutil
import pytest
import treadle
from support.mesh_in_process import FakeMesh
from support.processes import free_port, import_path
from support.scripted_chat import read, scripted_chat
from treadle.environments import EnvManager, McpServer, Task, ToolUse, user

SAMPLING = treadle.Sampling(max_new_tokens=4)
COMMAND = [sys.executable, "-m", "support.mcp_server"]


def server(*arguments: str) -> mcp.StdioServerParameters:
    """Of this test's own process: a command as users give it inherits no PYTHONPATH."""
    return mcp.StdioServerParameters(
        command=COMMAND[0], args=[*COMMAND[1:], *arguments], env={"PYTHONPATH": import_path()}
    )


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def play(
    mesh: FakeMesh, source: McpServer, replies: Sequence[str], samples: int = 1
) -> Sequence[treadle.TrajectoryResult]:
    environment = ToolUse([Task("t", [user("Go.")])], [source], score=lambda *_: 1.0)
    async with mesh.client() as client:
        played = EnvManager(client, environment, chat=scripted_chat(replies), sampling=SAMPLING)
        return (await played.rollout(samples_per_prompt=samples, concurrency=1)).trajectories


def running(pids: Path) -> list[int]:
    return [int(pid) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]


async def test_all_trajectories_share_one_server_which_ends_with_the_rollout(
    mesh: FakeMesh, tmp_path: Path
) -> None:
    """Result: the second trajectory finds what the first has taken; a tool that raises, and one
    that is not there, are answers; tools that were not chosen are not shown."""
    pids = tmp_path / "pids"
    source = McpServer(server(str(pids)), only=["take", "refuse"])
    replies = [
        call("take", item="nut", count=2) + call("refuse", item="nut") + call("sleep", seconds=1),
        "done",
    ]
    first, second = await play(mesh, source, replies, samples=2)
    assert [t.error for t in (first, second)] == ["", ""]
    texts = [read(t.tokens) for t in (first, second)]
    assert all(text.startswith("['take', 'refuse']user: Go.$assistant: ~$tool: ") for text in texts)
    assert ["tool: 2$tool: error: " in texts[0], "tool: 4$tool: error: " in texts[1]] == [
        True,
        True,
    ]
    assert all("no nut for you" in text and "there is no tool 'sleep'" in text for text in texts)
    assert [span.kind for span in first.spans].count("tool") == 2
    assert len(pids.read_text().split()) == 1
    assert not running(pids)


async def test_a_server_that_keeps_state_is_started_for_each_trajectory(
    mesh: FakeMesh, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    source = McpServer(server(str(pids)), per_trajectory=True)
    trajectories = await play(mesh, source, [call("take", item="nut"), "done"], samples=2)
    assert [read(t.tokens).count("tool: 1$") for t in trajectories] == [1, 1]
    assert len(pids.read_text().split()) == 3  # one to ask what tools it has
    assert not running(pids)


async def test_a_server_that_dies_fails_the_call_and_is_there_for_the_next(mesh: FakeMesh) -> None:
    replies = [call("die"), call("take", item="nut"), "done"]
    died, went_on = await play(mesh, McpServer(server()), replies, samples=2)
    assert died.outcome == "failed"
    assert died.error.startswith(f"ConnectionError: the MCP server {COMMAND[0]}")
    assert died.error.endswith("has closed the connection during die")
    assert (went_on.outcome, went_on.error) == ("finished", "")
    assert "tool: 1$" in read(went_on.tokens)


def answering(method: str, result: str) -> McpServer:
    """A server whose result of one method is a Python expression, of `params` and `count`, how
    often the method was called before."""
    answers = f"""
    if request["method"] == "{method}":
        params, count, calls[:] = request.get("params") or {{}}, len(calls), [*calls, 0]
        answer = {{"result": {result}}}
"""
    tools = """
    if request["method"] == "tools/list":
        answer = {"result": {"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]}}
"""
    program = MUTE.replace('or request["method"] == "tools/list"', "")
    program = program.replace("    print(", f"{tools}{answers}    print(")
    return McpServer([sys.executable, "-c", f"calls = []\n{program}"])


def pages(cursors: Sequence[str | None]) -> McpServer:
    """A server of which each page of tools has one, and the next of these cursors."""
    page = '{"name": f"tool{count}", "inputSchema": {"type": "object"}}'
    more = f"dict([('nextCursor', each) for each in [{list(cursors)}[count]] if each is not None])"
    return answering("tools/list", f'{{"tools": [{page}], **{more}}}')


@pytest.mark.parametrize("last", [None, ""])
async def test_tools_on_all_pages_of_a_servers_list_are_shown(
    mesh: FakeMesh, last: str | None
) -> None:
    [t] = await play(mesh, pages(["a", "b", last]), ["done"])
    assert read(t.tokens).startswith("['tool0', 'tool1', 'tool2']user: Go.")


@pytest.mark.parametrize(("cursors", "end"), [(["a", "a"], "a"), (["a", "b", "a"], "a")])
async def test_a_list_of_tools_that_begins_again_is_refused(
    mesh: FakeMesh, cursors: Sequence[str], end: str
) -> None:
    says = rf"(?s)the MCP server .* does not end .* after {len(cursors)} pages .*cursor '{end}'"
    with pytest.raises(ConnectionError, match=says):
        await play(mesh, pages(cursors), ["done"])


async def test_a_list_of_tools_has_a_longest_length(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.environments.mcp_server.MOST_PAGES", 3)
    with pytest.raises(ConnectionError, match="after 3 pages"):
        await play(mesh, pages(["a", "b", "c", "d"]), ["done"])


IMAGE = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
RESOURCE = {"uri": "file:///notes", "mimeType": "text/plain"}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": [{"type": "resource", "resource": {**RESOURCE, "text": "Noted."}}]}, "Noted."),
        (
            {
                "content": [
                    {"type": "text", "text": "See:"},
                    {"type": "resource", "resource": {**RESOURCE, "blob": "aGk="}},
                    {"type": "resource_link", "uri": "file:///more", "name": "more"},
                    IMAGE,
                    {"type": "audio", "data": "aGk=", "mimeType": "audio/wav"},
                ]
            },
            "See:\n[resource file:///notes]\n[resource_link file:///more]\n[image]\n[audio]",
        ),
        ({"content": [], "structuredContent": {"n": 1}}, '{"n": 1}'),
        ({"structuredContent": {"n": 1}}, '{"n": 1}'),
        ({"content": [IMAGE], "structuredContent": {"n": 1}}, '[image]\n{"n": 1}'),
        ({"content": [{"type": "text", "text": "one"}], "structuredContent": {"n": 1}}, "one"),
        (
            {
                "content": [{"type": "resource", "resource": {**RESOURCE, "text": "No."}}],
                "isError": True,
            },
            "error: No.",
        ),
        ({"isError": True, "structuredContent": {"n": 1}}, 'error: {"n": 1}'),
        (
            {"content": [{"type": "video", "data": "aGk="}]},
            "error: the server's result is not of MCP: content.0.TextContent.text: Field required",
        ),
    ],
)
async def test_what_a_server_answers_is_read_in_words(
    mesh: FakeMesh, result: dict[str, Any], text: str
) -> None:
    [t] = await play(mesh, answering("tools/call", repr(result)), [call("ask"), "done"])
    assert f"~$tool: {text}$assistant" in read(t.tokens)


async def test_two_rollouts_at_once_share_the_server(mesh: FakeMesh, tmp_path: Path) -> None:
    """One environment is played twice at once, as to train and to evaluate; the first rollout ends
    while a tool runs for the second one.

    Result: neither notices the other one, and no process is left.
    """
    pids = tmp_path / "pids"
    environment = ToolUse(
        [Task("t", [user("Go.")])], [McpServer(server(str(pids)))], score=lambda *_: 1.0
    )
    short = ["done"]
    long = [call("sleep", seconds=1.0), call("take", item="nut"), "done"]
    async with mesh.client() as client:
        managers = [
            EnvManager(client, environment, chat=scripted_chat(replies), sampling=SAMPLING)
            for replies in (short, long)
        ]
        played = await asyncio.gather(*(each.rollout(samples_per_prompt=1) for each in managers))
    assert [t.error for result in played for t in result.trajectories] == ["", ""]
    assert len(pids.read_text().split()) == 1
    assert not running(pids)


async def test_an_environment_that_was_not_entered_says_so(mesh: FakeMesh) -> None:
    environment = ToolUse([Task("t", [user("Go.")])], [McpServer(server())], score=lambda *_: 1.0)
    async with mesh.client() as client:
        played = EnvManager(client, environment, chat=scripted_chat(["done"]), sampling=SAMPLING)
        [t] = (await client.rollout(played.prompts(), played, samples_per_prompt=1)).trajectories
    assert t.outcome == "failed"
    assert "async with" in t.error


MUTE = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request or request["method"] == "tools/list":
        continue
    answer = {"error": {"code": -32601, "message": "no such method"}}
    if request["method"] == "initialize":
        info = {"protocolVersion": request["params"]["protocolVersion"], "serverInfo": {"name": "mute", "version": "1"}}
        answer = {"result": {**info, "capabilities": {"tools": {}}}}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)
"""


async def test_a_server_that_does_not_say_its_tools_is_named(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hangs when it is asked for them, and one refuses."""
    says = r"(?s)the MCP server .* does not list its tools: it does not answer"
    with monkeypatch.context() as patch, pytest.raises(ConnectionError, match=says):
        patch.setattr("treadle.environments.mcp_server.OPEN_S", 5.0)
        await play(mesh, McpServer([sys.executable, "-c", MUTE]), ["done"])
    refuses = MUTE.replace('or request["method"] == "tools/list"', "")
    with pytest.raises(
        ConnectionError, match=r"(?s)the MCP server .* does not list its tools: no such method"
    ):
        await play(mesh, McpServer([sys.executable, "-c", refuses]), ["done"])


async def test_a_call_that_takes_too_long_is_an_answer(mesh: FakeMesh) -> None:
    [t] = await play(mesh, McpServer(server(), call_s=3.0), [call("sleep", seconds=60), "done"])
    assert (t.outcome, t.error) == ("finished", "")
    assert "tool: error: " in read(t.tokens)
    assert "timed out" in read(t.tokens).lower()


@contextmanager
def http_server() -> Iterator[tuple[str, list[psutil.Popen]]]:
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": import_path()}
    process = psutil.Popen([*COMMAND, str(port)], env=environment)
    try:
        yield f"http://127.0.0.1:{port}/mcp", [process]
    finally:
        process.kill()
        process.wait()


async def listens(url: str) -> None:
    port = int(url.split(":")[2].partition("/")[0])
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            await writer.wait_closed()
            return


async def test_a_server_behind_a_url_is_used_as_one_behind_a_command(mesh: FakeMesh) -> None:
    with http_server() as (url, _):
        async with asyncio.timeout(60):
            await listens(url)
        [t] = await play(mesh, McpServer(url), [call("take", item="nut", count=3), "done"])
    assert (t.outcome, t.error) == ("finished", "")
    assert "tool: 3$" in read(t.tokens)


async def test_a_server_that_is_not_there_and_a_tool_that_it_has_not_are_named(
    mesh: FakeMesh,
) -> None:
    with pytest.raises(
        ConnectionError, match=r"the MCP server http://127\.0\.0\.1:\d+/mcp cannot be reached"
    ):
        await play(
            mesh, McpServer(f"http://me:secret@127.0.0.1:{free_port()}/mcp?key=secret"), ["done"]
        )
    with pytest.raises(ConnectionError, match="cannot be reached: FileNotFoundError"):
        await play(mesh, McpServer(["/nowhere/server"]), ["done"])
    with pytest.raises(ValueError, match="has no tool give; it has take, refuse"):
        await play(mesh, McpServer(server(), only=["give"]), ["done"])
    with pytest.raises(ValueError, match="is empty"):
        McpServer([])
