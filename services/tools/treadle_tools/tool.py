"""The values of the service: a tool, and the outcome and result of one action.

Invariant: standard library only, because this module is read on both sides of the sandbox's wall. A tool's code is
named by `entry` and imported inside the sandbox; the service itself never imports it.
"""

import enum
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from treadle_tools.limits import MIB as MIB
from treadle_tools.limits import Limits as Limits


class Kind(enum.StrEnum):
    """How a tool is used: by single calls, by the steps of a session, or by the service to score a trajectory.

    Agents cannot call a reward: it is not listed among the tools, and Invoke does not find it.
    """

    STATELESS = "stateless"
    ENVIRONMENT = "environment"
    REWARD = "reward"


class Status(enum.StrEnum):
    """How an action ended. Only OK is what the agent wanted; none of them is a fault of the service."""

    OK = "ok"
    TOOL_ERROR = "tool_error"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"


@dataclass(frozen=True)
class Scaling:
    """How an action of a tool gets faster with more cores (ARL-Tangram, eq. 1).

    cores: the numbers of cores that it can use, ascending. serial_share: of its work, in [0, 1], what one core does
    whatever the others do (Amdahl); efficiency: measured instead, (cores, E) with E in (0, 1]. single_core_s: what an
    action takes on one core; None: learned from those that ended.
    """

    cores: tuple[int, ...]
    serial_share: float = 0.0
    efficiency: tuple[tuple[int, float], ...] = ()
    single_core_s: float | None = None


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


@dataclass(frozen=True)
class Judge:
    """A model that reads a trajectory and gives a score.

    prompt, system: templates in which `$name` stands for an argument; `$$` is a dollar. model: as its server calls it.
    endpoints: base URLs of servers with OpenAI's chat API, such as SGLang's; or service: a GPU service that is brought
    into memory for it. authorization_from_env: the environment variable with the Authorization header, such as
    `Bearer ...`; empty: none is sent.
    score: a regular expression whose one group is the score; its last match counts, since models reason first. low,
    high: the scores that the prompt allows; they become 0 and 1. tries: answers in all, until one has a score.
    at_once: questions under way.
    """

    prompt: str
    model: str
    endpoints: tuple[str, ...] = ()
    service: str = ""
    system: str = ""
    authorization_from_env: str = ""
    score: str = r"(?i)score\W{0,10}?(-?\d+(?:\.\d+)?)"
    low: float = 0.0
    high: float = 10.0
    temperature: float = 0.0
    max_tokens: int = 1024
    tries: int = 3
    at_once: int = 64
    wall_s: float = 300.0

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the templates ask for, each once."""
        names = [*string.Template(self.system).get_identifiers(), *string.Template(self.prompt).get_identifiers()]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Tool:
    """One registered tool.

    entry: "package.module:callable", imported in the sandbox. A stateless tool and a reward are
    `f(arguments) -> Outcome`, where the reward of a reward's outcome is the score; an
    environment is `f(arguments, sandbox) -> Environment`, called once a session.
    arguments_schema: JSON Schema of one call's or step's arguments; open_schema: of an environment's opening arguments.
    preload: modules imported once, before any action: what is slow to import belongs here.
    work_bytes: size of the private /tmp, and the largest file. processes: processes and threads at a time.
    reserve_bytes: memory that the node keeps for a session as long as it lives; the limit may be far above. scaling:
    None for a tool that uses `limits.cpu_cores`, no more and no less. provider: whose quota each call takes of
    (PROVIDERS_FILE); empty: nobody's. remote: where it runs instead of the sandbox; entry and what it may use there are
    then without meaning.
    backend: where it runs (bubblewrap, docker, kubernetes); empty: where the service runs tools (BACKEND).
    image: of its containers; empty: IMAGE. network: which network of the operator's (NETWORKS) its containers join;
    empty: none.
    """

    name: str
    kind: Kind
    description: str
    entry: str
    arguments_schema: Mapping[str, Any]
    open_schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "additionalProperties": False})
    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()
    work_bytes: int = 64 * MIB
    processes: int = 64
    reserve_bytes: int = 64 * MIB
    scaling: Scaling | None = None
    provider: str = ""
    remote: HttpFunction | Judge | None = None
    backend: str = ""
    image: str = ""
    network: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a tool answers. output is what the agent reads; reward and done are for environments and scorers.

    retry_after_s: the tool's provider refused, and asks to be left alone for so long; a call of a stateless tool is
    then made again by the service, if its caller has the time.
    """

    output: str = ""
    reward: float | None = None
    done: bool = False
    data: Mapping[str, Any] | None = None
    status: Status = Status.OK
    error: str = ""
    retry_after_s: float | None = None


class InvalidArguments(Exception):  # noqa: N818 - named as the gRPC code it becomes
    """Raised by a tool: an argument passes the schema but is wrong all the same. The caller gets INVALID_ARGUMENT."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(f"{name}: {description}")
        self.name = name
        self.description = description


class Sandbox(Protocol):
    """What an environment can ask of the sandbox it lives in."""

    @property
    def cores(self) -> int:
        """How many cores the present step may use. Of a stateless tool: the environment variable TREADLE_CORES."""
        ...

    def python(self, code: str) -> Outcome:
        """Run Python in a process of its own that sees the session's /tmp, but not the environment's memory."""
        ...


class Environment(Protocol):
    """A stateful tool: one object a session, in one process, called from one thread."""

    def first(self) -> Outcome:
        """The first observation."""
        ...

    def step(self, arguments: Mapping[str, Any]) -> Outcome:
        """One action of the agent. An exception is answered as TOOL_ERROR, and the session goes on."""
        ...


@dataclass(frozen=True)
class Result:
    """What came of an action, as the service sees it. Times in seconds.

    alive: the session's process can take another step. invalid: (argument, description) where the tool refused an
    argument. cores: that it was granted. held_s: for how long it held them. cpu_s: CPU seconds that it used; None
    where nobody counts. refused_s: for how long the tool's provider asked to be left alone.
    """

    status: Status
    output: str = ""
    truncated: bool = False
    error: str = ""
    reward: float | None = None
    done: bool = False
    data_json: str = ""
    alive: bool = True
    invalid: tuple[str, str] | None = None
    queue_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0
    cores: int = 1
    held_s: float = 0.0
    cpu_s: float | None = None
    refused_s: float | None = None

    def timed(self, *, queue_s: float, total_s: float) -> "Result":
        """The same with queue and overhead filled in: overhead is what is neither queue nor execution."""
        return replace(self, queue_s=queue_s, overhead_s=max(0.0, total_s - queue_s - self.execution_s))
