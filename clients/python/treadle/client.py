"""Open trajectories in a mesh, run rollouts and take training batches, with treadle.Client.

One address is enough. Leaving the `async with` block closes every open trajectory and every
channel; a call of another task that is in flight then raises TreadleError CLIENT_CLOSED. A client
serves one event loop and any number of tasks on it: the loop must not stand still for longer than
the scheduler's JOB_LEASE_S (45 s) while trajectories are open, as the client renews its lease from
it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from treadle.certificates import Certificates
from treadle.connection import (
    CLIENT_CLOSED,
    Mesh,
    RetryPolicy,
    Timeouts,
    TrajectoryTrace,
    finish,
    request_id,
)
from treadle.errors import TreadleError
from treadle.jobs import Job, policy_message
from treadle.rewards import PendingReward, request_reward
from treadle.rollouts.batches import confirm_batch, take_batch
from treadle.rollouts.declare import RolloutArguments, require_declared
from treadle.rollouts.progress import show_progress
from treadle.rollouts.run import Agent, RolloutRun
from treadle.rollouts.running_tokens import read_tokens
from treadle.rollouts.samples import check_part, read_shaping
from treadle.scheduler.v1 import scheduler_pb2
from treadle.trajectory import GONE, OnChange, Trajectory, undo_opening
from treadle.types import (
    Batch,
    HardwareTags,
    Policy,
    Prompt,
    RolloutEvent,
    RolloutResult,
    RunningTokens,
    Shaping,
    ShapingReport,
    TrajectoryEnded,
    checked_ids,
)
from treadle.weights import FleetCalls

# Some 10 to 20 seconds of decoding, which cost one ticket and the prefill of one token (ADR 0011).
CALL_TOKENS = 1_024
TOKEN_INTERVAL_S, LONGEST_TOKEN_INTERVAL_S = 0.05, 10.0  # of a sidecar


class Client(FleetCalls):
    """A client of the mesh whose scheduler listens at `address` (host:port; several processes: with
    commas between).

    timeouts: deadlines of logical calls. retry: how attempts are spaced. tls_folder: of this
    client's certificate (`treadle.certificates`); None: TREADLE_TLS_FOLDER, and plaintext where
    that is not set. interceptors: of grpc.aio, e.g. OpenTelemetry's, for spans of each call. seed:
    of the jitter. call_tokens: a turn longer than this is generated in several calls with a ticket
    each, so that its trajectory is ranked again and may move in the middle of it; the caller sees
    one step. 0 for one call a turn. token_interval_s: sampled tokens are sent together after so
    long, at most 10 s; 0 sends each at once, for a person who watches. A longer interval spares a
    process with thousands of trajectories work, and tokens that were not sent are sampled again
    where an engine is lost. job: whose share of the engines and of the pooled rewards this client
    uses, e.g. the name of the training run; of rewards, each rollout without one is a job. weight:
    of the job's share of slots and KV, while other jobs want them too; all clients of one name have
    one share, of the largest weight given, and all without a name have one of weight 1; None: 1, or
    that of the job which is resumed. policy: how the job's trajectories are ranked and placed;
    None: as the mesh is set, or as the job which is resumed. resume: continue the rollouts that a
    client of the same job, which died or was interrupted, has begun and not ended (see `rollout`);
    of several clients of a job, one at a time resumes it. Raises ValueError.

    When a client dies, the scheduler closes its trajectories as failed once its lease has ended,
    with or without resume: their tokens were in the dead process, and what they hold blocks others.
    A client that resumes the job has them closed at once; where the earlier client still lives, its
    calls raise TreadleError JOB_TAKEN_OVER. Resume keeps the rollout with all submitted samples,
    for JOB_RESUME_S of the scheduler (a day).
    """

    def __init__(
        self,
        address: str,
        *,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        tls_folder: str | Path | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
        seed: int | None = None,
        call_tokens: int = CALL_TOKENS,
        token_interval_s: float = TOKEN_INTERVAL_S,
        job: str = "",
        resume: bool = False,
        weight: float | None = None,
        policy: Policy | None = None,
    ) -> None:
        if weight is not None and not (job and 0.0 < weight < math.inf):
            need = (
                f"must be a finite number > 0, is {weight}"
                if job
                else "needs job=...: the name whose share it is of"
            )
            raise ValueError(f"weight {need}")
        if resume and not job:
            raise ValueError(
                "resume=True needs job=...: the name by which the next client finds its rollouts"
            )
        if call_tokens < 0:
            raise ValueError(
                f"call_tokens must be >= 0, is {call_tokens}; 0 generates each turn in one call"
            )
        if not 0 <= token_interval_s <= LONGEST_TOKEN_INTERVAL_S:
            limit = f"must be from 0 to {LONGEST_TOKEN_INTERVAL_S:g} s, is {token_interval_s:g} s"
            raise ValueError(f"token_interval_s {limit}; 0 sends each token at once")
        self._connect = partial(
            Mesh,
            address,
            Certificates(tls_folder) if tls_folder else Certificates.of_environment(),
            interceptors,
            timeouts or Timeouts(),
            retry or RetryPolicy(),
            random.Random(seed),
            call_tokens,
            token_interval_s,
            job,
        )
        self._open_job = partial(
            Job,
            resume=resume,
            weight=weight or 0.0,
            policy=policy_message(policy) if policy is not None else None,
        )
        self._mesh: Mesh | None = None
        self._job: Job | None = None
        self._open: set[Trajectory] = set()

    async def __aenter__(self) -> Client:
        self._mesh = self._connect()
        self._job = self._open_job(self._mesh)
        return self

    async def __aexit__(self, *_: object) -> None:
        await finish(self._close())

    async def open(
        self,
        *,
        prompt_id: str,
        sample: int,
        prompt: Sequence[int],
        rollout_id: str = "",
        max_total_tokens: int = 0,
        hardware_tags: Sequence[str] = (),
        pinned_engine_id: str = "",
        asynchronous: bool = False,
        group_keep: int = 0,
        on_change: OnChange | None = None,
    ) -> Trajectory:
        """Open a trajectory.

        prompt: token ids, at least one. max_total_tokens: cap on generated tokens of all turns, 0
        for none. hardware_tags: only engines that carry all of them run it; while none does, its
        steps wait, and once that is so for MISSING_TAGS_S of the scheduler (180 s) they raise
        NO_ENGINE_WITH_TAGS. pinned_engine_id: run there and never migrate. asynchronous: its
        trainer takes groups as they end, so that trajectories go first come, first served and do
        not move. group_keep: the first so many samples of the prompt are needed, and the others run
        where a slot is free; 0: all. on_change: called after each step and tool call. Errors:
        TypeError, ValueError; TreadleError INVALID_ARGUMENT with field_violations.
        """
        prompt = checked_ids("prompt", prompt)
        if isinstance(hardware_tags, str):  # it is a sequence too: of its letters
            raise TypeError(
                f"hardware_tags must be a sequence of tags such as ({hardware_tags!r},), is a text"
            )
        mesh, job = self._connected()
        request = scheduler_pb2.OpenTrajectoryRequest(
            request_id=request_id(),
            rollout_id=rollout_id,
            prompt_id=prompt_id,
            sample=sample,
            prompt_tokens=len(prompt),
            max_total_tokens=max_total_tokens,
            hardware_tags=hardware_tags,
            pinned_engine_id=pinned_engine_id,
            asynchronous=asynchronous,
            group_keep=group_keep,
        )

        async def admit() -> Trajectory:
            trace = TrajectoryTrace()
            opened = await job.open_trajectory(request, trace)
            trajectory = Trajectory(
                mesh, opened, prompt, max_total_tokens, on_change, self._open.discard, trace
            )
            self._open.add(trajectory)
            return trajectory

        admission = asyncio.get_running_loop().create_task(admit())
        try:
            await asyncio.wait({admission})
        except asyncio.CancelledError:
            # Without a caller, the answer would leave a trajectory open that no code closes.
            await finish(undo_opening(admission, mesh.timeouts.cleanup_s))
            raise
        return admission.result()

    async def rollout(
        self,
        prompts: Sequence[Prompt],
        agent: Agent,
        samples_per_prompt: int | None = None,
        keep_per_prompt: int | None = None,
        max_staleness: int | None = None,
        concurrency: int | None = None,
        on_event: Callable[[RolloutEvent], None] | None = None,
        max_total_tokens: int | None = None,
        pin: Callable[[Prompt, int], str] | None = None,
        rollout_id: str = "",
        part: tuple[int, int] = (0, 1),
        shaping: Shaping | None = None,
        stream_tokens: int = 0,
        hardware_tags: HardwareTags | None = None,
        progress: bool = False,
    ) -> RolloutResult:
        """Run `agent(trajectory, prompt)` on each sample of each prompt, and submit each that has
        finished.

        The agent returns the reward, None, or the PendingReward of Trajectory.score: then its
        trajectory is closed at once and submitted when the score is there. It may close the
        trajectory itself with another outcome. An agent that raises fails its trajectory alone.
        Raises ValueError, and TreadleError where the rollout cannot be created.

        An argument that is None is what the agent declares (`treadle.agent`), or else its default:

        - samples_per_prompt: 4. keep_per_prompt: a group settles once so many are submitted, and
          its other samples are ended, whatever their agents do; 0, the default: all. shaping: other
          rules for both; see Shaping.
        - max_staleness: weight versions that a kept token may lag behind at get_batch; -1, the
          default: no bound.
        - concurrency: trajectories open at once; 0, the default: all. max_total_tokens: cap of a
          trajectory; 0: none.
        - hardware_tags: of all trajectories, or (prompt, sample) -> tags; see `open`. pin: (prompt,
          sample) -> the engine_id to run on, without moves.
        - on_event: called from the event loop, must not block. progress: show a bar (needs tqdm).
        - stream_tokens: each running trajectory sends so many new tokens at a time to readers of
          Client.stream_tokens; 0: none.

        Cancelling the caller aborts every step, closes every trajectory as "cancelled", and cancels
        the rollout unless the client resumes its job. With Client(resume=True), the call continues
        a rollout of the same prompts (by id, in order) and parameters that was begun in this job,
        and whose call never returned, also in a new process: submitted samples are not run again
        (`TrajectoryResult.submitted_before`), nor those of settled groups; all others run from
        their prompts. After a call that has returned, the same call runs a new rollout, or, with a
        rollout_id, returns what was submitted to it.

        One process plays some thousand trajectories at once. For more, several processes work on
        one rollout together, each in a client of its own: all give the same rollout_id, prompts and
        parameters, and the i-th of n, from 0, gives part=(i, n), runs every n-th sample and returns
        those. The first one creates the rollout; a group settles with the samples of all; a call
        that is cancelled leaves the rollout to the others.
        """
        check_part(part)
        count = part[1]
        if count > 1 and not rollout_id:
            raise ValueError(
                "part needs rollout_id=...: the name by which the other processes find the rollout"
            )
        if stream_tokens < 0:
            raise ValueError(f"stream_tokens must be >= 0, is {stream_tokens}; 0 streams none")
        arguments = RolloutArguments.of(
            agent,
            samples_per_prompt=samples_per_prompt,
            keep_per_prompt=keep_per_prompt,
            max_staleness=max_staleness,
            concurrency=concurrency,
            max_total_tokens=max_total_tokens,
            shaping=shaping,
            hardware_tags=hardware_tags,
        )
        spec, tags, (mesh, job) = (
            arguments.spec(prompts),
            arguments.hardware_tags,
            self._connected(),
        )
        await require_declared(mesh, agent)
        samples = len(prompts) * arguments.samples_per_prompt // count
        with show_progress(samples, on_event) if progress else nullcontext(on_event) as shown:
            run = RolloutRun(
                mesh, job, self.open, agent, spec, shown, pin, tags, rollout_id, part, stream_tokens
            )
            return await run.run(prompts, arguments.concurrency)

    async def score(
        self, trajectory_id: str, reward: str, arguments: Mapping[str, Any], job: str = ""
    ) -> PendingReward:
        """Request a reward for a trajectory that has ended; return once the request is accepted.

        reward: the name of a reward function of the tools service. arguments: what it reads, see
        its schema. job: whose share of the pool, default this client's. Errors: TreadleError
        NOT_FOUND REWARD_FUNCTION_NOT_FOUND, INVALID_ARGUMENT with field_violations.
        """
        mesh, _ = self._connected()
        return await request_reward(mesh, trajectory_id, reward, arguments, job or mesh.job)

    async def get_batch(
        self,
        rollout_id: str,
        max_groups: int = 2,
        weight_version: int = 0,
        wait: bool = True,
        timeout_s: float | None = None,
        wait_at_most_s: float = 0.0,
        batch_id: str = "",
        part: tuple[int, int] = (0, 1),
    ) -> Batch:
        """Take up to max_groups settled groups for training, oldest first, none staler than the
        rollout's bound.

        weight_version: the trainer's present one. wait: for max_groups rather than answer with
        fewer, up to timeout_s (default timeouts.batch_s), or for wait_at_most_s, after which the
        batch has what there is. batch_id: a name, such as that of the training step, under which
        the same call gives the same batch again, also to a trainer that was killed and started
        again, until `confirm_batch`; without it the batch is confirmed as soon as it has arrived.
        Ranks of one trainer share a batch: each gives the same arguments, a batch_id, and the i-th
        of n part=(i, n), from 0; each gets other groups, about as many and as large as the others.
        Errors: ValueError; TreadleError NOT_FOUND ROLLOUT_NOT_FOUND, DEADLINE_EXCEEDED,
        INVALID_ARGUMENT where a repeat has other parameters, FAILED_PRECONDITION BATCH_EXPIRED.
        """
        mesh, _ = self._connected()
        return await take_batch(
            *(mesh, rollout_id),
            max_groups=max_groups,
            weight_version=weight_version,
            wait=wait,
            wait_at_most_s=wait_at_most_s,
            batch_id=batch_id,
            part=part,
            timeout_s=timeout_s or mesh.timeouts.batch_s,
        )

    async def confirm_batch(
        self, rollout_id: str, batch_id: str, part: tuple[int, int] = (0, 1)
    ) -> None:
        """Remove the tokens of a batch, or of one rank's part of it, after training; it cannot be
        repeated afterwards, and a second call does nothing. Errors: TreadleError NOT_FOUND
        (ROLLOUT_NOT_FOUND, BATCH_NOT_FOUND)."""
        mesh, _ = self._connected()
        await confirm_batch(mesh, rollout_id, batch_id, part)

    async def stream_tokens(
        self, rollout_id: str, min_tokens: int = 1, part: tuple[int, int] = (0, 1)
    ) -> AsyncIterator[RunningTokens | TrajectoryEnded]:
        """Read the tokens of trajectories while they run, so that a forward pass need not wait for
        their ends (DARTS, section 4.3.2); end with the rollout. Its clients must push them:
        Client.rollout(stream_tokens=...).

        min_tokens: of each piece. The rest at a trajectory's end, and what is trained on, comes
        with its batch. A piece whose start_token lies before the end of the earlier pieces replaces
        what they had from there on. part: ranks that share the work, the i-th of n, from 0, have
        every n-th prompt; a batch may give a trajectory to another rank. Ends of trajectories
        during a restart of the service are not reported. Errors: ValueError; TreadleError
        NOT_FOUND.
        """
        mesh, _ = self._connected()
        async for event in read_tokens(mesh, rollout_id, min_tokens, part):
            yield event

    async def shaping_report(self, rollout_id: str = "", history: str = "") -> ShapingReport:
        """Report what shaping does to the distribution that is trained on: of a rollout, or of all
        rollouts of a history that are over. Errors: ValueError; TreadleError NOT_FOUND
        ROLLOUT_NOT_FOUND | HISTORY_NOT_FOUND."""
        mesh, _ = self._connected()
        return await read_shaping(mesh, rollout_id, history)

    async def _close(self) -> None:
        """Close the open trajectories, all at once, then the job and the channels. A step that runs
        has `cleanup_s` to end, and its trajectory as long to close.

        A scheduler that cannot be reached closes them once the lease has ended, and the job with
        them.
        """
        mesh, job = self._connected()
        closing = [
            asyncio.ensure_future(trajectory.close(outcome="cancelled"))
            for trajectory in self._open
        ]
        late = set[asyncio.Future[None]]()
        if closing:
            _, late = await asyncio.wait(closing, timeout=2 * mesh.timeouts.cleanup_s)
        lost = late or any(
            isinstance(error := task.exception(), TreadleError) and error.unanswered
            for task in closing
        )
        try:
            await job.close(tell=not lost)
        finally:
            await mesh.close()  # which ends the late ones
        for failure in filter(None, await asyncio.gather(*closing, return_exceptions=True)):
            # The scheduler has closed it where this client's lease had run out.
            closed = isinstance(failure, TreadleError) and (
                failure.unanswered or failure.reason in (*GONE, CLIENT_CLOSED)
            )
            if not closed:
                raise failure

    def _reach(self) -> Mesh:
        return self._connected()[0]

    def _connected(self) -> tuple[Mesh, Job]:
        if self._mesh is None or self._job is None:
            raise RuntimeError(
                "use treadle.Client as `async with treadle.Client(address) as client:`"
            )
        return self._mesh, self._job
