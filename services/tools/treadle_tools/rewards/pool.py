"""Accept rewards of all jobs at once, score them as slots come free, and publish those that have
ended.

Invariants: an accepted reward is in the journal before its caller knows, and stays there until it
has ended; after a restart the rewards that had not ended are scored, a second time where the first
was cut; a function that takes no call for the moment is called again, and one that crashes
`MOST_TRIES` times in all. No reward ends the pool, or the service twice: one that has not ended at
a restart is marked while it is scored, one with a mark is scored while no other one with a mark is,
and one with `MOST_ENDS` marks has failed.
"""

import asyncio
import contextlib
import hmac
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import nats.errors
import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    retry_if_exception_type,
    retry_if_result,
    wait_exponential,
)
from treadle_core.fair_share import FairQueue
from treadle_runtime.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    TreadleError,
    Unavailable,
)
from treadle_runtime.fields import like

from treadle_tools.remote import HttpFunction
from treadle_tools.replies import MOST_ERROR_BYTES, cut
from treadle_tools.resources import RecentMeans
from treadle_tools.rewards.reward import Reward, RewardJournal, RewardTable, State
from treadle_tools.tool import Limits, Result, Status, Tool

log = structlog.get_logger()

ID_BYTES = 16  # of a reward's id
MOST_TRIES = 3
MOST_ENDS = 2
BACKOFF = wait_exponential(multiplier=0.5, max=30.0)  # seconds before a function is called again
FULL_RETRY_S = 1.0
SWEEP_PERIOD_S = 60.0
# Together, as JSON, within half of NATS's default max_payload (a letter takes up to 6 bytes there,
# an emoji 12); kept in memory for as long as the reward.
MOST_DATA_BYTES = 256 * 1024  # of data_json; longer is left out
MOST_OUTPUT_BYTES = 16 * 1024  # as the judge's reasons or a traceback; longer is cut

SANDBOX_QUEUE = "(sandbox)"  # a tool cannot have this name

UNKNOWN_S = 1.0  # what a function is taken to cost before it has run

# How a call ends that the code in its arguments has stopped, unless its sandbox was lost
STOPPED = (Status.TIMED_OUT, Status.OUT_OF_MEMORY, Status.CRASHED)

# The function is not to blame, and may answer later.
NOT_NOW = (Unavailable, ResourceExhausted, FailedPrecondition)

Arguments = Mapping[str, Any]
Call = Callable[[Tool, Mapping[str, Any], Limits, str], Awaitable[Result]]


class Scorer(Protocol):
    """One reward function, by which the pool scores trajectories."""

    queue: str
    """Scorers with the same name here share the slots."""

    slots: int
    """So many rewards of the queue are scored at a time."""

    async def score(self, arguments: Mapping[str, Any]) -> Result:
        """Score a trajectory: the score is `reward` of a result whose status is OK.

        Raises InvalidArgument where the function refuses an argument; Unavailable,
        ResourceExhausted or FailedPrecondition where it takes no call at the moment.
        """


class ToolScorer:
    """`Scorer` that calls a registered tool of kind REWARD, in the sandbox or over HTTP.

    call: runs a tool. sandbox_slots: how many rewards run in the sandbox at a time.
    """

    def __init__(self, tool: Tool, call: Call, sandbox_slots: int) -> None:
        self._tool = tool
        self._call = call
        function = tool.remote if isinstance(tool.remote, HttpFunction) else None
        self.queue = tool.name if function else SANDBOX_QUEUE
        self.slots = function.at_once if function else sandbox_slots

    async def score(self, arguments: Mapping[str, Any]) -> Result:
        """Return the tool's score (see Scorer).

        The action belongs to no trajectory, since that has ended.
        """
        result = await self._call(self._tool, arguments, self._tool.limits, "")
        if result.refused_s is not None:
            raise Unavailable(
                "PROVIDER_REFUSED", result.error or "refused", retry_after_s=result.refused_s
            )
        if self._tool.stopped_reward is not None and result.status in STOPPED and not result.lost:
            why = f"{result.status}: {result.error}\n{result.output}"
            stopped = self._tool.stopped_reward
            return replace(result, status=Status.OK, output=why, error="", reward=stopped)
        if result.status is not Status.OK or (
            result.reward is not None and math.isfinite(result.reward)
        ):
            return result
        none = "the reward function gave no reward"
        error = (
            none if result.reward is None else f"the reward is {result.reward}, no finite number"
        )
        return replace(result, status=Status.TOOL_ERROR, error=error)


@dataclass(eq=False)
class RewardPool:
    """Owns the rewards, their action queues, and a task for each reward that runs.

    secret: of the journal. read: reads the arguments of a function, by its name, from their JSON;
    raises TreadleError. publish: publishes a reward that has ended. most_waiting: rewards that may
    wait. kept_s: how long a reward that has ended is kept.
    """

    scorers: Mapping[str, Scorer]
    journal: RewardJournal
    secret: bytes
    read: Callable[[str, str], Arguments]
    publish: Callable[[Reward], Awaitable[None]]
    most_waiting: int
    kept_s: float
    table: RewardTable = field(default_factory=RewardTable, init=False)
    # Of a slot, by function
    _learned_s: RecentMeans = field(default_factory=RecentMeans, init=False)
    _arguments: dict[str, Arguments] = field(default_factory=dict, init=False)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    # Had not ended when the service started
    _found: set[str] = field(default_factory=set, init=False)
    # Of one with a mark that is scored
    _marked: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    # Cancelled by a caller, not by the drain
    _unwanted: set[str] = field(default_factory=set, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._queues = {scorer.queue: _Queue(scorer.slots) for scorer in self.scorers.values()}

    def id_of(self, request_id: str) -> str:
        """Return the id of a request's reward: the same for a repeat whose first answer was not
        recorded, and not to be guessed from the request's id."""
        drawn = hmac.digest(self.secret, request_id.encode(), "sha256")[:ID_BYTES]
        return like(request_id, f"w-{drawn.hex()}")

    async def accept(self, reward: Reward, arguments_json: str) -> Reward:
        """Accept a reward, or return the one of the same id.

        Raises InvalidArgument, ResourceExhausted, nats.errors.Error.
        """
        if (present := self.table.rewards.get(reward.reward_id)) is not None:
            return present
        arguments = self.read(reward.name, arguments_json)
        if sum(len(queue.share) for queue in self._queues.values()) >= self.most_waiting:
            why = f"{self.most_waiting} rewards wait already"
            raise ResourceExhausted("REWARDS_WAITING", why, retry_after_s=FULL_RETRY_S)
        await self.journal.accept(reward, arguments_json)
        self._enqueue(reward, arguments)
        return reward

    def get(self, reward_id: str) -> Reward:
        """Return the reward of an id. Raises NotFound."""
        if (reward := self.table.rewards.get(reward_id)) is None:
            why = (
                f"there is no reward {reward_id[:64]!r}: never accepted, or ended over "
                f"{self.kept_s:g} s ago"
            )
            raise NotFound("REWARD_NOT_FOUND", f"reward_id: {why}", reward_id=reward_id)
        return reward

    async def cancel(self, reward_id: str) -> Reward:
        """End a reward unless it has ended. Raises NotFound."""
        reward = self.get(reward_id)
        if reward.ended:
            return reward
        self._unwanted.add(reward_id)
        if (running := self._running.get(reward_id)) is not None:
            running.cancel()
            await asyncio.wait((running,))
        else:
            await self._end(replace(reward, state=State.CANCELLED))
        return self.get(reward_id)

    async def load(self) -> None:
        """Take up the rewards that were accepted before a restart of the service."""
        for reward, arguments_json in await self.journal.load():
            if reward.ended:
                self.table.put(reward)
                # Its end may not have been published; the fact has the same id
                await self.publish(reward)
                continue
            try:
                if arguments_json is None:
                    raise InvalidArgument("arguments_json", "cannot be read any more")
                if reward.ends >= MOST_ENDS:
                    raise InvalidArgument(
                        "reward_id", f"the service ended {MOST_ENDS} times while this was scored"
                    )
                self._found.add(reward.reward_id)
                self._enqueue(reward, self.read(reward.name, arguments_json))
            except (
                TreadleError
            ) as error:  # or the function is no longer there, or reads other arguments
                await self._end(replace(reward, state=State.FAILED, error=error.message))

    async def run(self) -> None:
        """Score waiting rewards until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep())
            while True:
                self._wake.clear()
                for queue in self._queues.values():
                    while queue.free and (taken := queue.share.take()) is not None:
                        _, reward, charged_s = taken
                        queue.free -= 1
                        self._running[reward.reward_id] = group.create_task(
                            self._serve(reward, queue, charged_s)
                        )
                await self._wake.wait()

    def _enqueue(self, reward: Reward, arguments: Arguments) -> None:
        self.table.put(reward)
        self._arguments[reward.reward_id] = arguments
        queue = self._queues[self.scorers[reward.name].queue]
        queue.share.add(reward.job, reward, self._learned_s.get(reward.name, UNKNOWN_S))
        self._wake.set()

    async def _serve(self, waited: Reward, queue: "_Queue", charged_s: float) -> None:
        """Score one reward, holding a slot of its queue. charged_s: taken from its job's share."""
        reward = self.table.rewards.get(waited.reward_id)
        begun = time.monotonic()
        busy_s = 0.0
        try:
            if reward is not None and not reward.ended:  # else it was cancelled while it waited
                ended = await self._score_safely(reward)
                busy_s = time.monotonic() - begun
                self._learned_s.add(reward.name, busy_s)
                await self._end(ended)
        except asyncio.CancelledError:
            if waited.reward_id not in self._unwanted:
                raise
            await self._end(replace(self.get(waited.reward_id), state=State.CANCELLED))
        finally:
            del self._running[waited.reward_id]
            queue.free += 1
            queue.share.settle(waited.job, charged_s, busy_s)
            self._wake.set()

    async def _score_safely(self, reward: Reward) -> Reward:
        """Score a reward, whatever that raises; mark it in the journal where it may have ended the
        service."""
        try:
            if reward.reward_id not in self._found:
                return await self._score(reward)
            async with self._marked if reward.ends else contextlib.nullcontext():
                marked = replace(reward, ends=reward.ends + 1)
                await _until_written(lambda: self.journal.note(marked))
                try:
                    return await self._score(marked)
                except asyncio.CancelledError:  # by the drain, or by its caller
                    with contextlib.suppress(nats.errors.Error):
                        await self.journal.note(reward)
                    raise
        except Exception as error:
            log.exception(
                "a reward could not be scored", reward=reward.name, reward_id=reward.reward_id
            )
            return replace(
                reward,
                state=State.FAILED,
                error=f"scoring failed unexpectedly ({type(error).__name__})",
            )

    async def _score(self, reward: Reward) -> Reward:
        """Score until there is a result, and return the reward as it ends."""
        scorer, arguments = self.scorers[reward.name], self._arguments[reward.reward_id]
        crashes = 0

        async def score_once() -> Reward:
            """Score once; return the reward as it ends, or still running where the function
            crashed."""
            nonlocal reward, crashes
            reward = replace(
                reward,
                state=State.RUNNING,
                tries=crashes + 1,
                queue_s=max(0.0, time.time() - reward.accepted_at),
                revision=reward.revision + 1,
            )
            self.table.put(reward)
            try:
                result = await scorer.score(arguments)
            except InvalidArgument as refused:
                return replace(reward, state=State.FAILED, error=refused.message)
            crashes += result.status is Status.CRASHED
            if result.status is Status.CRASHED and crashes < MOST_TRIES:
                return reward
            return _end_of(reward, result)

        def report(state: RetryCallState) -> None:
            if isinstance(error := _error_of(state), TreadleError):
                log.warning(
                    "a reward waits",
                    reward=reward.name,
                    reward_id=reward.reward_id,
                    why=error.message,
                )

        until_ended = AsyncRetrying(
            retry=retry_if_exception_type(NOT_NOW)
            | retry_if_result(lambda scored: not scored.ended),
            wait=_pause_s,
            before_sleep=report,
        )
        return await until_ended(score_once)

    async def _end(self, reward: Reward) -> None:
        """Store and publish how a reward ended. Waits while NATS is away."""
        error, _ = cut(reward.error, MOST_ERROR_BYTES)
        reward = replace(reward, error=error, ended_at=time.time(), revision=reward.revision + 1)
        try:
            await _until_written(lambda: self.journal.end(reward))
        except nats.errors.MaxPayloadError:  # of a NATS that takes less than half of what is usual
            reward = replace(reward, output="", data_json="")
            await _until_written(lambda: self.journal.end(reward))
        self._arguments.pop(reward.reward_id, None)
        self._unwanted.discard(reward.reward_id)
        self.table.put(reward)
        await self.publish(reward)

    async def _sweep(self) -> None:
        while True:
            oldest = time.time() - self.kept_s
            rewards = self.table.rewards
            for reward in [
                reward for reward in rewards.values() if reward.ended and reward.ended_at < oldest
            ]:
                try:
                    await self.journal.forget(reward.reward_id)
                except nats.errors.Error as error:
                    log.warning("sweep interrupted", error=repr(error))
                    break
                del rewards[reward.reward_id]
            await asyncio.sleep(min(SWEEP_PERIOD_S, self.kept_s / 2))


async def _until_written(write: Callable[[], Awaitable[None]]) -> None:
    """Write again until NATS takes it.

    Raises nats.errors.MaxPayloadError, which no waiting cures.
    """

    def may_pass(error: BaseException) -> bool:
        return isinstance(error, nats.errors.Error) and not isinstance(
            error, nats.errors.MaxPayloadError
        )

    def report(state: RetryCallState) -> None:
        log.warning("the state of a reward is not written", error=repr(_error_of(state)))

    async def write_once() -> None:  # tenacity does not await what a lambda returns
        await write()

    await AsyncRetrying(retry=retry_if_exception(may_pass), wait=_pause_s, before_sleep=report)(
        write_once
    )


def _pause_s(state: RetryCallState) -> float:
    """Return an exponential pause, which is at least as long as the error requests."""
    error = _error_of(state)
    asked_s = error.retry_after_s if isinstance(error, TreadleError) else None
    return max(BACKOFF(state), asked_s or 0.0)


def _error_of(state: RetryCallState) -> BaseException | None:
    return None if state.outcome is None else state.outcome.exception()


def _end_of(reward: Reward, result: Result) -> Reward:
    done = result.status is Status.OK
    return replace(
        reward,
        state=State.DONE if done else State.FAILED,
        score=result.reward if done else None,
        output=cut(result.output, MOST_OUTPUT_BYTES)[0],
        data_json="" if len(json.dumps(result.data_json)) > MOST_DATA_BYTES else result.data_json,
        error="" if done else f"{result.status}: {result.error}",
        queue_s=reward.queue_s + result.queue_s,
        overhead_s=result.overhead_s,
        execution_s=result.execution_s,
    )


@dataclass(eq=False)
class _Queue:
    """Rewards that wait for one of the `free` slots, which are shared equally among jobs."""

    free: int
    share: FairQueue[Reward] = field(default_factory=FairQueue)
