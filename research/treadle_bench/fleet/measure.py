"""A fleet under load and chaos: emulated engines, real services, real sidecars, and clients that
keep thousands of trajectories open, all on this machine.

Engines are emulated (emulated.py): SGLang's HTTP surface with sleeps in real time; tools are waits
of the clients. Everything else is real: NATS, the services, one sidecar process an engine, CLIENTS
client processes with one job each, and a trainer that takes every group and compares each token
with what the engines should have sampled.

Once every trajectory has had its first ticket, an engine, the scheduler, NATS and a client are
killed by SIGKILL, one after the other, and started again at once; the client resumes its job, and
runs from their prompts what it had not submitted.

Keys: `lost`: trajectories that no batch held with the tokens that were expected; `doubled`: those
that came more than once. `steps_per_s`: tickets a second in the quiet time, from the last first
ticket until the client is killed, without the times from each death to its recovery; `p50_ms`,
`p99_ms`: of ScheduleStep there, seen by the clients. `all_p99_ms`: without leaving out the
recoveries. `first_p50_ms`: of first tickets, which wait for a slot. `rss_mb`: the most that a
scheduler process held. `chaos`: of each death `detected_s`, until the mesh, or who starts the
process again, had noticed it, and `recovered_s` from there: until every call for a ticket that
waited at that moment (`waited`) was answered, or, for the client, until it has opened a trajectory
again. `recovered_s` beside it: the longest.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from treadle import Client
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle.types import TrainingTrajectory
from treadle_cli.mesh.processes import HOST, Child, ProcessTree, describe_exit
from treadle_cli.mesh.services import ControlPlane, choose_addresses

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.fleet import emulated
from treadle_bench.fleet.load import OPENING, Call, prompt_of, turns_of
from treadle_bench.processes import run_tree

CLIENTS, CLIENT = 2, "client"
ENGINE_PROCESSES = 3  # the engine that is killed has one of its own beside them
POLL_S = 0.1
POLL_RECORDS_S = 2.0  # reading them takes a while
ASK_TIMEOUT_S = 10.0
LEASE_TTL_S = 10.0  # of engines: the scheduler's default
OPEN_TIMEOUT_S, DETECT_TIMEOUT_S, END_TIMEOUT_S = 900.0, 60.0, 2400.0
GROUPS_AT_ONCE = 8
STAGE = 3  # stopped before services and sidecars


@dataclass(frozen=True)
class Size:
    """prompts: of each client. tool_share: part of TOOL_S. calm_s: before each death."""

    engines: int
    prompts: int
    samples: int
    tool_share: float
    calm_s: float

    @property
    def trajectories(self) -> int:
        return CLIENTS * self.prompts * self.samples


FULL, QUICK = Size(64, 200, 16, 5.0, 30.0), Size(3, 2, 4, 0.15, 1.0)


@dataclass(frozen=True)
class Death:
    """What was killed, when, and when the mesh had noticed. Unix times."""

    what: str
    killed_s: float
    detected_s: float


class Fleet:
    """The processes of the bench."""

    def __init__(self, tree: ProcessTree, folder: Path, size: Size) -> None:
        self._tree, self._folder, self._size = tree, folder, size
        self._ids = [f"engine-{number}" for number in range(size.engines)]
        self._ports = tree.ports.choose(size.engines)
        where = choose_addresses(tree.ports, 0, self._ids)
        self.scheduler = where.scheduler
        self.plane = ControlPlane(tree, where, folder, LEASE_TTL_S)
        self.clients: list[Child] = []
        self._most_mb = 0.0

    async def start(self) -> None:
        """Raises ProcessError."""
        others = self._ports[1:]
        for number in range(ENGINE_PROCESSES):
            self._start_engines(f"engines-{number}", others[number::ENGINE_PROCESSES])
        self._start_engines(self._ids[0], self._ports[:1])
        await self.plane.start(together=())
        model = emulated.MODEL.curve.linear(emulated.SLOTS)
        curve = {
            "DECODE_BASE_S": model.base_s,
            "DECODE_PER_SEQUENCE_S": model.per_sequence_s,
            "DECODE_PER_KV_TOKEN_S": model.per_kv_token_s,
            "PREFILL_TOKENS_PER_S": model.prefill_tokens_per_s,
            "PREFILL_PAIR_S": model.prefill_pair_s,
        }
        curve_settings = {f"TREADLE_SIDECAR_{name}": repr(value) for name, value in curve.items()}
        for start in range(0, self._size.engines, 8):
            async with asyncio.TaskGroup() as group:
                for number in range(start, min(start + 8, self._size.engines)):
                    url = f"http://{HOST}:{self._ports[number]}"
                    settings = {"TREADLE_SIDECAR_ENGINE_URL": url, **curve_settings}
                    group.create_task(self.plane.start_sidecar(self._ids[number], settings))
        await until(lambda: self._is_registered(self._size.engines), OPEN_TIMEOUT_S)

    def start_client(self, number: int) -> None:
        """Start a client, or start it again."""
        size = self._size
        words = [
            self.scheduler,
            job_of(number),
            size.prompts,
            size.samples,
            size.tool_share,
            self.records(number),
        ]
        command = [sys.executable, "-m", "treadle_bench.fleet.load", *map(str, words)]
        self.clients[number : number + 1] = [
            self._tree.start(f"client-{number}", command, stage=STAGE)
        ]

    def records(self, number: int) -> Path:
        """The file that a client writes."""
        return self._folder / f"records-{number}.jsonl"

    def read_records(self, number: int) -> list[dict[str, Any]]:
        """The lines that a client has written until now; one that a kill cut is left out."""
        path, found = self.records(number), []
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found

    async def all_started(self) -> bool:
        """Whether every trajectory has had a ticket."""
        calls = [call for number in range(CLIENTS) for call in calls_of(self.read_records(number))]
        started = {call.trajectory_id for call in calls if call.answered and call.turn != OPENING}
        return len(started) == self._size.trajectories

    async def kill_engine(self) -> float:
        """Detected: the scheduler does not list the engine any more."""
        (child,) = (child for child in self._tree.children if child.name == self._ids[0])
        await kill(child)
        detected_s = await until(
            lambda: self._is_registered(self._size.engines - 1), DETECT_TIMEOUT_S
        )
        self._start_engines(self._ids[0], self._ports[:1])
        return detected_s

    async def kill_client(self) -> float:
        """Detected: whoever supervises it has started it again."""
        await kill(self.clients[0])
        self.start_client(0)
        return time.time()

    async def kill_scheduler(self) -> float:
        """Detected: it was started again and serves."""
        self._note_memory()
        await kill(self.plane.child("scheduler"))
        await self.plane.start_service("scheduler")
        return time.time()

    async def kill_nats(self) -> float:
        """Detected: it was started again and serves."""
        await kill(self.plane.child("nats"))
        await self.plane.start_nats()
        return time.time()

    def scheduler_mb(self) -> float:
        """The most memory that a scheduler process has held until now."""
        self._note_memory()
        return self._most_mb

    def _note_memory(self) -> None:
        status = Path(f"/proc/{self.plane.child('scheduler').pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        self._most_mb = max(self._most_mb, round(int(line.split()[1]) / 1024, 1))

    async def _is_registered(self, count: int) -> bool:
        async with grpc.aio.insecure_channel(self.scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            answer = await stub.ListEngines(
                scheduler_pb2.ListEnginesRequest(), timeout=ASK_TIMEOUT_S
            )
        return len(answer.engines) == count

    def _start_engines(self, name: str, ports: Sequence[int]) -> None:
        command = [sys.executable, "-m", "treadle_bench.fleet.emulated", *map(str, ports)]
        self._tree.start(name, command)


def job_of(number: int) -> str:
    """The job of a client."""
    return f"fleet-{number}"


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises ProcessError, TreadleError, TimeoutError."""
    size = QUICK if options.quick else FULL
    async with run_tree(options) as (tree, folder):
        fleet = Fleet(tree, folder, size)
        await fleet.start()
        options.progress.print(f"{size.engines} engines are registered", highlight=False)
        for number in range(CLIENTS):
            fleet.start_client(number)
        started_s = await until(fleet.all_started, OPEN_TIMEOUT_S, POLL_RECORDS_S)
        options.progress.print(f"{size.trajectories} trajectories have begun", highlight=False)
        deaths: list[Death] = []
        for what, act in chaos_of(fleet).items():
            await asyncio.sleep(size.calm_s)
            killed_s = time.time()
            deaths.append(Death(what, killed_s, await act()))
            options.progress.print(f"{what} killed", highlight=False)
        async with asyncio.timeout(END_TIMEOUT_S):
            for client in fleet.clients:
                await client.exited.wait()
        for client in fleet.clients:
            if client.returncode != 0:
                raise RuntimeError(
                    f"{client.name} {describe_exit(client.returncode)}: {client.tail()}"
                )
        lines = [fleet.read_records(number) for number in range(CLIENTS)]
        for error in itertools.chain.from_iterable(own[-1]["errors"][:3] for own in lines):
            options.progress.print(f"a trajectory failed: {error}", highlight=False)
        batches = [each async for each in take_all(fleet, [own[-1]["rollout_id"] for own in lines])]
        rss_mb = fleet.scheduler_mb()
    calls = [calls_of(own) for own in lines]
    return {
        "engines": size.engines,
        "trajectories": size.trajectories,
        **count_samples(size, batches),
        **summarize(calls, deaths, started_s),
        "rss_mb": rss_mb,
        "cpus": len(os.sched_getaffinity(0)),
    }


Kill = Callable[[], Awaitable[float]]  # returns when the mesh had noticed, as Unix time


def chaos_of(fleet: Fleet) -> dict[str, Kill]:
    """What is killed, in order."""
    return {
        "engine": fleet.kill_engine,
        "scheduler": fleet.kill_scheduler,
        "nats": fleet.kill_nats,
        CLIENT: fleet.kill_client,
    }


def calls_of(lines: Iterable[Mapping[str, Any]]) -> list[Call]:
    """All calls of a client's records."""
    return [Call(*call) for line in lines for call in line.get("calls", ())]


async def take_all(fleet: Fleet, rollout_ids: Iterable[str]) -> AsyncIterator[TrainingTrajectory]:
    """Every trajectory of some rollouts, as a trainer gets them."""
    async with Client(fleet.scheduler) as client:
        for rollout_id in rollout_ids:
            while groups := (await client.get_batch(rollout_id, GROUPS_AT_ONCE, wait=False)).groups:
                for group in groups:
                    for trajectory in group.trajectories:
                        yield trajectory


def count_samples(size: Size, found: Sequence[TrainingTrajectory]) -> dict[str, int]:
    """`lost` and `doubled`, see the top of this module."""
    came: Counter[tuple[str, int]] = Counter()
    right = set()
    for trajectory in found:
        key = trajectory.prompt_id, trajectory.sample
        came[key] += 1
        if list(trajectory.tokens) == expected_tokens(*key):
            right.add(key)
    asked = [
        (prompt_of(job_of(number), index).id, sample)
        for number in range(CLIENTS)
        for index in range(size.prompts)
        for sample in range(size.samples)
    ]
    return {
        "lost": sum(key not in right for key in asked),
        "doubled": sum(count - 1 for count in came.values()),
    }


def expected_tokens(prompt_id: str, sample: int) -> list[int]:
    """All tokens of a trajectory."""
    job, _, number = prompt_id.rpartition("-")
    tokens = list(prompt_of(job, int(number)).tokens)
    turns = turns_of(prompt_id, sample)
    for number_, turn in enumerate(turns, start=1):
        for _ in range(turn.gen_tokens):
            tokens.append(emulated.next_token(tokens[-1], len(tokens)))
        if number_ < len(turns):
            tokens += turn.observed
    return tokens


def summarize(
    calls: Sequence[Sequence[Call]], deaths: Sequence[Death], started_s: float
) -> dict[str, Any]:
    """Figures of the calls of each client; `deaths` end with that of the first client."""
    together = logical_calls(call for own in calls for call in own if call.turn != OPENING)
    chaos = {
        death.what: recover(death, logical_calls(calls[0]) if death.what == CLIENT else together)
        for death in deaths
    }
    ended_s = deaths[-1].killed_s
    loud = join_spans(
        (death.killed_s, death.detected_s + chaos[death.what]["recovered_s"])
        for death in deaths[:-1]
    )
    steady = [
        call
        for call in together
        if call.answered and started_s <= call.begun_s and call.ended_s <= ended_s
    ]
    quiet = [
        call
        for call in steady
        if not any(begun_s <= call.ended_s and call.begun_s <= until_s for begun_s, until_s in loud)
    ]
    quiet_s = ended_s - started_s - sum(until_s - begun_s for begun_s, until_s in loud)
    first = [call for call in together if call.turn == 0 and call.answered and not call.lost]
    return {
        "steps_per_s": round(len(quiet) / quiet_s, 1),
        "p50_ms": _ms(quiet, 0.5),
        "p99_ms": _ms(quiet, 0.99),
        "all_p99_ms": _ms(steady, 0.99),
        "first_p50_ms": _ms(first, 0.5),
        "recovered_s": max(each["recovered_s"] for each in chaos.values()),
        "chaos": chaos,
    }


def recover(death: Death, calls: Sequence[Call]) -> dict[str, float]:
    """What became of the calls that waited when a death had been noticed."""
    at_s = death.detected_s
    if death.what == CLIENT:
        waited = [min(call.ended_s for call in calls if call.begun_s > at_s and call.answered)]
    else:
        waited = [
            call.ended_s for call in calls if call.begun_s <= at_s < call.ended_s and call.answered
        ]
    return {
        "detected_s": round(at_s - death.killed_s, 3),
        "recovered_s": round(max(waited, default=at_s) - at_s, 3),
        "waited": len(waited),
    }


def logical_calls(calls: Iterable[Call]) -> list[Call]:
    """Calls with their repeats: each from its first attempt to the answer, or to the last attempt
    where none came."""
    answered: list[Call] = []
    tried: dict[tuple[str, int, bool], Call] = {}
    for call in sorted(calls, key=lambda call: call.begun_s):
        key = call.trajectory_id, call.turn, call.lost
        first = tried.pop(key, call)
        call = call._replace(begun_s=first.begun_s)
        if call.answered:
            answered.append(call)
        else:
            tried[key] = call
    return [*answered, *tried.values()]


def join_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time in order, those that overlap as one."""
    joined: list[tuple[float, float]] = []
    for begun_s, until_s in sorted(spans):
        if joined and begun_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(until_s, joined[-1][1]))
        else:
            joined.append((begun_s, until_s))
    return joined


def _ms(calls: Sequence[Call], quantile: float) -> float:
    return round(
        float(np.quantile([call.ended_s - call.begun_s for call in calls], quantile)) * 1e3, 3
    )


async def kill(child: Child) -> None:
    """SIGKILL, and wait for its end."""
    os.kill(child.pid, signal.SIGKILL)
    await child.exited.wait()


async def until(
    condition: Callable[[], Awaitable[bool]], timeout_s: float, poll_s: float = POLL_S
) -> float:
    """The Unix time at which a condition was first seen to hold. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - other processes make it true
            await asyncio.sleep(poll_s)
    return time.time()


BENCH = Bench(
    "fleet",
    "64 emulated engines and 6,400 live trajectories on this machine, while an engine, a client, "
    "the scheduler and NATS are killed. Takes about 25 minutes on 2 cores.",
    measure,
    page=lambda _: {"llm": emulated.LLM, "accelerator": emulated.ACCELERATOR},
    decides=("services/scheduler", "services/sidecar"),
)
