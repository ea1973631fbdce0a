"""The console over HTTP: what it answers, what it refuses, and how a page that comes back goes
on."""

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import aiohttp
import pytest
from support.console import start_console
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService, free_port
from treadle.telemetry.v1 import facts_pb2
from treadle_runtime.bus import Bus
from treadle_runtime.facts import make_fact

KEY, TOKEN = "correct-horse-battery-staple", "another-correct-battery-horse"
Event = tuple[str, dict[str, Any]]  # id and message


class Http:
    """Calls to a console."""

    def __init__(self, session: aiohttp.ClientSession, url: str, console: ServiceProcess) -> None:
        self._session, self.url, self.console = session, url, console

    async def get(self, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, text or JSON, and headers in lower case."""
        async with self._session.get(f"{self.url}{path}", headers=headers) as response:
            is_json = response.content_type == "application/json"
            answer = await (response.json() if is_json else response.text())
            return (
                response.status,
                answer,
                {name.lower(): value for name, value in response.headers.items()},
            )

    async def post(self, path: str, body: object = None, **headers: str) -> tuple[int, str]:
        """JSON, as a page of the console sends it. Status and error."""
        own = {"Origin": self.url, "Content-Type": "application/json", **headers}
        async with self._session.post(
            f"{self.url}{path}", data=json.dumps(body), headers=own
        ) as response:
            is_json = response.content_type == "application/json"
            return response.status, (await response.json()).get("error", "") if is_json else ""

    async def events(self, last_id: str = "") -> AsyncIterator[Event]:
        """Ids and messages of a stream."""
        headers = {"Last-Event-ID": last_id} if last_id else {}
        async with self._session.get(f"{self.url}/api/events", headers=headers) as response:
            assert response.content_type == "text/event-stream"
            name = ""
            while line := (await response.content.readline()).decode():
                if line.startswith("id: "):
                    name = line[4:].strip()
                elif line.startswith("data: "):
                    # NaN, which is no JSON
                    yield (name, json.loads(line[6:], parse_constant=pytest.fail))


@pytest.fixture
async def http(start_service: StartService) -> AsyncIterator[Http]:
    """No scheduler is there."""
    process, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}")
    # A message is one line, and the first has all.
    async with aiohttp.ClientSession(read_bufsize=2**22) as session:
        yield Http(session, url, process)


def opened(id: str) -> facts_pb2.Fact:
    return make_fact(
        "test", trajectory_opened=facts_pb2.TrajectoryOpened(trajectory_id=id, prompt_id="p")
    )


async def test_pages_run_scripts_of_the_console_alone(http: Http) -> None:
    for path in ("/", "/static/app.js", "/api/tail", "/nothing"):
        _, _, headers = await http.get(path)
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "script-src 'self'" in policy
            and "unsafe" not in policy
        )
        assert headers["x-content-type-options"] == "nosniff"


async def test_a_request_for_another_host_is_refused(http: Http) -> None:
    """A page of another site whose name leads to this address cannot read the mesh."""
    status, _, _ = await http.get("/", Host="evil.example")
    assert status == 400
    assert (await http.get("/", Host="localhost:1"))[0] == 200


async def test_nothing_changes_the_mesh(http: Http) -> None:
    """Without a key, there is nothing to call."""
    for path in ("/", "/api/events", "/api/trajectory", "/api/tail"):
        assert (await http.post(path))[0] == 405
    for key in ("", KEY):
        status, error = await http.post(
            "/api/control", {"action": "pause"}, Authorization=f"Bearer {key}"
        )
        assert status == 404 and "TREADLE_CONSOLE_CONTROL_KEY" in error


async def test_control_takes_json_of_its_own_pages_with_the_key_and_nothing_else(
    start_service: StartService,
) -> None:
    """No scheduler is there. Result: a request with all that it needs gets as far as the scheduler;
    one that lacks a part is refused before, and says what it lacks."""
    process, url, _ = await start_console(start_service, f"127.0.0.1:{free_port()}", KEY)
    async with aiohttp.ClientSession() as session:
        http = Http(session, url, process)
        host, right = url.removeprefix("http://"), f"Bearer {KEY}"
        drain = {"action": "drain", "engine": "e0"}
        assert (await http.post("/api/control", drain, Authorization=right))[0] == 502
        assert await http.post("/api/control", {"action": "check"}, Authorization=right) == (
            200,
            "",
        )
        for status, words, body, headers in (
            (401, "key", drain, {}),
            (401, "key", drain, {"Authorization": KEY}),
            (401, "key", drain, {"Authorization": f"Bearer {KEY}x"}),
            (401, "key", {"action": "check"}, {"Authorization": "Bearer ü"}),
            (403, "Origin", drain, {"Authorization": right, "Origin": "https://evil.example"}),
            (403, "Origin", drain, {"Authorization": right, "Origin": "null"}),
            (403, "Origin", drain, {"Authorization": right, "Origin": ""}),
            (403, "Origin", drain, {"Authorization": right, "Origin": "http://["}),
            (
                403,
                "Origin",
                drain,
                {"Authorization": right, "Origin": f"http://{host}.evil.example"},
            ),
            (
                400,
                "",
                drain,
                {"Authorization": right, "Host": "evil.example", "Origin": "http://evil.example"},
            ),
            (415, "Content-Type", drain, {"Authorization": right, "Content-Type": "text/plain"}),
            (400, "action", {"action": "stop"}, {"Authorization": right}),
            (400, "body", {"action": 1}, {"Authorization": right}),
            (400, "body", [], {"Authorization": right}),
            (413, "body", {"action": "drain", "engine": "e" * 600}, {"Authorization": right}),
        ):
            answer = await http.post("/api/control", body, **headers)
            assert answer[0] == status and words in answer[1], (answer, body, headers)
        async with session.options(
            f"{url}/api/control", headers={"Origin": "https://evil.example"}
        ) as response:
            assert response.status == 403
            assert not [
                name for name in response.headers if name.lower().startswith("access-control")
            ]


async def test_a_token_lets_a_browser_in_once_and_its_cookie_from_then_on(
    start_service: StartService,
) -> None:
    """Result: without token and cookie nothing is answered, not even a file; the cookie is for this
    console alone, and for no script and no other site."""
    nobody = f"127.0.0.1:{free_port()}"
    process, url, _ = await start_console(start_service, nobody, KEY, login_token=TOKEN)
    name = f"treadle-console-{url.rpartition(':')[2]}"
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
        http = Http(session, url, process)
        for path in ("/", "/api/events", "/api/tail", "/static/app.js", "/nothing", "/?token="):
            status, answer, headers = await http.get(path)
            assert status == 401 and "?token=" in answer["error"] and "set-cookie" not in headers
            assert "default-src 'none'" in headers["content-security-policy"]
        drain = {"action": "drain", "engine": "e0"}
        assert (await http.post("/api/control", drain, Authorization=f"Bearer {KEY}"))[0] == 401
        for wrong in (
            f"{name}={TOKEN[:-1]}",
            f"{name}=",
            f"treadle-console-1={TOKEN}",
            f"{name}=é",
        ):
            assert (await http.get("/", Cookie=wrong))[0] == 401
        status, page, headers = await http.get(f"/?token={TOKEN}")
        assert (status, "Treadle" in page) == (200, True)
        cookie, *limits = headers["set-cookie"].split("; ")
        assert cookie == f"{name}={TOKEN}" and set(limits) == {
            "HttpOnly",
            "SameSite=Strict",
            "Path=/",
        }
        for path in ("/", "/api/tail", "/static/app.js"):
            status, _, headers = await http.get(path, Cookie=cookie)
            assert status == 200 and "set-cookie" not in headers
        right = {"Cookie": cookie, "Authorization": f"Bearer {KEY}"}
        assert (await http.post("/api/control", drain, **right))[0] == 502, "no scheduler is there"


async def test_a_key_that_can_be_guessed_is_refused(start_service: StartService) -> None:
    for key in ("short", "with a newline\n in it", "schlüssel-schlüssel", f" {KEY}", f"{KEY} "):
        with pytest.raises(AssertionError, match="TREADLE_CONSOLE_CONTROL_KEY"):
            await start_console(start_service, f"127.0.0.1:{free_port()}", key)


async def test_names_of_the_console_are_names_of_hosts(start_service: StartService) -> None:
    """Result: a name serves in any case, and what is no name of a host ends the console with a line
    that says so."""
    settings = {"TREADLE_CONSOLE_HTTP_LISTEN": f"127.0.0.1:{free_port()}"}
    process = await start_service(
        "treadle_console", settings | {"TREADLE_CONSOLE_HTTP_HOSTS": "Mesh.Example,*.lab"}
    )
    async with aiohttp.ClientSession() as session:
        http = Http(session, f"http://{settings['TREADLE_CONSOLE_HTTP_LISTEN']}", process)
        answers = [
            (await http.get("/", Host=name))[0]
            for name in ("mesh.example", "Mesh.Example:80", "a.lab", "b.org")
        ]
        assert answers == [200, 200, 200, 400]
    for wrong in ("https://mesh.example", "mesh.example:443", "mesh.*", "mesh.example/console"):
        with pytest.raises(AssertionError, match="TREADLE_CONSOLE_HTTP_HOSTS"):
            listen = f"127.0.0.1:{free_port()}"
            settings = {"TREADLE_CONSOLE_HTTP_LISTEN": listen, "TREADLE_CONSOLE_HTTP_HOSTS": wrong}
            await start_service("treadle_console", settings)


async def read(stream: AsyncIterator[Event], until: Callable[[list[Event]], object]) -> list[Event]:
    """The events of a stream, from its first on until they are enough."""
    found: list[Event] = []
    async with aclosing(cast("AsyncGenerator[Event, None]", stream)):
        async for event in stream:
            found.append(event)
            if until(found):
                break
    return found


def ids(events: list[Event]) -> list[str]:
    return [id for _, message in events for id in message["rows"]["id"]]


async def test_a_page_that_comes_back_gets_what_it_missed_and_one_that_is_new_gets_all(
    http: Http, bus: Bus
) -> None:
    for number in range(3):
        await bus.publish(opened(f"t{number}"))
    await bus.flush()
    first = await read(http.events(), lambda events: len(set(ids(events))) == 3)
    last_id = first[-1][0]
    await bus.publish(opened("t3"))
    await bus.flush()
    missed = await read(http.events(last_id), ids)
    assert ids(missed) == ["t3"]
    assert not any(message["reset"] for _, message in missed)
    epoch = last_id.split("-")[0]
    long = f"{epoch}-{'9' * 5_000}-1-2"
    for wrong in ("", "other-1-2-3", "x", f"{epoch}-1-2", f"{epoch}-a-b-c", long):
        events = await read(http.events(wrong), ids)
        assert sorted(ids(events)) == ["t0", "t1", "t2", "t3"]
        assert events[0][1]["reset"]


async def test_a_number_that_json_does_not_know_is_null(http: Http, bus: Bus) -> None:
    """From a foreign publisher. No browser reads NaN, and the page would show nothing any more."""
    step = facts_pb2.StepRef(ticket_id="k", trajectory_id="t", engine_id="e0")
    await bus.publish(
        make_fact("test", step_queued=facts_pb2.StepQueued(step=step, priority=math.nan))
    )
    predicted = facts_pb2.TrajectoryPredicted(trajectory_id="t")
    predicted.remaining_tokens.p50, predicted.remaining_tokens.p90 = 7.0, math.inf
    await bus.publish(make_fact("test", trajectory_predicted=predicted))
    await bus.flush()
    rows = (await read(http.events(), lambda events: any(events[-1][1]["rows"]["predicted"])))[-1][
        1
    ]["rows"]
    assert (rows["priority"], rows["predicted"]) == ([None], [[0.0, 7.0, None]])


async def test_an_open_stream_does_not_hold_up_the_end_of_the_service(http: Http) -> None:
    stream = http.events()
    await anext(stream)
    http.console.terminate()
    assert await http.console.wait() == 0
    assert [message async for message in stream] == []


async def test_the_page_shows_what_happens_after_nats_was_away(
    http: Http, bus: Bus, nats_server: NatsServer
) -> None:
    nats_server.kill()
    status, _, _ = await http.get("/")
    assert status == 200
    nats_server.start()
    await bus.publish(opened("t9"))
    await bus.flush()
    await read(http.events(), lambda events: "t9" in ids(events))


async def test_a_scheduler_that_is_away_is_said(http: Http) -> None:
    events = await read(http.events(), lambda events: "scheduler" in events[-1][1]["sections"])
    assert "UNAVAILABLE" in events[-1][1]["sections"]["scheduler"]["away"]
    status, answer, _ = await http.get("/api/trajectory?id=t1")
    assert status == 502 and answer["error"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("samples=0", "samples"),
        ("variation=nan", "variation"),
        ("cap_percentile=1.5", "cap_percentile"),
        ("prompts=256&samples=256", "prompts"),
        ("wrong=1", "wrong"),
        ("mean_tokens=many", "mean_tokens"),
    ],
)
async def test_a_bad_question_about_long_tails_names_its_field(
    http: Http, query: str, field: str
) -> None:
    status, answer, _ = await http.get(f"/api/tail?{query}")
    assert status == 400 and answer["error"].startswith(field)


async def test_the_long_tail_page_answers_by_the_core(http: Http) -> None:
    """K = 16 of variation 1: the lesson prints 5.0 means for the longest."""
    _, answer, _ = await http.get(
        "/api/tail?samples=16&variation=1&prompts=4&oversample=1.5&cap_percentile=0.95"
    )
    assert round(answer["formula"], 1) == 5.0
    assert len(answer["patched"]["ends_s"]) == 4 * 24 and len(answer["plain"]["ends_s"]) == 4 * 16
    assert answer["patched"]["makespan_s"] < answer["plain"]["makespan_s"]
    assert answer["patched"]["kept"]["value"] == pytest.approx(2 / 3)
    _, answer, _ = await http.get("/api/tail?samples=50&prompts=4&oversample=1.1")
    assert len(answer["patched"]["ends_s"]) == 4 * 55, "50 times 1.1 is a little above 55 in binary"
