"""The facts that a mesh publishes of a trajectory, made from a transcript, with its texts as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from treadle.common.v1.tokens_pb2 import TokenIds
from treadle.scheduler.v1 import scheduler_pb2
from treadle.telemetry.v1 import facts_pb2
from treadle_runtime.facts import make_fact
from treadle_sidecar.convert import PROMPT_SHARE, ends

if TYPE_CHECKING:
    from treadle_learned.transcript import Transcript

Tokenize = Callable[[str], Sequence[int]]


def facts_of(
    transcript: Transcript, tokenize: Tokenize, *, close: bool = True, most: int = 1 << 20
) -> Iterator[facts_pb2.Fact]:
    """Opened, one fact for each step, closed. most: ids of each output and observation; the prompt may have
    PROMPT_SHARE times as many."""
    name = transcript.trajectory_id
    known: dict[str, Any] = {
        key: getattr(transcript, key) for key in ("trajectory_id", "rollout_id", "prompt_id", "prompt_tokens")
    }
    yield make_fact("scheduler", trajectory_opened=facts_pb2.TrajectoryOpened(**known))
    context_tokens = transcript.prompt_tokens
    for number, turn in enumerate(transcript.turns):
        before = transcript.turns[number - 1] if number else None
        observation_tokens = before.obs_tokens if before is not None else 0
        context_tokens += observation_tokens
        tokens = facts_pb2.StepTokens(output=_ids(tokenize(turn.text), most))
        if before is None:
            tokens.prompt.CopyFrom(_ids(tokenize(transcript.prompt), PROMPT_SHARE * most))
        else:
            tokens.observation.CopyFrom(_ids(tokenize(before.obs_text), most))
            tokens.observation_tokens = observation_tokens
        yield make_fact(
            "sidecar/e0",
            step_finished=facts_pb2.StepFinished(
                step=facts_pb2.StepRef(trajectory_id=name, turn=number, ticket_id=f"{name}-{number}"),
                context_tokens=context_tokens,
                output_tokens=turn.gen_tokens,
                tokens=tokens,
            ),
        )
        context_tokens += turn.gen_tokens
    if close:
        outcome = scheduler_pb2.OUTCOME_TRUNCATED if transcript.censored else scheduler_pb2.OUTCOME_FINISHED
        yield make_fact(
            "scheduler",
            trajectory_closed=facts_pb2.TrajectoryClosed(
                **known, outcome=outcome, gen_tokens=transcript.gen_tokens, turns=len(transcript.turns)
            ),
        )


def prompt_started(transcript: Transcript, tokenize: Tokenize, *, most: int = 1 << 20) -> facts_pb2.Fact:
    """The fact that the first step has started, with the prompt. most: as in `facts_of`."""
    name = transcript.trajectory_id
    return make_fact(
        "sidecar/e0",
        step_started=facts_pb2.StepStarted(
            step=facts_pb2.StepRef(trajectory_id=name, turn=0, ticket_id=f"{name}-0"),
            attempt=1,
            prompt=_ids(tokenize(transcript.prompt), PROMPT_SHARE * most),
        ),
    )


def _ids(ids: Sequence[int], most: int) -> TokenIds:
    return TokenIds(int32_le=ends(array("i", ids), most).tobytes())
