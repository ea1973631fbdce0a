"""Make the call that all adapters share: token ids in; tokens, logprobs, version spans and the
finish reason out.

A Link is the mesh for one event loop. Adapters of frameworks with a loop of their own use
`link_to`; those that are called from threads use `background`, a loop in a thread; one call about
the whole mesh is `call_mesh`. A step that the mesh itself aborts (a move, a preemption, a lost
engine) resumes inside the mesh; `abort` ends only what a pause of the framework has ended, with the
tokens that it has.

The address of the mesh is the adapter's `address`, or TREADLE_ADDRESS, or localhost:7401; `ray` is
the mesh of the Ray cluster that the process is in (`on_ray`). TREADLE_JOB names the job whose share
of the engines the framework uses.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from treadle.adapters.sessions import SWEEP_S, Sessions
from treadle.client import Client
from treadle.connection import finish
from treadle.step import shift_spans
from treadle.sync import EventLoop
from treadle.trajectory import Trajectory
from treadle.types import Outcome, Sampling, VersionSpan

DEFAULT_ADDRESS, ON_RAY = "localhost:7401", "ray"
IDLE_S = 1800.0  # longer than a tool runs
UNNAMED_IDLE_S = 30.0  # no request ends such a conversation, and an open one holds KV

# Names of the most tokens that an answer has
_LIMITS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
# Sampling parameters by their names in SGLang, vLLM and transformers, and the field of Sampling
# that each one sets.
_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")},
    "sampling_seed": "seed",
    "stop": "stop",
    "stop_strings": "stop",
    "stop_token_ids": "stop_token_ids",
    "eos_token_id": "stop_token_ids",
}
# Parameters that the mesh does not carry, with the values at which they have no effect.
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("repetition_penalty", "length_penalty", "n", "num_beams"), (None, 1, 1.0)),
    **dict.fromkeys(("num_return_sequences", "best_of"), (None, 1)),
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty", "min_new_tokens", "min_tokens"), (None, 0, 0.0)
    ),
    **dict.fromkeys(
        ("use_beam_search", "early_stopping", "regex", "json_schema", "ebnf", "logit_bias"),
        (None, False),
    ),
    # Adapters return the logprob of each sampled token; a larger number asks for others beside it
    "logprobs": (None, 0, 1),
}
# They set how the output is returned, not how it is sampled: adapters return token ids with the
# logprob of each. `limit_of` reads the limits.
_OF_THE_OUTPUT = frozenset(
    {
        *(
            "return_logprob",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "no_stop_trim",
            "detokenize",
        ),
        *("include_stop_str_in_output", "pad_token_id", *_LIMITS),
    }
)
_NOTHING: tuple[object, ...] = (None, "", [], (), {})  # values of what is not set


def address_of(address: str = "") -> str:
    """Return the address of the mesh's scheduler, host:port, or `ray`."""
    return address or os.environ.get("TREADLE_ADDRESS", "") or DEFAULT_ADDRESS


def client_at(address: str = "", job: str = "") -> Client:
    """Make a client of the mesh at an address, or of the Ray cluster's mesh. Raises RuntimeError
    where the cluster has none."""
    where = address_of(address)
    if where != ON_RAY:
        return Client(where, job=job)
    from treadle.adapters.on_ray import find_mesh

    found = find_mesh()
    return Client(found.address, tls_folder=found.tls_folder, job=job)


def sampling_of(params: Mapping[str, Any], max_new_tokens: int) -> Sampling:
    """Make Sampling from a framework's parameters. Raises ValueError that names a parameter which
    the mesh does not carry, unless it has no effect."""
    if not hasattr(params, "items"):
        raise ValueError(
            f"sampling parameters must be a mapping from names to values, are a "
            f"{type(params).__name__}: give those that differ from its defaults"
        )
    found: dict[str, Any] = {"stop": (), "stop_token_ids": ()}
    greedy = False
    for name, value in params.items():
        if name in _FIELDS:
            where = _FIELDS[name]
            if isinstance(found.get(where), tuple):  # two names of it may be given
                several = () if value is None else value
                found[where] += (value,) if isinstance(value, str | int) else tuple(several)
            elif value is not None and found.setdefault(where, value) != value:
                raise ValueError(f"{name}={value!r}: {where} is {found[where]!r} already")
        elif name == "do_sample":
            greedy = value is False
        elif name == "max_length" and limit_of(params) is not None:
            continue  # as in transformers, where it is the limit of prompt and output otherwise
        elif name not in _OF_THE_OUTPUT and not _is_one_of(value, _WITHOUT_EFFECT.get(name, ())):
            require_unset("the sampling parameters", **{name: value})
    if greedy:
        found["temperature"] = 0.0
    if found.get("top_k") == 0:  # vLLM's value for all tokens
        found["top_k"] = -1
    return Sampling(max_new_tokens=max_new_tokens, **found)


def limit_of(params: Mapping[str, Any]) -> int | None:
    """Return the most tokens that an answer may have, by whichever names the parameters give it;
    None where they do not."""
    given = [int(params[name]) for name in _LIMITS if params.get(name) is not None]
    return min(given, default=None)


def require_unset(where: str, **settings: object) -> None:
    """Raise ValueError that names the first of these settings that is set, none of which the mesh
    carries. where: it is set."""
    for name, value in settings.items():
        if not _is_one_of(value, _NOTHING):
            raise ValueError(
                f"{name}={value!r} is not carried by the mesh: leave it out of {where}"
            )


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    return any(value is each or value == each for each in values)


def require_text(**inputs: object) -> None:
    """Raise ValueError that names the input, if one is not text."""
    for name, value in inputs.items():
        if value is not None and not (isinstance(value, list | dict | tuple) and not value):
            raise ValueError(
                f"{name}: the mesh carries token ids alone; use the engines of the framework for "
                "images"
            )


def require_texts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a message with more than texts, which a chat template may leave out."""
    for message in messages:
        require_text(**{name: message.get(name) for name in ("images", "videos", "audios")})
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type", "text") != "text":
                require_text(**{str(part["type"]): part})


@dataclass(frozen=True)
class Answer:
    """The response to one request. token_ids, logprobs: equally long. version_spans: over
    token_ids. preemptions, cached_tokens, queue_s, prefill_s, decode_s: see Step."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    version_spans: tuple[VersionSpan, ...]
    trajectory_id: str
    preemptions: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, trajectory: Trajectory) -> Answer:
        """Make the answer from the trajectory's last step."""
        step = trajectory.steps[-1]
        return cls(
            token_ids=step.token_ids,
            logprobs=step.logprobs,
            finish_reason="abort" if step.finish_reason == "aborted" else step.finish_reason,
            version_spans=step.version_spans,
            trajectory_id=trajectory.trajectory_id,
            preemptions=step.preemptions,
            cached_tokens=step.cached_tokens,
            queue_s=step.queue_s,
            prefill_s=step.prefill_s,
            decode_s=step.decode_s,
        )

    def __add__(self, rest: Answer) -> Answer:
        """Return the answer that this one is the beginning of."""
        return replace(
            rest,
            token_ids=[*self.token_ids, *rest.token_ids],
            logprobs=[*self.logprobs, *rest.logprobs],
            version_spans=(
                *self.version_spans,
                *shift_spans(rest.version_spans, len(self.token_ids)),
            ),
            preemptions=self.preemptions + rest.preemptions,
            cached_tokens=self.cached_tokens,
            queue_s=self.queue_s + rest.queue_s,
            prefill_s=self.prefill_s + rest.prefill_s,
            decode_s=self.decode_s + rest.decode_s,
        )

    @property
    def numbered_versions(self) -> list[int]:
        """Return the weight versions whose names are numbers, in the order of the tokens."""
        return [
            int(span.weight_version)
            for span in self.version_spans
            if span.weight_version.isdecimal()
        ]

    def versions(self, otherwise: int) -> list[int]:
        """Return the weight version of each token; `otherwise` where the engine's name for its
        weights is not a number."""
        found = [otherwise] * len(self.token_ids)
        for span in self.version_spans:
            if span.weight_version.isdecimal():
                count = span.end_token - span.start_token
                found[span.start_token : span.end_token] = [int(span.weight_version)] * count
        return found


@dataclass(eq=False)
class _Scope:
    """One run of an agent. name: the session of its requests that name none. sessions: the sessions
    that it has used. outcome: None while it runs."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    sessions: set[str] = field(default_factory=set)
    outcome: Outcome | None = None


_scope: ContextVar[_Scope | None] = ContextVar("treadle_scope", default=None)


class Link:
    """Connection to the mesh for one event loop, with the trajectories that it has open."""

    def __init__(
        self, client: Client, idle_s: float = IDLE_S, unnamed_idle_s: float = UNNAMED_IDLE_S
    ) -> None:
        self.client, self.sessions = client, Sessions(client, idle_s, unnamed_idle_s)
        self._sweeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Link:
        await self.client.__aenter__()
        self._sweeping = asyncio.get_running_loop().create_task(
            self._sweep(), name="close-idle-trajectories"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.client.__aexit__(None, None, None)  # ends the calls of a sweep under way
        finally:
            if self._sweeping is not None:
                self._sweeping.cancel()
                await asyncio.wait({self._sweeping})

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        session: str = "",
        *,
        alone: bool = False,
        shared_seed: bool = False,
    ) -> Answer:
        """Generate the next turn of the trajectory that the prompt continues.

        session: whose turn it is; empty: the run of the agent (`one_run`), or any open trajectory
        whose tokens the prompt begins with. alone: the session has one trajectory at a time, so its
        other trajectories end. shared_seed: all samples of a prompt come with one seed, to which
        the index of the sample is added. Raises TreadleError.
        """
        scope = _scope.get()
        if scope is not None:
            session = session or scope.name
            scope.sessions.add(session)
        try:
            return Answer.of(
                await self.sessions.generate(
                    session, prompt, sampling, alone=alone, shared_seed=shared_seed
                )
            )
        finally:
            if scope is not None and scope.outcome is not None:
                await self.sessions.close(session, scope.outcome)

    async def generate_whole(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        session: str = "",
        *,
        shared_seed: bool = False,
    ) -> Answer:
        """Generate a turn as `generate` does, and where a pause ends it early, continue from its
        tokens, so that nobody takes them, or none, for the whole answer. Raises TreadleError."""
        whole = await self.generate(prompt, sampling, session, shared_seed=shared_seed)
        while whole.finish_reason == "abort" and (
            left := sampling.max_new_tokens - len(whole.token_ids)
        ):
            rest, context = replace(sampling, max_new_tokens=left), [*prompt, *whole.token_ids]
            whole += await self.generate(context, rest, session, shared_seed=shared_seed)
        return replace(whole, finish_reason="length") if whole.finish_reason == "abort" else whole

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sessions.sweep()


_links: dict[asyncio.AbstractEventLoop, dict[str, Link]] = {}


async def link_to(address: str = "") -> Link:
    """Return the link of the running loop to a mesh; the first call opens it. A process or a loop
    that ends without `leave` loses its lease within a minute, and the scheduler closes its open
    trajectories."""
    where = address_of(address)
    for loop in list(_links):
        if loop.is_closed():
            _links.pop(loop, None)
    links = _links.setdefault(asyncio.get_running_loop(), {})
    if where not in links:
        # Nothing is awaited in between, so that a second call finds it open.
        links[where] = await Link(client_at(where, os.environ.get("TREADLE_JOB", ""))).__aenter__()
    return links[where]


async def leave() -> None:
    """Close the links of the running loop, and their open trajectories."""
    async with AsyncExitStack() as stack:
        for link in _links.pop(asyncio.get_running_loop(), {}).values():
            stack.push_async_exit(link)


@asynccontextmanager
async def one_run(address: str = "") -> AsyncIterator[None]:
    """Make all requests without a session, while an agent runs, requests of one session, whose
    trajectories end with the run.

    It holds for the task that enters it, and for tasks that this one starts.
    """
    scope = _Scope()
    outcome: Outcome = "failed"
    token = _scope.set(scope)
    try:
        yield
        outcome = "finished"
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        _scope.reset(token)
        scope.outcome = outcome
        if scope.sessions:
            await finish(_close(address, scope.sessions, outcome))


async def _close(address: str, sessions: set[str], outcome: Outcome) -> None:
    link = await link_to(address)
    for session in sessions:
        await link.sessions.close(session, outcome)


_starting = threading.Lock()


def background() -> EventLoop:
    """Return the event loop in a thread of this process, for frameworks that call from threads."""
    with _starting:
        return _background()


@cache
def _background() -> EventLoop:
    return EventLoop()


def call_mesh(address: str, work: Callable[[Client], Awaitable[Mapping[str, str]]]) -> None:
    """Make one call about the whole mesh and wait for it, from any thread.

    work: returns errors by engine id. Raises RuntimeError that names the engines which failed, and
    TreadleError.
    """

    async def call() -> Mapping[str, str]:
        async with client_at(address) as client:
            return await work(client)

    require_no_errors(background().run(call()))


def require_no_errors(errors: Mapping[str, str]) -> None:
    """Raise RuntimeError that names the engines which failed, if any did."""
    if errors:
        said = "; ".join(f"{engine_id}: {error}" for engine_id, error in errors.items())
        raise RuntimeError(f"engines of the mesh have failed: {said}")
