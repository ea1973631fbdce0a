"""The work that `treadle bench fidelity` plays, and one live play of it with steps of exactly the
lengths that it has.

A workload depends on its seed alone: samples that share prompts, a few steps each, heavy-tailed
lengths, tools that take seconds; short enough for a CPU, and its KV fits one engine, so that memory
is not tested.

In a play every trajectory is opened first. After the scheduler's first tick each trajectory's loop
runs by itself: generate (greedy, end of sequence ignored, so that lengths are exact), sleep for the
tool, observe random tokens. The simulator's clients start in the same way. Times are the client's
own, from the first opening.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from treadle import Client, Sampling, Span, Trajectory
from treadle_sim.driver import TICK_S
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload

PROMPTS, SAMPLES = 8, 3
PROMPT_TOKENS = (64, 160)
STEPS = (2, 6)
STEPS_MEAN = 3.4
GEN_TOKENS = (8, 120)  # of a step
GEN_MEDIAN = 24.0
# of ln tokens: of a prompt, of a sample, of a step
PROMPT_SIGMA, SAMPLE_SIGMA, STEP_SIGMA = (0.7, 0.3, 0.5)
OBS_TOKENS = (10, 60)  # of a tool's answer
TOOL_S = (0.3, 3.0)
TOOL_MEDIAN_S, TOOL_SIGMA = 0.8, 0.7
STREAM = 1  # of the seeds' streams: the first whose traces all take about 50 s on two cores
HIGHEST_TOKEN_ID = 40_000  # below the vocabulary of any model that runs on a CPU here


def make_workload(seed: int) -> Workload:
    """PROMPTS times SAMPLES trajectories."""
    rng = np.random.default_rng([seed, STREAM])
    works = []
    for number in range(PROMPTS):
        prompt_tokens = int(rng.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1))
        of_prompt = PROMPT_SIGMA * rng.standard_normal()
        for sample in range(SAMPLES):
            level = of_prompt + SAMPLE_SIGMA * rng.standard_normal()
            count = int(
                np.clip(rng.geometric(1.0 / (STEPS_MEAN - STEPS[0] + 1.0)) + STEPS[0] - 1, *STEPS)
            )
            steps = tuple(_step(rng, level) for _ in range(count))
            works.append(TrajectoryWork(f"p{number}", sample, prompt_tokens, steps))
    return Workload(f"fidelity-{seed}", tuple(works))


def token_ids(work: TrajectoryWork, salt: str) -> tuple[list[int], list[list[int]]]:
    """Random tokens of the prompt and of each tool's answer. Samples of a prompt share its tokens;
    another `salt` gives other tokens."""
    prompt = random.Random(f"{salt} {work.prompt_id}")
    own = random.Random(f"{salt} {work.prompt_id} {work.sample}")
    observed = [
        [own.randrange(HIGHEST_TOKEN_ID) for _ in range(step.obs_tokens)] for step in work.steps
    ]
    return [prompt.randrange(HIGHEST_TOKEN_ID) for _ in range(work.prompt_tokens)], observed


def _step(rng: np.random.Generator, level: float) -> Step:
    gen_tokens = GEN_MEDIAN * np.exp(level + STEP_SIGMA * rng.standard_normal())
    tool_s = TOOL_MEDIAN_S * np.exp(TOOL_SIGMA * rng.standard_normal())
    return Step(
        gen_tokens=int(np.clip(round(gen_tokens), *GEN_TOKENS)),
        obs_tokens=int(rng.integers(OBS_TOKENS[0], OBS_TOKENS[1] + 1)),
        tool_s=float(np.clip(tool_s, *TOOL_S)),
    )


# after the first opening: a tick, and the plan that is asked for at it
FIRST_STEPS_S = TICK_S + 0.05


@dataclass(frozen=True, slots=True)
class Played:
    """One trajectory; seconds since the start of the play. spans: queue, prefill, decode and
    tool."""

    finished_s: float
    spans: tuple[Span, ...]
    preemptions: int

    def part_s(self, kind: str) -> float:
        """Seconds of all its spans of one kind."""
        return sum(span.end_s - span.start_s for span in self.spans if span.kind == kind)

    @property
    def engines(self) -> tuple[str, ...]:
        """Engine of each step, in order; a step that changed engines counts with its last."""
        last = {span.turn: span.engine_id for span in self.spans if span.kind == "decode"}
        return tuple(last[turn] for turn in sorted(last))


@dataclass(frozen=True, slots=True)
class Play:
    """One rollout, live or simulated; trajectories in the workload's order. others_share: the
    fraction of the machine that other programs used meanwhile."""

    trajectories: tuple[Played, ...]
    migrations: int
    others_share: float = 0.0

    @property
    def ends_s(self) -> np.ndarray:
        """When each trajectory ended."""
        return np.array([played.finished_s for played in self.trajectories])

    @property
    def service_s(self) -> np.ndarray:
        """Seconds of each trajectory on engines."""
        return np.array(
            [played.part_s("prefill") + played.part_s("decode") for played in self.trajectories]
        )

    @property
    def makespan_s(self) -> float:
        """When the last trajectory ended."""
        return float(self.ends_s.max())


async def play_live(scheduler: str, workload: Workload, salt: str) -> tuple[Played, ...]:
    """Play all trajectories at once. salt: of the random tokens. Raises TreadleError, ValueError
    for a wrong length."""
    async with Client(scheduler) as client:
        started_s = time.time()
        opened = []
        for work in workload.trajectories:
            prompt, observed = token_ids(work, salt)
            trajectory = await client.open(
                prompt_id=work.prompt_id,
                sample=work.sample,
                prompt=prompt,
                rollout_id=workload.name,
                max_total_tokens=workload.max_total_tokens,
            )
            opened.append((trajectory, work, observed))
        await asyncio.sleep(started_s + FIRST_STEPS_S - time.time())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run(*each, started_s)) for each in opened]
    return tuple(task.result() for task in tasks)


async def _run(
    trajectory: Trajectory,
    work: TrajectoryWork,
    observed: Sequence[Sequence[int]],
    started_s: float,
) -> Played:
    tools = []
    for turn, step in enumerate(work.steps):
        await generate(trajectory, step.gen_tokens)
        tool_began_s = time.time()
        await asyncio.sleep(step.tool_s)
        tools.append(Span("tool", tool_began_s, time.time(), "", turn))
        trajectory.observe(observed[turn])
    finished_s = time.time()
    await trajectory.close()
    spans = sorted((*trajectory.spans, *tools), key=lambda span: span.start_s)
    return Played(
        finished_s=finished_s - started_s,
        spans=tuple(
            replace(span, start_s=span.start_s - started_s, end_s=span.end_s - started_s)
            for span in spans
        ),
        preemptions=sum(step.preemptions for step in trajectory.steps),
    )


async def generate(trajectory: Trajectory, gen_tokens: int) -> list[float]:
    """Run one step of exactly `gen_tokens` tokens; the unix time of each of its chunks. Raises
    ValueError."""
    sampling = Sampling(max_new_tokens=gen_tokens, temperature=0.0, ignore_eos=True)
    came_s = [time.time() async for _ in trajectory.generate(sampling)]
    if len(trajectory.steps[-1].token_ids) != gen_tokens:
        raise ValueError(
            f"a step came to {len(trajectory.steps[-1].token_ids)} tokens instead of {gen_tokens}"
        )
    return came_s
