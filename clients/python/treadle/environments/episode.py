"""Define the classes of an environment that a policy plays in words: tasks, episodes, turns and
replies; and read from a reply's text the action or the tool calls that it names.

An Environment has tasks, one for each prompt of a rollout, and starts an episode of a task for each
sample. An Episode decides what the policy reads, what a reply leads to, when it is over and what it
is worth. Messages are those of OpenAI's chat (`role`, `content`, and of tool results
`tool_call_id`), as chat templates take them. EnvManager (play.py) makes tokens of them; no
environment ever sees or makes a token.

Two forms of tool calls are known: JSON between <tool_call> and </tool_call>, a call each (Hermes,
Qwen), and a reply that is nothing but one call as JSON (Llama 3, whose first word may be
<|python_tag|>). For another model, give EnvManager a `read_calls`. Text between <think> and
</think>, or before a </think> without a beginning, is reasoning: nothing in it is an action, an
answer or a call.

Invariants: an episode is used by one trajectory, one call at a time, and closed once. An exception
of an episode fails its own trajectory alone.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from treadle.rewards import PendingReward
from treadle.trajectory import Trajectory
from treadle.types import Sampling, Step, ToolResult

Message = Mapping[str, Any]
# of OpenAI's chat: {"type": "function", "function": {name, description, parameters}}
ToolSchema = Mapping[str, Any]
A = TypeVar("A")
ReadAction = Callable[[str], Any]  # of a reply's text; None where it names no action
# Neither pattern reads a text twice, which a policy may repeat without end.
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_TAG = re.compile(r"</?think>|<tool_call>")
_END_OF_REASONING = re.compile(r"</think>|\Z")
_NOT_SPACE = re.compile(r"\S|\Z")
_END_OF_CALL = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
_END_OF_OTHER_TEXT = re.compile(r"</tool_call>|(?=</think>)|\Z")  # in place of a call's JSON
_PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder()
_ARGUMENTS = {"arguments", "parameters"}
_CALL_FIELDS = {"name", "type", "id", *_ARGUMENTS}
_BROKEN_CALL = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"(?:arguments|parameters)"\s*:')
# of json.loads: also numbers of 4,300 digits, and a thousand brackets
_UNREADABLE = (ValueError, RecursionError)


def user(text: str) -> Message:
    """Make a message of the user; most environments send such messages."""
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote. error: why its arguments cannot be read; empty where they
    can."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str
    error: str = ""


@dataclass(frozen=True)
class Reply:
    """The policy's reply of one turn. text: decoded, with the <think> and the `lead` with which the
    turn began, and without special tokens. step: its tokens, logprobs and times."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    step: Step

    @property
    def said(self) -> str:
        """Return the text without its reasoning."""
        return split_reasoning(self.text)[1]


@dataclass(frozen=True)
class Turn:
    """Messages that the policy reads before its next reply, and the reward of the reply before.

    reward: of the reply before. done: the episode is over, and `messages` are not used. lead: first
    words of the next reply, given to the policy with 0 in the loss mask. sampling: of the next
    reply; None: that of the EnvManager.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    lead: str = ""
    sampling: Sampling | None = None


@dataclass(frozen=True)
class Task:
    """One prompt of a rollout.

    id: the same for all of its samples. messages: how each episode of it begins. Where the user's
    message is the last one, the policy replies to it; else the episode's `begin` adds what differs
    from sample to sample, or is not known before. data: whatever the environment needs.
    """

    id: str
    messages: Sequence[Message] = ()
    data: Any = None

    @property
    def is_complete(self) -> bool:
        """Return whether the policy replies to these messages, without more of them from
        `begin`."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"


class Episode(ABC):
    """One run of a task."""

    async def begin(self) -> Turn:
        """Return what the policy reads first, after the messages of its task. Of a complete task:
        no messages."""
        return Turn()

    @abstractmethod
    async def step(self, reply: Reply) -> Turn:
        """Return the turn that follows a reply."""

    async def finish(self, conversation: Sequence[Message]) -> float | PendingReward:
        """Return what the episode is worth beyond the rewards of its turns, once it is over or has
        no turns left.

        A PendingReward takes the place of all rewards.
        """
        return 0.0

    async def close(self) -> None:  # noqa: B027 - most episodes hold nothing
        """Release what the episode holds, however it ended."""


class Environment(ABC):
    """Something that can be played. As an async context manager it holds what its episodes share;
    EnvManager.rollout enters it."""

    # which the chat template shows the policy; known once the environment is entered
    tools: Sequence[ToolSchema] = ()

    @abstractmethod
    def tasks(self) -> Iterable[Task]:
        """Return the prompts of a rollout, each with an id of its own."""

    @abstractmethod
    async def start(self, task: Task, trajectory: Trajectory) -> Episode:
        """Start an episode. trajectory: the one that plays it, e.g. for tools of the mesh."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


def first_of(actions: Mapping[str, A]) -> Callable[[str], A | None]:
    """Make a function that finds the first word of a text that names an action, in upper or lower
    case.

    Reasoning does not count. Raises ValueError where there are no actions.
    """
    if not actions:
        raise ValueError("actions must have a word at least, such as {'left': 0}")
    longest_first = sorted(actions.items(), key=lambda item: len(item[0]), reverse=True)
    words = "|".join(f"({re.escape(word)})" for word, _ in longest_first)
    pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)

    def read(text: str) -> A | None:
        found = pattern.search(split_reasoning(text)[1])
        return longest_first[found.lastindex - 1][1] if found and found.lastindex else None

    return read


def answer_of(text: str) -> str:
    """Return the text of the last <answer>, or else all of the text; of both, without the
    reasoning."""
    said = split_reasoning(text)[1]
    tagged = _ANSWER.findall(said)
    return (tagged[-1] if tagged else said).strip()


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning of a reply, without its tags, and the rest."""
    reasoning, said, _ = _scan(text)
    return (" ".join(reasoning).strip(), " ".join(said).strip()) if reasoning else ("", text)


def read_tool_calls(text: str, tools: Collection[str] = ()) -> list[ToolCall]:
    """Return the calls of a reply, in order; none where it has none. A call that cannot be read has
    an `error`.

    tools: the names of all tools. A reply of JSON alone that names none of them is an answer; where
    `tools` is empty, so is one without arguments.
    """
    whole = text.strip()
    if not _is_json(whole.removeprefix(_PYTHON_TAG)):  # whose texts may have tags
        _, said, tagged = _scan(whole)
        if tagged:
            return [_read(body, f"call{place:05}") for place, body in enumerate(tagged)]
        whole = " ".join(said).strip()
    bare = whole.removeprefix(_PYTHON_TAG).strip()
    if bare.startswith("{") and (bare != whole or _is_call(bare, tools)):
        return [_read(bare, "call00000")]
    return []


def message_of(reply: Reply) -> Message:
    """Make the assistant's message from a reply, as OpenAI's chat writes it, with the reasoning as
    SGLang writes it."""
    reasoning, said = split_reasoning(reply.text)
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if reasoning:
        message["reasoning_content"] = reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in reply.tool_calls
        ]
    return message


def result_message(call: ToolCall, output: str) -> Message:
    """Make the message in which the policy reads the output of a call."""
    return {"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": output}


def text_of(result: ToolResult) -> str:
    """Return what the policy reads of a tool of the mesh: its output, and where it failed, why."""
    return (
        result.output
        if result.ok
        else f"error: {result.error or result.status}\n{result.output}".rstrip()
    )


def _scan(text: str) -> tuple[list[str], list[str], list[str]]:
    """Return the parts of a reply: its reasoning, the texts around it, and of these the bodies of
    tagged calls. A tag within the JSON of a call belongs to the JSON."""
    reasoning, said, calls = list[str](), list[str](), list[str]()
    begin = place = 0  # of what is said, and of what is still to be read
    while tag := _TAG.search(text, place):
        place = tag.end()
        if tag[0] == "<think>":
            ending = _END_OF_REASONING.search(text, place)
            assert ending is not None, "the pattern matches at the end"
            said.append(text[begin : tag.start()])
            reasoning.append(text[place : ending.start()])
            begin = place = ending.end()
        elif tag[0] == "</think>" and not reasoning:  # the chat template has written <think>
            reasoning, calls, begin = [text[: tag.start()]], [], place
        elif tag[0] == "<tool_call>":
            end, after = _end_of_call(text, place)
            calls.append(text[place:end])
            place = after
    return reasoning, [*said, text[begin:]], calls


def _end_of_call(text: str, start: int) -> tuple[int, int]:
    """Return where the body of a call ends that begins at `start`, and where the text after its tag
    begins."""
    first = _NOT_SPACE.search(text, start)
    assert first is not None, "the pattern matches at the end"
    try:
        end = _DECODER.raw_decode(text, first.start())[1]
    except _UNREADABLE:
        closing = None
    else:
        closing = _END_OF_CALL.match(text, end)
    closing = closing or _END_OF_OTHER_TEXT.search(text, start)
    assert closing is not None, "the pattern matches at the end"
    return closing.start(), closing.end()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except _UNREADABLE:
        return False
    return True


def _is_call(body: str, tools: Collection[str]) -> bool:
    """Return whether JSON without a tag is a call, or would be one if it could be read."""
    try:
        call = json.loads(body)
    except _UNREADABLE:
        broken = _BROKEN_CALL.match(body)
        return broken is not None and (not tools or broken[1] in tools)
    if not isinstance(call.get("name"), str) or not call.keys() <= _CALL_FIELDS:
        return False
    return call["name"] in tools if tools else not call.keys().isdisjoint(_ARGUMENTS)


def _read(body: str, call_id: str) -> ToolCall:
    try:
        call = json.loads(body)
    except _UNREADABLE as error:
        return ToolCall("", {}, call_id, f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, call_id, 'the call must be {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(
        arguments, str
    ):  # some models write the arguments as JSON in a text, as OpenAI's API does
        try:
            arguments = json.loads(arguments)
        except _UNREADABLE as error:
            return ToolCall(call["name"], {}, call_id, f"the arguments are no JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, call_id, "the arguments must be a JSON object")
    return ToolCall(call["name"], arguments, call_id)
