"""Moves between two live engines: what comes from storage, how much sooner the next token comes,
and who notices.

One mesh of two engines, each on its own core. The bench asks the migrator for the moves, so that no
policy decides whether one is worth it.

Of each repeat the first part plays one context three times: it generates, moves during a tool call
and goes on at the target (moved); it goes on at the source (stayed); and, when every cache and the
storage have been emptied, at the target (cold). In the second part trajectories that do not move
decode on both engines, while others move one after the other, each within a tool call of its own. A
gap is the time between two tokens of a trajectory that does not move; it counts as disturbed where
it overlaps a move.
"""

import asyncio
import itertools
import random
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
from treadle import Client, Sampling, Trajectory
from treadle.engine.v1.engine_pb2 import EngineInfo
from treadle.migrator.v1 import migrator_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle_cli.demo.run import warm_engines
from treadle_cli.mesh.checks import OtherPrograms
from treadle_cli.mesh.engines import forget_caches
from treadle_cli.mesh.mesh import Mesh

from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.fidelity.live import HIGHEST_TOKEN_ID, TOOL_MEDIAN_S, TOOL_S, TOOL_SIGMA
from treadle_bench.moves import CALL_TIMEOUT_S, infos_of, move_away
from treadle_bench.processes import run_mesh
from treadle_bench.summary import median_of, range_of

ENGINES = 2
# what moves; the end of it that was generated, not a prompt
PREFIX_TOKENS, FIRST_TOKENS = (1_500, 16)
OBSERVED_TOKENS, NEXT_TOKENS = 20, 32  # the tool's answer; the step after the move
MOVERS = 6  # a repeat: nine of ten prefixes of this length fit an engine's pool
OTHERS = 2  # trajectories that decode on each engine meanwhile
OTHER_PROMPT_TOKENS, OTHER_TOKENS = 100, 900  # they generate for longer than all moves take
SHORT_TOOL_S = 1.0  # a tool shorter than this need not hide a move
REST_S = 1.0  # without a move, before each move
MS = 1e3


class Compared(NamedTuple):
    """One context: the share that storage had, seconds to the first token, and whether the tokens
    are those of stayed."""

    hit_fraction: float
    moved_s: float
    stayed_s: float
    cold_s: float
    same_tokens: bool


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Moves beside others. moves: seconds of each, and of its tool call. gaps: between tokens, by
    engine and whether a move was under way."""

    moves: list[tuple[float, float]] = field(default_factory=list)
    quiet_s: list[float] = field(default_factory=list)
    disturbed_s: list[float] = field(default_factory=list)


class Stage(NamedTuple):
    """The mesh, and who calls it."""

    mesh: Mesh
    client: Client
    migrator: "migrator_pb2_grpc.MigratorServiceAsyncStub"
    scheduler: "scheduler_pb2_grpc.SchedulerServiceAsyncStub"
    infos: dict[str, EngineInfo]


async def measure(options: BenchOptions) -> dict[str, Any]:
    """repeats: contexts that are compared, and rounds of moves beside others. Raises ProcessError,
    TreadleError, ValueError for a move that failed."""
    compared: list[Compared] = []
    rounds: list[Disturbed] = []
    async with (
        run_mesh(options.engines, options) as mesh,
        Client(mesh.where.scheduler) as client,
        grpc.aio.insecure_channel(mesh.where.scheduler) as to_scheduler,
        grpc.aio.insecure_channel(mesh.where.services["migrator"]) as to_migrator,
    ):
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler)
        policy = (
            await scheduler.GetPolicy(scheduler_pb2.GetPolicyRequest(), timeout=CALL_TIMEOUT_S)
        ).policy
        policy.migrate = False  # of itself: here the bench decides what moves
        request = scheduler_pb2.SetPolicyRequest(request_id=uuid.uuid4().hex, policy=policy)
        await scheduler.SetPolicy(request, timeout=CALL_TIMEOUT_S)
        migrator = migrator_pb2_grpc.MigratorServiceStub(to_migrator)
        stage = Stage(mesh, client, migrator, scheduler, infos_of(await mesh.list_engines()))
        await warm_engines(
            mesh.engines, draw_tokens(random.Random(options.seed), OTHER_PROMPT_TOKENS)
        )
        # Not counted: the first of each kind.
        await compare_prefix(stage, random.Random(f"warm {options.seed}"), PREFIX_TOKENS)
        others = OtherPrograms()
        for seed in options.seeds:
            compared.append(one := await compare_prefix(stage, random.Random(seed), PREFIX_TOKENS))
            rounds.append(await _disturb(stage, random.Random(f"disturb {seed}")))
            line = f"first token {one.moved_s:.2f} s after a move, {one.cold_s:.2f} s cold; "
            line += f"moves of {', '.join(f'{move_s:.2f}' for move_s, _ in rounds[-1].moves)} s"
            options.progress.print(line, highlight=False)
        # while the engines still run: of a program that has ended the time is lost
        share = round(others.share(), 3)
    return {**report(compared, rounds), "seeds": options.seeds, "other_programs_share": share}


async def compare_prefix(stage: Stage, rng: random.Random, prefix_tokens: int) -> Compared:
    """One context of so many tokens. Raises TreadleError, ValueError for a move that failed."""
    prompt, observed = (
        draw_tokens(rng, count) for count in (prefix_tokens - FIRST_TOKENS, OBSERVED_TOKENS)
    )
    async with await stage.client.open(prompt_id="moved", sample=0, prompt=prompt) as trajectory:
        await _generate(trajectory, FIRST_TOKENS)
        move = await move_away(stage.migrator, stage.scheduler, trajectory, stage.infos)
        trajectory.observe(observed)
        context = list(trajectory.tokens)
        moved = await _generate(trajectory, NEXT_TOKENS)

    async def go_on(engine_id: str) -> Generated:
        opening = stage.client.open(
            prompt_id="there", sample=0, prompt=context, pinned_engine_id=engine_id
        )
        async with await opening as again:
            return await _generate(again, NEXT_TOKENS)

    stayed = await go_on(move.source_engine_id)
    await forget_caches(stage.mesh.engines, stage.mesh.kv.folder, stage.mesh.board.note)
    cold = await go_on(move.target_engine_id)
    hit_fraction = move.tokens_from_storage / move.prefix_tokens
    return Compared(
        hit_fraction, moved.first_s, stayed.first_s, cold.first_s, moved.tokens == stayed.tokens
    )


async def _disturb(stage: Stage, rng: random.Random) -> Disturbed:
    found = Disturbed()
    windows: list[tuple[float, float]] = []
    came_s: list[list[float]] = []
    decoding = asyncio.Barrier(ENGINES * OTHERS + 1)

    async def decode(engine_id: str) -> None:
        """Until cancelled."""
        times: list[float] = []
        came_s.append(times)
        prompt = draw_tokens(rng, OTHER_PROMPT_TOKENS)
        opening = stage.client.open(
            prompt_id="other", sample=0, prompt=prompt, pinned_engine_id=engine_id
        )
        async with await opening as other:
            chunks = other.generate(
                Sampling(max_new_tokens=OTHER_TOKENS, temperature=0.0, ignore_eos=True)
            )
            async with aclosing(chunks):
                async for _ in chunks:
                    times.append(time.perf_counter())
                    if len(times) == 1:
                        await decoding.wait()

    async with AsyncExitStack() as stack:
        movers = []
        for number in range(MOVERS):
            prompt = draw_tokens(rng, PREFIX_TOKENS - FIRST_TOKENS)
            opening = stage.client.open(prompt_id="mover", sample=number, prompt=prompt)
            movers.append(await stack.enter_async_context(await opening))
            await _generate(movers[-1], FIRST_TOKENS)
        others = [
            asyncio.create_task(decode(engine_id))
            for engine_id in stage.infos
            for _ in range(OTHERS)
        ]
        await decoding.wait()
        for mover in movers:
            await asyncio.sleep(REST_S)
            tool_s = draw_tool_s(rng)
            began_s = time.perf_counter()
            await move_away(stage.migrator, stage.scheduler, mover, stage.infos)
            windows.append((began_s, time.perf_counter()))
            found.moves.append((windows[-1][1] - began_s, tool_s))
            await asyncio.sleep(max(0.0, tool_s - found.moves[-1][0]))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    first_s, last_s = windows[0][0] - REST_S, windows[-1][1]
    for times in came_s:
        for gap in itertools.pairwise(times):
            if first_s <= gap[0] and gap[1] <= last_s:
                overlaps = any(gap[0] < end_s and begin_s < gap[1] for begin_s, end_s in windows)
                (found.disturbed_s if overlaps else found.quiet_s).append(gap[1] - gap[0])
    return found


def draw_tokens(rng: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(HIGHEST_TOKEN_ID) for _ in range(count)]


class Generated(NamedTuple):
    """The tokens of one step, and seconds from the request to the first of them."""

    tokens: Sequence[int]
    first_s: float


async def _generate(trajectory: Trajectory, count: int) -> Generated:
    """One greedy step of exactly `count` tokens. Raises ValueError."""
    began_s = time.perf_counter()
    sampling = Sampling(max_new_tokens=count, temperature=0.0, ignore_eos=True)
    came_s = [time.perf_counter() - began_s async for _ in trajectory.generate(sampling)]
    tokens = trajectory.steps[-1].token_ids
    if len(tokens) != count:
        raise ValueError(f"a step came to {len(tokens)} tokens instead of {count}")
    return Generated(tokens, came_s[0])


def draw_tool_s(rng: random.Random) -> float:
    """Seconds of a tool longer than SHORT_TOOL_S, distributed as those of `treadle bench
    fidelity`."""
    while True:
        tool_s = TOOL_MEDIAN_S * rng.lognormvariate(0.0, TOOL_SIGMA)
        if SHORT_TOOL_S < tool_s <= TOOL_S[1]:
            return tool_s


def report(compared: Sequence[Compared], rounds: Sequence[Disturbed]) -> dict[str, Any]:
    """The figures: medians over repeats, and least and greatest of each as `spread`."""
    added_ms = [(median(each.disturbed_s) - median(each.quiet_s)) * MS for each in rounds]
    hidden = [[move_s <= tool_s for move_s, tool_s in each.moves] for each in rounds]
    moves_s = [move_s for each in rounds for move_s, _ in each.moves]
    by_repeat = {
        "hit_fraction": [one.hit_fraction for one in compared],
        "ttft_moved_s": [one.moved_s for one in compared],
        "ttft_stayed_s": [one.stayed_s for one in compared],
        "ttft_cold_s": [one.cold_s for one in compared],
        "speedup": [one.cold_s / one.moved_s for one in compared],
        "added_ms_p50": added_ms,
        "move_s": [median(move_s for move_s, _ in each.moves) for each in rounds],
    }
    return {
        **{key: median_of(values) for key, values in by_repeat.items()},
        "same_tokens": round(sum(one.same_tokens for one in compared) / len(compared), 4),
        "hidden_fraction": round(
            float(np.mean([each for of_repeat in hidden for each in of_repeat])), 4
        ),
        "spread": {
            **{key: range_of(values) for key, values in by_repeat.items()},
            "hidden_fraction": range_of(float(np.mean(of_repeat)) for of_repeat in hidden),
        },
        "moves": len(moves_s),
        "longest_move_s": round(max(moves_s), 4),
        "quiet_gap_ms": _gaps([gap_s for each in rounds for gap_s in each.quiet_s]),
        "disturbed_gap_ms": _gaps([gap_s for each in rounds for gap_s in each.disturbed_s]),
    }


def _gaps(gaps_s: Sequence[float]) -> dict[str, float]:
    p50, p90 = (np.asarray(np.quantile(gaps_s, (0.5, 0.9))) * MS).tolist()
    return {
        "p50": round(p50, 1),
        "p90": round(p90, 1),
        "max": round(max(gaps_s) * MS, 1),
        "count": float(len(gaps_s)),
    }


def _page(_figures: Figures) -> Figures:
    return {
        "prefix_tokens": PREFIX_TOKENS,
        "next_tokens": NEXT_TOKENS,
        "movers": MOVERS,
        "others": OTHERS,
        "short_tool_s": SHORT_TOOL_S,
    }


BENCH = Bench(
    "migration",
    "Moves between two live engines: cached tokens, first token, hidden time, others' tokens. "
    "Starts engines. --repeats: contexts and rounds of moves; each takes a minute on 2 cores.",
    measure,
    engines=ENGINES,
    page=_page,
    decides=("services/migrator", "services/sidecar"),
)
