"""The noun: an HTTP function. Standard library only, as `tool.py` that names it.

What goes wrong with a call of a function."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MIB = 1024 * 1024


@dataclass(frozen=True)
class HttpFunction:
    """A stateless function behind a URL. Arguments go as the JSON body (of a GET: as the query), never into the URL.

    headers_from_env: header to the environment variable that holds its value, for secrets. connect_s: longest wait for
    a connection, which a function scaled to zero has at once, since its platform takes it. cold_s: longest wait for the
    first byte of one that may have to start; `idle_s` after its last answer it may. Warm ones are waited for as long as
    they were seen to take, unless `learns` is off: then all for cold_s. tries: in all. idempotent: whether a call whose
    answer was lost may be sent again; one that was refused always may. response_bytes: a longer answer is an error.
    at_once: calls under way.
    """

    url: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    headers_from_env: Mapping[str, str] = field(default_factory=dict)
    connect_s: float = 2.0
    cold_s: float = 90.0
    idle_s: float = 60.0
    learns: bool = True
    tries: int = 6
    idempotent: bool = True
    response_bytes: int = MIB
    at_once: int = 64


class CallFailed(Exception):  # noqa: N818 - what happened, as callers speak of it
    """There is no answer; the message says why.

    again: the call may be sent again. retry_after_s: not before so many seconds, where that was said. tries: begun.
    timed_out: the caller's time was up.
    """

    def __init__(self, message: str, *, again: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.again = again
        self.retry_after_s = retry_after_s
        self.tries = 1
        self.timed_out = False
