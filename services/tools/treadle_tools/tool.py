"""Define the values of the service: a tool, the limits of one action, and its outcome and result.

Invariant: this module imports the standard library only, because both sides of the sandbox's wall
import it. The field `entry` names a tool's code, which is imported inside the sandbox. Of foreign
tools the service itself never imports the code.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

MIB = 1024 * 1024

# Beside an action's memory: pages of the preloaded modules that a fork copies; the supervisor
WORKER_BYTES = 64 * MIB
# Beside an action's processes: init, the environment, and one that is being forked
WORKER_PROCESSES = 4
WORK_FOLDER_INODES = 16384  # kernel memory that the size of a work folder in bytes does not count
# The sandbox enforces its own wall clock; this long later the service stops waiting for its answer
BACKSTOP_S = 2.0


TEXT = {"type": "string"}  # the JSON Schema of a text


def object_schema(properties: Mapping[str, Any], *required: str, **more: int) -> dict[str, Any]:
    """Return the JSON Schema of an object that has these properties and no others.

    more: further rules of the schema, such as minProperties=1.
    """
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    return {**schema, "required": list(required)} if required else schema


class Kind(enum.StrEnum):
    """Way in which a tool is used: by single calls, by the steps of a session, or by the service to
    score a trajectory.

    Agents cannot call a reward: it is not listed among the tools, and Invoke does not find it.
    """

    STATELESS = "stateless"
    ENVIRONMENT = "environment"
    REWARD = "reward"


class Status(enum.StrEnum):
    """Status with which an action ended.

    Only OK is what the agent wanted; none of them is a fault of the service.
    """

    OK = "ok"
    TOOL_ERROR = "tool_error"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"


@dataclass(frozen=True)
class Limits:
    """Limits of one action in a sandbox: cores, memory, seconds and bytes of output.

    memory_bytes counts what the action adds to its preloaded worker, children included. How many
    processes an action may have, and how large its /tmp may be, are properties of its tool
    (`Tool.processes`, `Tool.work_bytes`).
    """

    cpu_cores: int = 1
    memory_bytes: int = 512 * MIB
    wall_s: float = 10.0
    output_bytes: int = 64 * 1024

    def message(self) -> dict[str, Any]:
        """Return the limits that the sandbox enforces by itself, as JSON."""
        return {each.name: getattr(self, each.name) for each in fields(Limits)}


@dataclass(frozen=True)
class Granted(Limits):
    """Limits with the cores that one action has been granted.

    cpu_cores: how many; cores: which, ascending; empty where any will do.
    """

    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scaling:
    """Speedup of a tool's actions with more cores (ARL-Tangram, eq. 1).

    cores: the numbers of cores that it can use, ascending. serial_share: of its work, in [0, 1],
    what one core does whatever the others do (Amdahl); efficiency: measured instead, (cores, E)
    with E in (0, 1]. single_core_s: what an action takes on one core; None: learned from those that
    ended.
    """

    cores: tuple[int, ...]
    serial_share: float = 0.0
    efficiency: tuple[tuple[int, float], ...] = ()
    single_core_s: float | None = None


@dataclass(frozen=True)
class Tool:
    """One registered tool.

    entry: "package.module:callable", imported in the sandbox. A stateless tool and a reward are
    `f(arguments) -> Outcome`, where the reward of a reward's outcome is the score; an environment
    is `f(arguments, sandbox) -> Environment`, called once a session. arguments_schema: JSON Schema
    of one call's or step's arguments; open_schema: of an environment's opening arguments. preload:
    modules imported once, before any action: what is slow to import belongs here. work_bytes: size
    of the private /tmp, and the largest file. processes: processes and threads at a time.
    reserve_bytes: memory that the node keeps for a session as long as it lives; the limit may be
    far above. scaling: None for a tool that uses `limits.cpu_cores`, no more and no less. provider:
    whose quota each call takes of (PROVIDERS_FILE); empty: nobody's. remote: an HttpFunction or
    Judge, which runs it instead; `entry` is then empty. backend: where it runs (bubblewrap, docker,
    kubernetes); empty: where the service runs tools (BACKEND). image: of its containers; empty:
    IMAGE. network: of the operator's (NETWORKS), for its containers; empty: none. reward_range:
    lowest and highest reward of an answer; another one is no answer. stopped_reward: of a call that
    takes too long or too much memory, or whose process ends without an answer, where the agent's
    code may cause that; None: such a call has no reward. runs_code: an argument is code that runs
    in the process that answers, so that a reward, data or refusal in its answer means nothing.
    """

    name: str
    kind: Kind
    description: str
    entry: str
    arguments_schema: Mapping[str, Any]
    open_schema: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "additionalProperties": False}
    )
    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()
    work_bytes: int = 64 * MIB
    processes: int = 64
    reserve_bytes: int = 64 * MIB
    scaling: Scaling | None = None
    provider: str = ""
    remote: object | None = None
    backend: str = ""
    image: str = ""
    network: str = ""
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    stopped_reward: float | None = None
    runs_code: bool = False


@dataclass(frozen=True)
class Outcome:
    """Answer of a tool. The agent reads output; reward and done are for environments and scorers.

    retry_after_s: the tool's provider refused, and requests this pause; a call of a stateless tool
    is then made again by the service, if its caller has the time.
    """

    output: str = ""
    reward: float | None = None
    done: bool = False
    data: Mapping[str, Any] | None = None
    status: Status = Status.OK
    error: str = ""
    retry_after_s: float | None = None


class InvalidArguments(Exception):  # noqa: N818 - named as the gRPC code it becomes
    """A tool raises this where an argument passes the schema but is wrong all the same.

    The caller gets INVALID_ARGUMENT.
    """

    def __init__(self, name: str, description: str) -> None:
        super().__init__(f"{name}: {description}")
        self.name = name
        self.description = description


class Sandbox(Protocol):
    """The sandbox that an environment lives in, as the environment can use it."""

    @property
    def cores(self) -> int:
        """Return how many cores the present step may use.

        A stateless tool reads the environment variable TREADLE_CORES instead.
        """

    def python(self, code: str) -> Outcome:
        """Run Python in a process of its own that sees the session's /tmp, but not the
        environment's memory."""


class Environment(Protocol):
    """A stateful tool: one object a session, in one process, called from one thread."""

    def first(self) -> Outcome:
        """Return the first observation."""

    def step(self, arguments: Mapping[str, Any]) -> Outcome:
        """Carry out one action of the agent.

        An exception is answered as TOOL_ERROR, and the session goes on.
        """


@dataclass(frozen=True)
class Result:
    """Result of an action, as the service sees it. Times in seconds.

    alive: whether the session's process can take another step. invalid: (argument, description)
    where the tool refused an argument. cores: that it was granted. held_s: for how long it held
    them. cpu_s: CPU seconds that it used; None where nobody counts. refused_s: for how long the
    tool's provider requested a pause. lost: whether the sandbox ended, by no limit of the action's,
    so that the action is not to blame.
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
    lost: bool = False

    def timed(self, *, queue_s: float, total_s: float) -> "Result":
        """Return the same result with queue and overhead: overhead is what is neither queue nor
        execution."""
        return replace(
            self, queue_s=queue_s, overhead_s=max(0.0, total_s - queue_s - self.execution_s)
        )
