"""The types of a request and of its answer, whatever its HTTP form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treadle import Sampling, VersionSpan

Finish = Literal["stop", "length", "abort"]
HIGHEST_ID = 2**31 - 1  # logprob of a token
_NUMBER, _WHOLE = (int, float), (int,)
_KINDS: Mapping[str, tuple[type, ...]] = {  # ranges of Sampling's fields, where they are set
    "max_new_tokens": _WHOLE,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _WHOLE,
    "min_p": _NUMBER,
    "seed": _WHOLE,
    "ignore_eos": (bool,),
}


@dataclass(frozen=True)
class Order:
    """One generation. session: whose trajectory it belongs to; empty: found by its tokens. prompt:
    the whole context, as token ids, which nobody changes. rid: name by which it may be aborted.
    Raises Refused for a value of the wrong kind."""

    session: str
    prompt: list[int]
    sampling: Sampling
    rid: str

    def __post_init__(self) -> None:
        if not self.prompt:
            raise Refused("the prompt must have at least one token")
        if not isinstance(self.rid, str):
            raise Refused(f"rid: must be a text, is {self.rid!r}")
        given = vars(self.sampling)
        for name, kinds in _KINDS.items():
            value = given[name]
            if value is not None and type(value) not in kinds:
                raise Refused(f"{name}: must be of type {kinds[-1].__name__}, is {value!r}")
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            if not all(type(each) is kind for each in given[name]):
                raise Refused(
                    f"{name}: must hold values of type {kind.__name__} alone, is {given[name]!r}"
                )


@dataclass(frozen=True)
class Tokens:
    """New tokens of a generation. logprobs: one for each token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weight_version: str


@dataclass(frozen=True)
class Ended:
    """The end of a generation. trajectory_id: empty where the mesh was away."""

    finish: Finish
    trajectory_id: str = ""
    cached_tokens: int = 0


@dataclass
class Output:
    """Tokens of a generation so far, and its end. spans: of weight versions, over its tokens."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    ended: Ended | None = None

    def add(self, event: Tokens | Ended) -> None:
        """Take the next event."""
        if isinstance(event, Ended):
            self.ended = event
            return
        start, end = len(self.token_ids), len(self.token_ids) + len(event.token_ids)
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if self.spans and self.spans[-1].weight_version == event.weight_version:
            self.spans[-1] = VersionSpan(event.weight_version, self.spans[-1].start_token, end)
        elif start < end:
            self.spans.append(VersionSpan(event.weight_version, start, end))


def read_tokens(name: str, given: object) -> list[int]:
    """Return the value of a field that holds token ids. Raises Refused."""
    if (
        isinstance(given, list)
        and set(map(type, given)) == {int}
        and min(given) >= 0
        and max(given) <= HIGHEST_ID
    ):
        return given
    raise Refused(f"{name}: must be a list of token ids from 0 to {HIGHEST_ID}, at least one")


def read_stops(given: Mapping[str, object]) -> dict[str, Any]:
    """Return Sampling's stop and stop_token_ids, which have these names in all forms. Raises
    Refused."""
    stop, ids = given.get("stop") or [], given.get("stop_token_ids") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not isinstance(ids, list):
        raise Refused("stop, stop_token_ids: must be lists")
    return {"stop": tuple(stop), "stop_token_ids": tuple(ids)}


class Refused(Exception):  # noqa: N818 - what happened to the request
    """Raised where the request cannot be served as it is; the message names the field and what
    would be right."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
