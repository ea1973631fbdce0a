"""A console as a process, a mesh in front of fake engines for it to show, and a real Chromium that
looks at it."""

import asyncio
import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import treadle
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright
from support.fake_sglang import FakeSglang, fake_sglang
from support.mesh_in_process import QUICK
from support.processes import ServiceProcess, StartService, command_line, free_port
from support.scheduler import SchedulerClient, scheduler_client
from support.tools import environment

TOKEN_S = 0.01
SLOW_TOKEN_S = 0.2  # while the page is to catch what goes on
PROMPT = list(range(10, 40))
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
LAUNCH_SERVER = (sys.executable, "-m", "playwright", "launch-server", "--browser", "chromium")
WAIT_MS = 180_000.0  # a large rollout, beside whatever else this machine does
STARTS_WITHIN_S = 300.0  # the first placement on a machine compiles its kernels
WIDE, PHONE = (1280, 900), (360, 740)
RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
}


@dataclass
class ConsoleMesh:
    """url: of the console. settings: of the console, to start it again."""

    start: StartService
    url: str
    settings: dict[str, str]
    console: ServiceProcess
    scheduler: ServiceProcess
    scheduler_settings: dict[str, str]
    engines: list[FakeSglang]
    control: SchedulerClient
    client: treadle.Client

    def pace(self, token_s: float = TOKEN_S) -> None:
        """What a token takes from now on."""
        for engine in self.engines:
            engine.token_s = token_s

    async def restart_console(self) -> None:
        """SIGKILL, and another process at the same address."""
        self.console.kill()
        self.console = await self.start("treadle_console", self.settings)

    async def play(
        self, rollout_id: str, *, prompts: int = 4, samples: int = 2, keep: int = 0
    ) -> None:
        """A rollout of two turns with a tool between; of each prompt one sample is far longer."""

        async def agent(t: treadle.Trajectory, prompt: treadle.Prompt) -> float:
            for turn in range(2):
                tokens = 60 if t.sample == 0 and turn else 15
                sampling = treadle.Sampling(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
                async for _ in t.generate(sampling):
                    pass
                if turn == 0:
                    result = await t.tool("python", {"code": "import time; time.sleep(0.1)"})
                    assert result.ok, result.error
                    t.observe([7, 8])
            return 1.0

        asked = [treadle.Prompt(f"{rollout_id}-p{number}", PROMPT) for number in range(prompts)]
        await self.client.rollout(
            asked, agent, samples_per_prompt=samples, keep_per_prompt=keep, rollout_id=rollout_id
        )


async def start_console(
    start: StartService, scheduler: str, control_key: str = "", login_token: str = ""
) -> tuple[ServiceProcess, str, dict[str, str]]:
    """A console of this mesh, the address of its page, and its settings."""
    settings = {
        "TREADLE_CONSOLE_HTTP_LISTEN": f"127.0.0.1:{free_port()}",
        "TREADLE_CONSOLE_SCHEDULER": scheduler,
    }
    settings |= {"TREADLE_CONSOLE_CONTROL_KEY": control_key} if control_key else {}
    settings |= {"TREADLE_CONSOLE_LOGIN_TOKEN": login_token} if login_token else {}
    process = await start("treadle_console", settings)
    return process, f"http://{settings['TREADLE_CONSOLE_HTTP_LISTEN']}", settings


@asynccontextmanager
async def console_mesh(
    start: StartService, *, slots: int = 2, control_key: str = ""
) -> AsyncIterator[ConsoleMesh]:
    """All services as processes, two engines, and a console."""
    migrator_at, scheduler_at = (f"127.0.0.1:{free_port()}" for _ in range(2))
    names = {
        "predictor": {},
        "placement": {},
        "rollout": {},
        "tools": environment("python", CORES="2"),
    }
    names["migrator"] = {
        "TREADLE_MIGRATOR_LISTEN": migrator_at,
        "TREADLE_MIGRATOR_SCHEDULER": scheduler_at,
    }
    started = await asyncio.gather(
        *(
            start(f"treadle_{name}", own, ready_within_s=STARTS_WITHIN_S)
            for name, own in names.items()
        )
    )
    settings = {
        f"TREADLE_SCHEDULER_{n.upper()}": each.address
        for n, each in zip(names, started, strict=True)
    }
    settings["TREADLE_SCHEDULER_LISTEN"] = scheduler_at
    scheduler = await start("treadle_scheduler", settings, ready_within_s=STARTS_WITHIN_S)
    async with AsyncExitStack() as stack:
        engines = []
        for number in range(2):
            engines.append(await stack.enter_async_context(fake_sglang(token_s=TOKEN_S)))
            own = {
                "ENGINE_ID": f"e{number}",
                "ENGINE_URL": engines[-1].url,
                "SCHEDULER": scheduler_at,
            }
            own |= {
                "SLOTS": str(slots),
                "DECODE_BASE_S": str(TOKEN_S),
                "PREFILL_TOKENS_PER_S": "10000",
            }
            await start(
                "treadle_sidecar", {f"TREADLE_SIDECAR_{name}": value for name, value in own.items()}
            )
        control = await stack.enter_async_context(scheduler_client(scheduler_at))
        client = await stack.enter_async_context(
            treadle.Client(scheduler_at, retry=QUICK, job="fit-1", seed=0)
        )
        await control.until_registered(2)
        console, url, own = await start_console(start, scheduler_at, control_key)
        yield ConsoleMesh(start, url, own, console, scheduler, settings, engines, control, client)


@dataclass
class Screen:
    """A page in Chromium. problems: what its script, or the browser about it, has complained of."""

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)

    async def go(self, address: str) -> None:
        """To a page of the console, e.g. #/steps."""
        await self.page.goto(f"{self.url}/{address}")

    async def sees(self, *texts: str, within: str = "body") -> None:
        """Return once the page shows each of the texts in an element. Raises playwright's
        TimeoutError."""
        for text in texts:
            place = self.page.locator(within)
            await place.filter(has_text=text).first.wait_for(timeout=WAIT_MS)

    async def holds(self, expression: str) -> None:
        """Return once an expression of JavaScript is true."""
        await self.page.wait_for_function(expression, timeout=WAIT_MS)

    async def shoot(self, name: str, *, whole: bool = True, within: str = "") -> None:
        """Write a picture of the page, of what is in the window, or of an element, for docs/, where
        TREADLE_TEST_SCREENSHOTS names a folder."""
        if folder := os.environ.get("TREADLE_TEST_SCREENSHOTS"):
            path = Path(folder) / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            if within:
                await self.page.locator(within).screenshot(path=path, animations="disabled")
            else:
                await self.page.screenshot(path=path, full_page=whole, animations="disabled")

    async def violations(self) -> list[str]:
        """Of WCAG 2.2 AA, as far as axe finds them by itself."""
        found = await Axe().run(self.page, options=RULES)
        return [
            f"{each['id']}: {node['html']}: {node.get('failureSummary', '')}"
            for each in found.response["violations"]
            for node in each["nodes"]
        ]


def chromium_path() -> str:
    """Of the browser: TREADLE_TEST_CHROMIUM, or the first of CHROMIUM_NAMES. Skips the test where
    there is none."""
    found = os.environ.get("TREADLE_TEST_CHROMIUM") or next(
        filter(None, map(shutil.which, CHROMIUM_NAMES)), None
    )
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium, or name one by TREADLE_TEST_CHROMIUM")
    return found


@functools.cache
def browser_server() -> str:
    """Return the address of the Chromium of this run of the tests, and start it at the first call.

    It has no window, and no sandbox of its own where this user is root: Chromium refuses that.
    """
    options = {
        # Before playwright's driver, which needs a library that a browser brings.
        "executablePath": chromium_path(),
        "args": [
            "--disable-dev-shm-usage",
            # names of pages of somebody else, in tests of what such pages may do
            "--host-resolver-rules=MAP *.evil.example 127.0.0.1",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(options, file)
        file.flush()
        command = [*LAUNCH_SERVER, "--config", file.name]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        atexit.register(_end_browser, process)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
    assert address, f"no browser server: it ended with {process.wait()}"
    return address


def _end_browser(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)  # playwright then ends the browser
    process.wait()


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A connection to the Chromium of this run of the tests; at its end the browser closes what the
    connection has opened."""
    address = await asyncio.to_thread(browser_server)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect(address)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def screen(
    browser: Browser, url: str, *, size: tuple[int, int] = WIDE, dark: bool = False
) -> AsyncIterator[Screen]:
    """A new page of a console, as a person has it who was never there."""
    context = await browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    shown = Screen(page, url)
    page.on("pageerror", lambda error: shown.problems.append(f"{error}"))
    page.on(
        "console", lambda said: shown.problems.append(said.text) if said.type == "error" else None
    )
    try:
        await shown.go("")
        yield shown
    finally:
        await context.close()


def renderer_bytes() -> int:
    """Return the memory of the largest process that draws pages."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "--type=renderer" in command_line(child):
                found.append(child.memory_full_info().uss)
        except psutil.NoSuchProcess:
            continue
    return max(found)
