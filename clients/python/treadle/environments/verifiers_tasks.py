"""Play the tasks of a verifiers taskset (0.4) with one reply each, scored by their own rewards and
judges (VerifiersTasks).

Verifiers provides the prompts, and the score of a trace that has the tokens and logprobs of the
mesh. A task that needs more than a conversation (a container, tool servers, hooks around a run) is
refused: verifiers plays it itself, with its harness against the mesh's HTTP front door, to which it
sends the session's id.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from treadle.environments.episode import (
    Environment,
    Episode,
    Message,
    Reply,
    Task,
    Turn,
    split_reasoning,
)
from treadle.trajectory import Trajectory

if TYPE_CHECKING:
    import verifiers.v1 as vf


class VerifiersTasks(Environment):
    """Tasks of verifiers. tasks: a taskset, or a view of one such as taskset.take(64). Raises
    ValueError for a task that needs more than a conversation."""

    def __init__(self, tasks: Iterable[vf.Task[Any, Any, Any]]) -> None:
        self._tasks = list(tasks)

    def tasks(self) -> list[Task]:
        """Return a task for each of verifiers' tasks, named by its key. Raises ValueError."""
        for task in self._tasks:
            if needs := _needs_of(task):
                raise ValueError(
                    f"task {task.data.idx} has {needs}: let verifiers play it, against the front "
                    "door"
                )
        return [Task(task.key, _messages_of(task.data), task) for task in self._tasks]

    async def start(self, task: Task, trajectory: Trajectory) -> Episode:
        """Start an episode of one reply."""
        return _Scored(task, trajectory)


class _Scored(Episode):
    def __init__(self, task: Task, trajectory: Trajectory) -> None:
        self._task, self._trajectory = task, trajectory
        self._prompt_ids = list(trajectory.tokens)

    async def step(self, reply: Reply) -> Turn:
        trace = _trace_of(self._task, self._prompt_ids, reply)
        await self._trajectory.time_tool(lambda: self._task.data.score(trace))
        return Turn(reward=float(trace.reward), done=True)


def _messages_of(data: vf.TaskData) -> list[Message]:
    prompt = data.prompt
    said = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [_plain(each) for each in prompt or ()]
    )
    return (
        [{"role": "system", "content": data.system_prompt}, *said]
        if data.system_prompt
        else [*said]
    )


def _plain(message: Any) -> Message:
    plain: Message = message.model_dump(exclude_none=True)
    return plain


def _needs_of(task: vf.Task[Any, Any, Any]) -> str:
    """Return what a task needs besides a conversation; empty where that is nothing."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.decorators import discover_decorated

    kind = type(task)
    scored = [
        *task.hooks("reward"),
        *task.hooks("metric"),
        *(judge.score for judge in task.plugged_judges()),
    ]
    needs = {
        "a container": task.NEEDS_CONTAINER or task.data.image is not None,
        "tool servers": bool(task.toolsets(task.config)),
        "a setup or finalize hook": kind.setup is not vf.Task.setup
        or kind.finalize is not vf.Task.finalize,
        "stops or interceptors": bool(task.hooks("stop") or discover_decorated(task, "intercept")),
        "a reward that looks into the runtime": any(map(_takes_runtime, scored)),
        "no prompt whose last message is the user's": not Task(
            "", _messages_of(task.data)
        ).is_complete,
    }
    return next((need for need, is_there in needs.items() if is_there), "")


def _takes_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _trace_of(task: Task, prompt_ids: Sequence[int], reply: Reply) -> vf.Trace[Any, Any, Any]:
    """Return the finished run as verifiers records it."""
    import verifiers.v1 as vf
    from pydantic import TypeAdapter
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.state import state_cls

    played = task.data
    trace = vf.Trace(
        task=vf.TraceTask(
            type=type(played).__name__, data=played.data, key=played.key, hash=played.hash
        ),
        state=state_cls(type(played))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    messages = TypeAdapter(vf.Messages).validate_python(task.messages)
    tokens = vf.TurnTokens(
        prompt_ids=prompt_ids,
        completion_ids=reply.step.token_ids,
        completion_logprobs=reply.step.logprobs,
    )
    reasoning, content = split_reasoning(reply.text)
    said = vf.Response(
        id="",
        created=0,
        model="",
        message=vf.AssistantMessage(content=content, reasoning_content=reasoning or None),
        finish_reason="length" if reply.step.finish_reason == "length" else "stop",
        tokens=tokens,
    )
    prepare_turn(trace, messages).commit(said)
    trace.is_completed = trace.ok = True
    return trace
