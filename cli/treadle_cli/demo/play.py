"""One rollout of the demo's work against whatever mesh listens at an address."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from treadle import Client, Prompt, RolloutEvent, Timeouts, TrajectoryResult

from treadle_cli.demo.agents import Player
from treadle_cli.demo.chatml import ChatML
from treadle_cli.demo.collect import trajectory_records
from treadle_cli.demo.facts import Heard
from treadle_cli.demo.live import LiveBoard
from treadle_cli.records import TrajectoryRecord

CLEANUP_S = 2.0  # after Ctrl-C the mesh ends too: nobody needs to wait for every trajectory's goodbye


@dataclass(frozen=True)
class Work:
    """What is played. arm: the name that its records carry. tool_latency_s: see Player."""

    arm: str
    prompts: Sequence[Prompt]
    samples: int
    chat: ChatML
    tool_latency_s: float


@dataclass(frozen=True)
class Played:
    """What came of it. started_s: unix time; opened_s: unix time by (prompt, sample)."""

    work: Work
    started_s: float
    results: Sequence[TrajectoryResult]
    opened_s: dict[tuple[str, int], float]

    def records(self, heard: Heard) -> list[TrajectoryRecord]:
        """As the run's folder keeps them, with what the bus told."""
        kinds = {prompt.id: str(prompt.data.kind) for prompt in self.work.prompts}
        return trajectory_records(self.work.arm, self.started_s, self.results, self.opened_s, kinds, heard)


async def play(scheduler: str, work: Work, display: LiveBoard) -> Played:
    """Runs all samples of all prompts at once and shows them. TreadleError where the rollout cannot be made."""
    opened_s: dict[tuple[str, int], float] = {}

    def on_event(event: RolloutEvent) -> None:
        if event.kind == "opened":
            opened_s[event.prompt_id, event.sample] = event.time_s
        display.on_event(event)

    async with Client(scheduler, timeouts=Timeouts(cleanup_s=CLEANUP_S)) as client, display:
        started_s = time.time()
        player = Player(work.chat, work.tool_latency_s)
        rollout = await client.rollout(work.prompts, player, samples_per_prompt=work.samples, on_event=on_event)
    return Played(work, started_s, rollout.trajectories, opened_s)
