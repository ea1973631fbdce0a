"""Show a play while it runs: what is finished, each engine's running and waiting steps, tokens a
second, time left.

On a terminal it redraws in place, otherwise it prints a line every few seconds. Nothing waits for
it.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Self

import grpc
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from treadle import Prompt, RolloutEvent
from treadle.certificates import open_channel
from treadle.engine.v1 import engine_pb2, engine_pb2_grpc

from treadle_cli.mesh.mesh import Board
from treadle_cli.scheduler import own_certificates

POLL_S = 1.0  # between requests to the sidecars
POLL_TIMEOUT_S = 2.0
LEAST_PART_FOR_ESTIMATE = 0.1  # share of turns: before that an estimate of the time left is a guess
PLAIN_LINE_S = 10.0  # between lines where there is no terminal


class LiveBoard(Board):
    """Display of one rollout, an async context manager, which passes its events to `on_event`."""

    def __init__(
        self,
        console: Console,
        title: str,
        prompts: Sequence[Prompt],
        samples: int,
        sidecars: Mapping[str, str],
    ) -> None:
        super().__init__(console)
        self._title, self._total, self._sidecars = title, len(prompts) * samples, sidecars
        self._turn_limits = {prompt.id: prompt.data.turns for prompt in prompts}
        columns = (
            TextColumn("[bold]{task.description}[/bold]"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._bar = self._progress.add_task(title, total=self._total, left="")
        self._loads: dict[str, engine_pb2.Load | None] = {}
        self._tokens: dict[str, int] = {}
        self._part_done: dict[tuple[str, int], float] = {}
        self._closed = 0
        self._started_s = time.monotonic()
        self._live = Live(get_renderable=self._picture, console=console, refresh_per_second=4)

    async def __aenter__(self) -> Self:
        self._started_s = time.monotonic()
        if self.console.is_terminal:
            self._live.start()
        self._polling = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._polling.cancel()
        await asyncio.wait([self._polling])
        if self.console.is_terminal:
            self._live.stop()
        elif kind is None:
            self._print_line()

    def on_event(self, event: RolloutEvent) -> None:
        """Update the display from an event of the client."""
        if event.trajectory_id:
            self._tokens[event.trajectory_id] = event.gen_tokens
        if event.kind == "settled":
            return
        closed = event.kind == "closed"
        turns_done = event.turns / self._turn_limits[event.prompt_id]
        self._part_done[event.prompt_id, event.sample] = 1.0 if closed else min(turns_done, 0.99)
        self._closed += closed
        self._progress.update(self._bar, completed=self._closed, left=self._left())

    def _left(self) -> str:
        """Return the time left, roughly an upper bound: as if every trajectory used all its
        turns."""
        part = sum(self._part_done.values()) / self._total
        if part < LEAST_PART_FOR_ESTIMATE:
            return ""
        left_s = (time.monotonic() - self._started_s) * (1 - part) / part
        return f"about {left_s:.0f} s left"

    def _picture(self) -> Group:
        return Group(
            self._progress,
            *[Text.from_markup(f"  {figure}", style="dim") for figure in self._figures()],
        )

    def _figures(self) -> list[str]:
        tokens = sum(self._tokens.values())
        tokens_per_s = tokens / max(time.monotonic() - self._started_s, 1e-3)
        return [f"{tokens} tokens, {tokens_per_s:.0f} tok/s"] + [
            f"{engine_id} [red]lost[/red]"
            if load is None
            else f"{engine_id} {load.running_steps}/{load.slot_limit} running, "
            f"{load.waiting_steps} waiting"
            for engine_id, load in self._loads.items()
        ]

    def _print_line(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        engines = Text.from_markup(" · ".join(self._figures())).plain
        line = (
            f"{self._title}: {self._closed}/{self._total} trajectories after {elapsed_s:.0f} "
            f"s; {engines}"
        )
        self.console.print(line, highlight=False, soft_wrap=True)

    async def _poll(self) -> None:
        """Request the sidecars' loads until cancelled."""
        printed_s = time.monotonic()
        certificates = own_certificates()
        channels = {
            name: open_channel(at, "sidecar", certificates) for name, at in self._sidecars.items()
        }
        try:
            while True:
                for engine_id, channel in channels.items():
                    self._loads[engine_id] = await _load(channel)
                if not self.console.is_terminal and time.monotonic() - printed_s >= PLAIN_LINE_S:
                    printed_s = time.monotonic()
                    self._print_line()
                await asyncio.sleep(POLL_S)
        finally:
            for channel in channels.values():
                await channel.close()


async def _load(channel: grpc.aio.Channel) -> engine_pb2.Load | None:
    """Return the load of an engine; None where it or its sidecar is gone."""
    stub = engine_pb2_grpc.EngineServiceStub(channel)
    try:
        answer = await stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=POLL_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    load: engine_pb2.Load = answer.load
    return load if load.engine_healthy else None
