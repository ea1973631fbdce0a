"""A real Chromium on a page of somebody else, with a gateway and a console on this machine: the page
can neither change nor read anything of them, and a name that leads here changes nothing."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from playwright.async_api import Browser
from support.conditions import SHUTDOWN_S
from support.console import chromium
from support.gateway import FrontDoor, front_door
from support.processes import free_port
from treadle_cli.certs import make_certificates

pytestmark = pytest.mark.timeout(600)

GROUP = {"master_address": "evil.example", "master_port": 1, "rank_offset": 1, "world_size": 3}
# What changes a mesh, with the body that does it.
CHANGES: Sequence[tuple[str, dict[str, Any]]] = [
    ("/pause_generation", {}),
    ("/engines/e0/pause_generation", {"mode": "abort"}),
    ("/abort_request", {"abort_all": True}),
    ("/update_weights_from_disk", {"model_path": "/evil"}),
    ("/init_weights_update_group", GROUP),
    ("/flush_cache", {}),
    ("/release_memory_occupation", {}),
    ("/resume_memory_occupation", {}),
    ("/sleep", {}),
    ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}),
    ("/api/control", {"action": "pause", "engine": ""}),
]
READS = ("/", "/workers", "/server_info", "/engines/e0/server_info", "/api/events", "/api/tail")
# JavaScript: try all that a page can; return the texts that it could read.
ATTACK = """async ([bases, changes, reads]) => {
  const found = [], tried = [];
  const note = (answer) => answer.text().then((text) => text && found.push(text));
  const send = (base, path, options) => tried.push(
    fetch(base + path, {signal: AbortSignal.timeout(5000), ...options}).then(note, () => {}));
  for (const base of bases) {
  for (const [path, given] of changes) {
    const body = JSON.stringify(given), method = "POST";
    for (const kind of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
      for (const mode of kind === "text/plain" ? ["no-cors", "cors"] : ["no-cors"])
        send(base, path, {method, mode, body, headers: {"Content-Type": kind}});
    send(base, path, {method, mode: "no-cors", body: new Blob([body])});
    send(base, path, {method, mode: "no-cors"});
    send(base, path, {method, mode: "no-cors", body, referrerPolicy: "no-referrer"});
    send(base, path, {method, mode: "cors", body, headers: {"Content-Type": "application/json"}});
    send(base, path, {method: "DELETE"});
    send(base, path, {mode: "no-cors", keepalive: true});
    navigator.sendBeacon(base + path, body);
    navigator.sendBeacon(base + path, new Blob([body], {type: "text/plain"}));
  }
  for (const path of [...reads, ...changes.map(([path]) => path)]) {
    send(base, path, {mode: "cors"});
    send(base, path, {mode: "cors", credentials: "include"});
    const elements = [["img", "src"], ["script", "src"], ["link", "href"],
                      ["iframe", "src"], ["object", "data"]];
    // a frame costs as much as a page: those that show what a page may read
    for (const [tag, link] of elements.slice(0, reads.includes(path) ? 5 : 3)) {
      const made = document.createElement(tag);
      if (tag === "link") made.rel = "stylesheet";
      tried.push(new Promise((done) => { made.onload = made.onerror = done; setTimeout(done, 1500); }));
      made[link] = base + path;
      document.body.append(made);
      if (tag === "iframe") tried.push(new Promise((done) => setTimeout(() => {
        try { found.push(made.contentDocument.body.textContent); } catch {}
        done();
      }, 800)));
    }
    try {
      const stream = new EventSource(base + path);
      stream.onmessage = (event) => found.push(event.data);
      const socket = new WebSocket(base.replace("http", "ws") + path);
      socket.onmessage = (event) => found.push(event.data);
      socket.onopen = () => found.push("a socket opened");
    } catch {}
  }
  for (const [path, given] of changes) {
    const form = document.createElement("form"), frame = document.createElement("iframe");
    frame.name = `frame-${base}${path}`;
    Object.assign(form, {method: "POST", action: base + path, enctype: "text/plain", target: frame.name});
    const input = document.createElement("input");
    // a text that is JSON with the sign that a form puts between name and value
    Object.assign(input, {name: JSON.stringify(given).slice(0, -1) + (Object.keys(given).length ? "," : "") + '"a":"', value: '"}'});
    form.append(input);
    document.body.append(frame, form);
    form.submit();
  }
  }
  await Promise.all(tried);
  return found.filter((text) => text);
}"""
# JavaScript: in a page that a foreign name has led to this very server.
REBOUND = """async ([changes, reads]) => {
  const found = [];
  const note = async (path, options) => {
    const answer = await fetch(path, {signal: AbortSignal.timeout(5000), ...options});
    found.push([path, answer.status, await answer.text()]);
  };
  for (const path of reads) await note(path);
  for (const [path, body] of changes)
    await note(path, {method: "POST", body: JSON.stringify(body), headers: {"Content-Type": "application/json"}});
  return found;
}"""


@dataclass
class Stranger:
    """A server of somebody else, which has a page at every path and takes whatever is sent. taken:
    methods and content types, by path."""

    port: int
    taken: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.Response:
        self.taken.setdefault(request.path, set()).add((request.method, request.content_type))
        return web.Response(
            text="<!doctype html><title>page</title><body>", content_type="text/html"
        )


@asynccontextmanager
async def stranger() -> AsyncIterator[Stranger]:
    server = Stranger(free_port())
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", server.port).start()
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


async def standing(door: FrontDoor) -> list[Any]:
    """What the attempts would change."""
    paused = [(await door.get(f"/engines/{name}/health"))["paused"] for name in door.engines]
    called = [engine.called for engine in door.engines.values()]
    asked = [engine.steps for engine in door.engines.values()]
    groups = [engine.groups for engine in door.engines.values()]
    weights = (await door.get("/model_info"))["weight_version"]
    return [paused, called, asked, groups, weights]


@pytest.mark.parametrize("secure", [False, True], ids=["plaintext", "secure"])
async def test_a_page_of_somebody_else_neither_changes_nor_reads_a_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser, secure: bool
) -> None:
    """GIVEN   a mesh with a gateway and a console that may change it
    WHEN    pages of another site, of another port of this machine, and of a name that was led here
            send all that a browser lets them send
    Result: nothing has changed, and nothing was read; the same attempts do reach a server that
            lets everybody in"""
    monkeypatch.setenv("TREADLE_CONSOLE_CONTROL_KEY", "correct-horse-battery-staple")
    certificates = make_certificates(tmp_path / "certificates") if secure else None
    async with front_door(tmp_path, certificates=certificates) as door, stranger() as other:
        console = await door.plane.start_console(base_port=0)
        context = await browser.new_context(ignore_https_errors=True)
        before = await standing(door)
        assert before[0] == [False, False]
        async with stranger() as victim:
            bases = [f"http://127.0.0.1:{victim.port}", door.url, console]
            for host in ("pages.evil.example", "127.0.0.1"):
                page = await context.new_page()
                await page.goto(f"http://{host}:{other.port}/")
                assert await page.evaluate(ATTACK, [bases, CHANGES, READS]) == [], host
                assert await standing(door) == before, host
                for path, _ in CHANGES:
                    sent = {("POST", "text/plain"), ("GET", "application/octet-stream")}
                    assert sent <= victim.taken[path], (path, victim.taken[path])
                await page.close()
        for base in (door.url, console):
            port = base.rpartition(":")[2]
            page = await context.new_page()
            scheme = base.partition(":")[0]
            await page.goto(f"{scheme}://rebound.evil.example:{port}/workers")
            answers = await page.evaluate(REBOUND, [CHANGES, READS])
            assert {status for _, status, _ in answers} == {400}, answers
            assert all("Host" in text and "e0" not in text for _, _, text in answers)
            await page.close()
        assert await standing(door) == before
        # a person who follows a link to the console still sees it
        page = await context.new_page()
        await page.goto(f"http://pages.evil.example:{other.port}/")
        await page.evaluate(
            "to => { const a = document.createElement('a'); a.href = to; a.click(); }", console
        )
        await page.get_by_text("Live").first.wait_for()
        await context.close()
