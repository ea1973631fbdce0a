"""Live asynchronous trainings of `treadle bench async-live`: a trainer that only waits and
publishes, over a rollout of Treadle, or over one that a framework drives itself.

A framework's driver begins whole groups while its samples have room, in the order of the prompts.
It drops a group, running or complete, once the weights are more than `bound` versions newer than
those of its first token, and gives the oldest complete groups to the trainer. Its steps go through
the same services and engines, under the policy that the bench has set.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import treadle
from treadle import Client, Sampling, Trajectory
from treadle.connection import finish
from treadle.types import Outcome
from treadle_sim.workloads.workload import TrajectoryWork, Workload, groups

from treadle_bench.fidelity.live import token_ids


@dataclass(frozen=True, slots=True)
class LivePlan:
    """batch_groups: of a batch, which makes one version. train_s: of its training. batches: that
    are counted, after `warm_up` others."""

    batch_groups: int
    train_s: float
    bound: int
    batches: int
    warm_up: int


@dataclass(frozen=True, slots=True)
class Taken:
    """One batch: when it was taken, and the sampled tokens of each of its samples. behind: versions
    by which its groups' first tokens were older than the newest weights."""

    at_s: float
    tokens: Sequence[int]
    behind: Sequence[int]


# Gives a batch to the trainer, which is at this version.
Take = Callable[[int], Awaitable[Taken]]
# Serves new weights under this version.
Publish = Callable[[int], Awaitable[None]]


async def train(plan: LivePlan, first: int, take: Take, publish: Publish) -> list[Taken]:
    """Take all batches, beginning with the weights of version `first`; publish one version after
    each but the last."""
    taken = [await take(first)]
    for version in range(first + 1, first + plan.warm_up + plan.batches):
        await asyncio.sleep(plan.train_s)
        await publish(version)
        taken.append(await take(version))
    return taken


async def play_sample(
    trajectory: Trajectory,
    work: TrajectoryWork,
    observed: Sequence[Sequence[int]],
    note_tokens: Callable[[], object] = lambda: None,
) -> None:
    """Sample the tokens of each turn, then wait for its tool. note_tokens: called as they come.
    Raises TreadleError."""
    for step, answer in zip(work.steps, observed, strict=True):
        sampling = Sampling(max_new_tokens=step.gen_tokens, temperature=0.0, ignore_eos=True)
        async for _ in trajectory.generate(sampling):
            note_tokens()
        await asyncio.sleep(step.tool_s)
        trajectory.observe(answer)


async def train_with_treadle(
    client: Client, workload: Workload, salt: str, plan: LivePlan, first: int, publish: Publish
) -> list[Taken]:
    """Train on a rollout that keeps its pace: what a user of Client.rollout gets."""
    members = groups(workload.trajectories)
    works = {(work.prompt_id, work.sample): work for work in workload.trajectories}
    prompts = [treadle.Prompt(name, token_ids(each[0], salt)[0]) for name, each in members.items()]
    rollout_id = f"async-{uuid.uuid4().hex}"

    async def agent(trajectory: Trajectory, prompt: treadle.Prompt) -> float:
        work = works[prompt.id, trajectory.sample]
        await play_sample(trajectory, work, token_ids(work, salt)[1])
        return 0.0

    async def take(version: int) -> Taken:
        while True:
            try:
                batch = await client.get_batch(rollout_id, plan.batch_groups, version)
            except treadle.TreadleError as error:
                if error.reason != "ROLLOUT_NOT_FOUND":
                    raise
                await asyncio.sleep(0.05)  # it is being created
                continue
            if len(batch.groups) < plan.batch_groups:
                raise RuntimeError("the workload had too few groups")
            trajectories = [each for group in batch.groups for each in group.trajectories]
            return Taken(
                time.monotonic(),
                [sum(each.loss_mask) for each in trajectories],
                [version - _oldest(each, first) for each in trajectories],
            )

    async with asyncio.TaskGroup() as tasks:
        rollout = tasks.create_task(
            client.rollout(
                prompts,
                agent,
                samples_per_prompt=len(next(iter(members.values()))),
                max_staleness=plan.bound,
                rollout_id=rollout_id,
                shaping=treadle.Shaping(batch_groups=plan.batch_groups),
            )
        )
        taken = await train(plan, first, take, publish)
        rollout.cancel()
    return taken


def _oldest(trajectory: treadle.TrainingTrajectory, first: int) -> int:
    versions = [span.weight_version for span in trajectory.version_spans]
    return min((int(each) for each in versions if each.isdecimal()), default=first)


@dataclass
class _Group:
    """version: of its first token, once it has one."""

    works: Sequence[TrajectoryWork]
    version: int
    has_begun: bool = False
    task: "asyncio.Task[None] | None" = None


@dataclass
class Framework:
    """Driver of a rollout that a framework has in its own process. in_flight: samples that may run
    or wait. by_samples: a sample that has ended leaves its place at once, not with its group."""

    client: Client
    workload: Workload
    salt: str
    plan: LivePlan
    in_flight: int
    by_samples: bool
    version: int
    open: list[_Group] = field(default_factory=list)
    complete: list[_Group] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def train(self, publish: Publish) -> list[Taken]:
        """Train on the rollout. Raises TreadleError, RuntimeError where the workload has too few
        groups."""

        async def publish_and_drop(version: int) -> None:
            await publish(version)
            self.version = version
            for group in [*self.open, *self.complete]:
                if group.has_begun and version - group.version > self.plan.bound:
                    await self._drop(group)

        async with asyncio.TaskGroup() as tasks:
            filling = tasks.create_task(self._fill())
            taken = await train(self.plan, self.version, self._take, publish_and_drop)
            filling.cancel()
        return taken

    async def _fill(self) -> None:
        places = asyncio.Semaphore(self.in_flight)
        async with asyncio.TaskGroup() as tasks:
            for works in groups(self.workload.trajectories).values():
                for _ in works:
                    await places.acquire()
                group = _Group(works, self.version)
                self.open.append(group)
                group.task = tasks.create_task(self._play_group(group, places))
        raise RuntimeError("the workload had too few groups")

    async def _play_group(self, group: _Group, places: asyncio.Semaphore) -> None:
        left = len(group.works)

        async def play(work: TrajectoryWork) -> None:
            nonlocal left
            await self._play_sample(group, work)
            if self.by_samples:
                left -= 1
                places.release()

        try:
            async with asyncio.TaskGroup() as samples:
                for work in group.works:
                    samples.create_task(play(work))
            self.complete.append(group)
            self.changed.set()
        finally:
            self.open.remove(group)
            for _ in range(left):
                places.release()

    async def _play_sample(self, group: _Group, work: TrajectoryWork) -> None:
        prompt, observed = token_ids(work, self.salt)
        trajectory = await self.client.open(
            prompt_id=work.prompt_id, sample=work.sample, prompt=prompt
        )

        def begin() -> None:
            if not group.has_begun:
                group.has_begun, group.version = True, self.version

        outcome: Outcome = "cancelled"
        try:
            await play_sample(trajectory, work, observed, begin)
            outcome = "finished"
        finally:
            await finish(trajectory.close(outcome=outcome))

    async def _take(self, version: int) -> Taken:
        while len(self.complete) < self.plan.batch_groups:
            self.changed.clear()
            await self.changed.wait()
        self.complete.sort(key=lambda group: group.version)
        batch = [self.complete.pop(0) for _ in range(self.plan.batch_groups)]
        works = [work for group in batch for work in group.works]
        behind = [version - group.version for group in batch for _ in group.works]
        return Taken(time.monotonic(), [work.gen_tokens for work in works], behind)

    async def _drop(self, group: _Group) -> None:
        if group in self.complete:
            self.complete.remove(group)
        elif group.task is not None:
            group.task.cancel()
            await asyncio.wait({group.task})
