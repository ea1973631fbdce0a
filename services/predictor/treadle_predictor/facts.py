"""Learn from facts, and record running trajectories for the learned model.

A recording becomes the input of the model and, once its trajectory has ended, a sample to train it
on.

Invariants: a recording that misses a step is not `whole` and is neither read nor trained on; a fact
that comes twice changes nothing. The number of recordings is bounded; those without a fact for
longest are removed first.
"""

import asyncio
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from google.protobuf.timestamp_pb2 import Timestamp
from treadle.common.v1.tokens_pb2 import TokenIds
from treadle.scheduler.v1 import scheduler_pb2
from treadle.telemetry.v1.facts_pb2 import (
    Fact,
    StepFinished,
    StepStarted,
    TrajectoryClosed,
    TrajectoryOpened,
)
from treadle_learned.moments import Steps
from treadle_learned.transcript import Transcript, Turn, version_number
from treadle_runtime.fields import seconds

from treadle_predictor.convert import learn
from treadle_predictor.history import HistoryStore

MOST_RUNNING = 8_192  # recordings; some kilobytes each where facts carry texts
MOST_ENDED = 4_096  # transcripts for the next refit
MOST_PROMPTS = 4_096

Decode = Callable[[list[int]], str]


class Learner:
    """Consumer of facts, which learns from them.

    updated_at: the time of the newest fact, None before the first. recordings: those for a learned
    model. on_start: called when a trajectory's first step starts, with its prompt; on_end: when a
    trajectory ends, with its generated tokens, or None where it did not end by itself.
    """

    def __init__(
        self,
        store: HistoryStore,
        recordings: "Recordings | None" = None,
        on_start: Callable[[str, str], None] = lambda trajectory_id, prompt: None,
        on_end: Callable[[str, int | None], None] = lambda trajectory_id, gen_tokens: None,
    ) -> None:
        self._store = store
        self._recordings = recordings
        self._on_start = on_start
        self._on_end = on_end
        self.updated_at: Timestamp | None = None

    async def on_fact(self, fact: Fact) -> None:
        """Learn from one fact."""
        recordings = self._recordings
        version = (
            recordings.version_of(fact.trajectory_closed.trajectory_id)
            if recordings is not None
            else None
        )
        ended = learn(self._store.evidence, fact, version)
        if recordings is not None:
            recordings.on_fact(fact)
            started = recordings.get(fact.step_started.step.trajectory_id, turn=0)
            if started is not None and started.prompt:
                self._on_start(started.trajectory_id, started.prompt)
        if ended is not None:
            self._on_end(ended.trajectory_id, ended.gen_tokens if ended.own_end else None)
            self._store.write_soon(ended.prompt_id)
        if self.updated_at is None or seconds(fact.time) > seconds(self.updated_at):
            self.updated_at = fact.time


@dataclass
class Recording:
    """Record of a running trajectory.

    context_tokens: tokens after its newest step. weight_version: the policy's when it was opened.
    """

    trajectory_id: str
    rollout_id: str
    prompt_id: str
    prompt_tokens: int
    weight_version: str = ""
    prompt: str = ""
    turns: list[Turn] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    context_tokens: int = 0
    whole: bool = True


class Recordings:
    """Recordings of running trajectories, and transcripts of ended ones.

    decode: turns the policy's ids into text.
    """

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.ended: deque[Transcript] = deque(maxlen=MOST_ENDED)
        self.ended_total = 0
        self._running: OrderedDict[str, Recording] = OrderedDict()
        self._prompts: OrderedDict[str, str] = OrderedDict()
        self._weight_version = ""  # the newest one
        self._awaited: dict[str, list[asyncio.Event]] = {}

    def on_fact(self, fact: Fact) -> None:
        """Record one fact."""
        match fact.WhichOneof("fact"):
            case "trajectory_opened":
                self._open(fact.trajectory_opened)
            case "step_started":
                self._start_step(fact.step_started)
            case "step_finished":
                self._finish_step(fact.step_finished)
            case "trajectory_closed":
                self._close(fact.trajectory_closed)
            case "engine_joined":
                self._weight_version = (
                    self._weight_version or fact.engine_joined.info.weight_version
                )
            case "weights_updated":
                self._weight_version = fact.weights_updated.weight_version

    def version_of(self, trajectory_id: str) -> int | None:
        """Return the number of the policy's version when a running trajectory was opened; None
        where it is not known."""
        found = self._running.get(trajectory_id)
        return version_number(found.weight_version) if found is not None else None

    def get(self, trajectory_id: str, turn: int) -> Recording | None:
        """Return the recording after exactly `turn` steps; None where there is none."""
        found = self._running.get(trajectory_id)
        return found if found is not None and found.whole and len(found.turns) == turn else None

    async def wait_for(self, trajectory_id: str, turn: int, within_s: float) -> Recording | None:
        """Return the recording as `get` does, but wait a while for the fact of the newest step,
        which comes at about the time of the query."""
        found = self._running.get(trajectory_id)
        if found is not None and found.whole and len(found.turns) < turn:
            arrived = asyncio.Event()
            self._awaited.setdefault(trajectory_id, []).append(arrived)
            try:
                async with asyncio.timeout(within_s):
                    while self.get(trajectory_id, turn) is None:
                        await arrived.wait()
                        arrived.clear()
            except TimeoutError:
                pass
            finally:
                self._awaited[trajectory_id].remove(arrived)
                if not self._awaited[trajectory_id]:
                    del self._awaited[trajectory_id]
        return self.get(trajectory_id, turn)

    def prompt_of(self, prompt_id: str) -> str:
        """Return the text of a prompt; empty before a fact of one of its trajectories has brought
        it."""
        return self._prompts.get(prompt_id, "")

    def _open(self, opened: TrajectoryOpened) -> None:
        if opened.trajectory_id and opened.prompt_id and opened.trajectory_id not in self._running:
            self._running[opened.trajectory_id] = Recording(
                opened.trajectory_id,
                opened.rollout_id,
                opened.prompt_id,
                opened.prompt_tokens,
                self._weight_version,
            )
            if len(self._running) > MOST_RUNNING:
                self._running.popitem(last=False)

    def _start_step(self, step: StepStarted) -> None:
        recording = self._running.get(step.step.trajectory_id)
        if recording is not None and not recording.turns and not step.step.turn:
            self._set_prompt(recording, step.prompt)

    def _finish_step(self, step: StepFinished) -> None:
        recording = self._running.get(step.step.trajectory_id)
        if recording is None or step.step.turn < len(recording.turns) or step.output_tokens < 0:
            return
        self._running.move_to_end(step.step.trajectory_id)
        if step.step.turn > len(recording.turns):
            recording.whole = False
            return
        observation_tokens = 0
        if recording.turns:
            observation_tokens = max(0, step.context_tokens - recording.context_tokens)
            # Tokens of a step that ran on another engine since are no observation.
            known = step.tokens.observation_tokens == observation_tokens
            text = self._decode(step.tokens.observation) if known else ""
            recording.turns[-1] = replace(
                recording.turns[-1], obs_tokens=observation_tokens, obs_text=text
            )
        else:
            self._set_prompt(recording, step.tokens.prompt)
        recording.turns.append(Turn(step.output_tokens, text=self._decode(step.tokens.output)))
        recording.steps = recording.steps.after(step.output_tokens, observation_tokens)
        recording.context_tokens = step.context_tokens + step.output_tokens
        for arrived in self._awaited.get(step.step.trajectory_id, ()):
            arrived.set()

    def _close(self, closed: TrajectoryClosed) -> None:
        recording = self._running.pop(closed.trajectory_id, None)
        if recording is None or not recording.whole or not recording.turns:
            return
        self.ended_total += 1
        self.ended.append(
            Transcript(
                recording.trajectory_id,
                recording.rollout_id,
                recording.prompt_id,
                max(recording.prompt_tokens, closed.prompt_tokens),
                tuple(recording.turns),
                censored=closed.outcome != scheduler_pb2.OUTCOME_FINISHED,
                prompt=recording.prompt,
                weight_version=recording.weight_version,
            )
        )

    def _set_prompt(self, recording: Recording, prompt: TokenIds) -> None:
        if not prompt.int32_le:
            return
        recording.prompt = self._decode(prompt)
        self._prompts[recording.prompt_id] = recording.prompt
        self._prompts.move_to_end(recording.prompt_id)
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)

    def _decode(self, tokens: TokenIds) -> str:
        return self.decode(array("i", tokens.int32_le).tolist()) if tokens.int32_le else ""
