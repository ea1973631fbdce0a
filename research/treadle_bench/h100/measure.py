"""Treadle over SGLang engines on one NVIDIA card: curves, moves of KV, preemption, streams and
rollouts.

First one engine with the whole card (`alone`), then two that share it (`shared`) with a pool of KV
that the rollout's trajectories do not all fit in. Weights may be random (--load-format dummy):
lengths are forced, so that their values change nothing. What stands after -- goes to SGLang.

The figures are written to --pictures after each part, so that a run that is stopped keeps what it
had. `repeats`: of
each measurement, and epochs of the rollout after the first, which teaches Treadle's predictor:
Treadle plays an epoch
first, then the baselines play the same. A part that fails is named in `failed`, and the next one
goes on; a run with
--resume measures what its file lacks.
"""

import asyncio
import csv
import gzip
import json
import math
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import grpc.aio
from treadle import Client, TreadleError
from treadle.migrator.v1 import migrator_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.mesh import Mesh
from treadle_core.model import DecodeCurve
from treadle_sidecar.engine.process import SPARE_REQUESTS
from treadle_sim.systems import SYSTEMS
from treadle_sim.workloads.workload import Workload

from treadle_bench.bench import Bench, BenchOptions, Figures
from treadle_bench.fidelity.live import generate, play_live
from treadle_bench.fidelity.stage import live_policy
from treadle_bench.h100 import rollouts
from treadle_bench.h100.engine import (
    RawEngine,
    add_declared,
    compare_streams,
    describe_streams,
    draw_tokens,
    fill_slots,
    measure_decode,
    measure_prefill,
    open_session,
    resume_by_abort,
    resume_by_priority,
)
from treadle_bench.migration.measure import Stage, compare_prefix
from treadle_bench.moves import CALL_TIMEOUT_S, infos_of
from treadle_bench.processes import run_mesh
from treadle_bench.public_traces import read_public
from treadle_bench.summary import rounded

# a large pool, and preemption by SGLang
ALONE_FLAGS = ("--hicache-ratio", "1.2", "--enable-priority-scheduling")
# two of one engine alone, three of two that share
PARTS = ("curves", "preemption", "streams", "moves", "rollout")
REFERENCE_KEYS = ("system", "engine", "model", "tp")
REFERENCE = ("h100_sxm", "sglang", "Qwen3-8B", "1")
SOURCE = "swebench_verified_mini_gemini3"


@dataclass(frozen=True)
class Sizes:
    """What is measured. decode: batches at each context. pool: KV tokens of the engine that is
    alone, and of each of two. work: of rollouts.make_epochs, from prompts to tool_s."""

    decode: Sequence[tuple[int, Sequence[int]]]
    prefill: Sequence[int]
    pool: tuple[int, int]
    slots_alone: int
    victim: tuple[int, int]
    moves: Sequence[int]
    streams: Sequence[int]
    stream_tokens: tuple[int, int]
    work: tuple[int, int, int, int, int, float]


GPU = Sizes(
    decode=((1_000, (1, 4, 16, 64, 128)), (8_000, (1, 4, 16)), (16_000, (1, 8)), (256, (256,))),
    prefill=(512, 2_000, 8_000, 16_000),
    pool=(150_000, 48_000),
    slots_alone=254,
    victim=(4_000, 64),
    moves=(1_000, 4_000, 16_000),
    streams=(1, 16, 48),
    stream_tokens=(500, 200),
    work=(12, 8, 5, 300, 1_500, 2.0),
)
SMALL = Sizes(  # of --quick: whether it runs
    decode=((64, (1, 2)),),
    prefill=(64,),
    pool=(8_000, 8_000),
    slots_alone=4,
    victim=(64, 8),
    moves=(200,),
    streams=(1, 2),
    stream_tokens=(32, 8),
    work=(3, 2, 2, 20, 60, 0.2),
)


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises UsageProblem without --data, PublicTraceError, OSError, ProcessError."""
    if options.data is None:
        raise UsageProblem(
            "h100 needs --data, the folder of public traces that docs/traces.md names"
        )
    sizes = SMALL if options.quick else GPU
    works = read_public(SOURCE, options.data)
    figures: dict[str, Any] = {
        "model": options.engines.model,
        "repeats": options.repeats,
        "seed": options.seed,
    }
    figures |= {
        "slots": options.engines.slots,
        "pool": list(sizes.pool),
        **(options.earlier or {}),
        "failed": {},
    }
    figures["reference"] = read_reference(options.data)

    def keep(part: str, found: object) -> None:
        figures[part] = rounded(found, 6)
        options.progress.print(
            f"{part}: {json.dumps(figures[part])[:300]}", highlight=False, soft_wrap=True
        )
        if options.pictures is not None:
            options.pictures.mkdir(parents=True, exist_ok=True)
            (options.pictures / "h100.json").write_text(json.dumps(figures, indent=1) + "\n")

    def missing(*parts: str) -> bool:
        return any(part not in figures for part in parts)

    async def attempt(part: str, measuring: Callable[[], Awaitable[object]]) -> None:
        if part in figures:
            return
        began_s = time.monotonic()
        try:
            keep(part, await measuring())
        except (
            TreadleError,
            aiohttp.ClientError,
            grpc.aio.AioRpcError,
            ValueError,
            TimeoutError,
            ExceptionGroup,
        ) as e:
            figures["failed"][part] = repr(e)
            options.progress.print(f"{part} failed: {e!r}", soft_wrap=True, highlight=False)
        options.progress.print(f"{part} took {time.monotonic() - began_s:.0f} s", highlight=False)

    plan = options.engines
    pools = [("--max-total-tokens", str(tokens)) for tokens in sizes.pool]
    alone = replace(
        plan, count=1, slots=sizes.slots_alone, flags=(*pools[0], *ALONE_FLAGS, *plan.flags)
    )
    if missing(*PARTS[:2]):
        began_s = time.monotonic()
        async with run_mesh(alone, options) as mesh:
            keep("start_alone_s", time.monotonic() - began_s)
            await attempt("curves", lambda: _measure_curves(mesh, sizes, options))
            await attempt("preemption", lambda: _measure_preemption(mesh, sizes, options))
    if missing(*PARTS[2:]):
        began_s = time.monotonic()
        async with run_mesh(replace(plan, flags=(*pools[1], *plan.flags)), options) as mesh:
            keep("start_shared_s", time.monotonic() - began_s)
            keep(
                "declared_shared", [_curve_of(engine.info) for engine in await mesh.list_engines()]
            )
            await attempt("streams", lambda: _measure_streams(mesh, sizes, options))
            await attempt("moves", lambda: _measure_moves(mesh, sizes, options))
            epochs = rollouts.make_epochs(works, *sizes.work, options.seed, options.repeats + 1)
            keep("work", _describe_work(epochs[1]))
            await attempt("rollout", lambda: _play_epochs(mesh, epochs, keep))
    if missing(*PARTS):
        raise UsageProblem(
            f"h100: {', '.join(figures['failed'])} failed; --resume with the JSON measures what "
            "it lacks"
        )
    return figures


def _curve_of(info: Any) -> dict[str, float]:
    return {field.name: value for field, value in info.decode_curve.ListFields()}


async def _measure_curves(mesh: Mesh, sizes: Sizes, options: BenchOptions) -> dict[str, Any]:
    rng = random.Random(f"curves {options.seed}")
    (engine,) = await mesh.list_engines()
    declared = DecodeCurve(**_curve_of(engine.info))
    async with open_session(mesh.engines[0].key) as http:
        raw = RawEngine(http, mesh.engines[0].url)
        prefill = await measure_prefill(raw, sizes.prefill, options.repeats, rng)
        decode = await measure_decode(raw, sizes.decode, options.repeats, rng)
    decode, prefill = add_declared(decode, prefill, declared)
    return {"declared": _curve_of(engine.info), "decode": decode, "prefill": prefill}


async def _measure_preemption(mesh: Mesh, sizes: Sizes, options: BenchOptions) -> dict[str, Any]:
    """Beside full slots; the last repeat's order is the first's."""
    rng = random.Random(f"preemption {options.seed}")
    prompt_tokens, ahead = sizes.victim
    others = sizes.slots_alone + SPARE_REQUESTS - 1
    found: dict[str, list[float]] = {"abort_s": [], "priority_s": []}
    async with open_session(mesh.engines[0].key) as http:
        raw = RawEngine(http, mesh.engines[0].url)
        for _ in range(options.repeats):
            for name, resume in (("abort_s", resume_by_abort), ("priority_s", resume_by_priority)):
                async with fill_slots(raw, others, rng):
                    found[name].append(
                        await resume(raw, draw_tokens(rng, prompt_tokens), ahead, rng)
                    )
    return {"prompt_tokens": prompt_tokens, "ahead": ahead, "others": others, **found}


async def _measure_streams(mesh: Mesh, sizes: Sizes, options: BenchOptions) -> list[dict[str, Any]]:
    """On the first engine, the second one idle: straight from the engine, and through ticket and
    sidecar."""
    rng = random.Random(f"streams {options.seed}")
    prompt_tokens, tokens = sizes.stream_tokens
    engine_id = mesh.engines[0].engine_id
    rows: list[dict[str, Any]] = []
    async with open_session(mesh.engines[0].key) as http, Client(mesh.where.scheduler) as client:
        raw = RawEngine(http, mesh.engines[0].url)

        async def run_one(prompt: list[int]) -> tuple[float, float]:
            opening = client.open(
                prompt_id="stream", sample=0, prompt=prompt, pinned_engine_id=engine_id
            )
            async with await opening as trajectory:
                began_s = time.time()
                came_s = await generate(trajectory, tokens)
            return came_s[0] - began_s, (came_s[-1] - came_s[0]) / (tokens - 1)

        for streams in sizes.streams:
            for _ in range(options.repeats):
                straight = await compare_streams(raw, streams, prompt_tokens, tokens, rng)
                prompts = [draw_tokens(rng, prompt_tokens) for _ in range(streams)]
                through = describe_streams(await asyncio.gather(*map(run_one, prompts)))
                rows.append({"streams": streams, "engine": straight, "sidecar": through})
    return rows


async def _measure_moves(mesh: Mesh, sizes: Sizes, options: BenchOptions) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(mesh.where.scheduler))
        to_scheduler = await stack.enter_async_context(
            grpc.aio.insecure_channel(mesh.where.scheduler)
        )
        to_migrator = await stack.enter_async_context(
            grpc.aio.insecure_channel(mesh.where.services["migrator"])
        )
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler)
        policy = (
            await scheduler.GetPolicy(scheduler_pb2.GetPolicyRequest(), timeout=CALL_TIMEOUT_S)
        ).policy
        policy.migrate = False  # of itself: here the bench decides what moves
        request = scheduler_pb2.SetPolicyRequest(request_id=uuid.uuid4().hex, policy=policy)
        await scheduler.SetPolicy(request, timeout=CALL_TIMEOUT_S)
        infos = infos_of(await mesh.list_engines())
        stage = Stage(
            mesh, client, migrator_pb2_grpc.MigratorServiceStub(to_migrator), scheduler, infos
        )
        for tokens in sizes.moves:
            for repeat in range(options.repeats):
                one = await compare_prefix(
                    stage, random.Random(f"{tokens} {repeat} {options.seed}"), tokens
                )
                rows.append({"prefix_tokens": tokens, **one._asdict()})
    return rows


async def _play_epochs(
    mesh: Mesh, epochs: Sequence[Workload], keep: Callable[[str, object], None]
) -> dict[str, Any]:
    plays: list[dict[str, Any]] = []
    policy = live_policy(SYSTEMS["treadle"].policy)
    async with open_session(mesh.engines[0].key) as http:
        raw = [RawEngine(http, engine.url) for engine in mesh.engines]
        for number, work in enumerate(epochs):
            for name in rollouts.NAMES if number else rollouts.NAMES[:1]:
                await mesh.forget_caches()
                if name == rollouts.TREADLE:
                    await mesh.set_policy(policy)
                    played = await play_live(mesh.where.scheduler, work, f"{name} {number}")
                    ends_s = [each.finished_s for each in played]
                    more = {"preemptions": sum(each.preemptions for each in played)}
                else:
                    ends_s, more = await rollouts.play_raw(raw, work, name, f"{name} {number}"), {}
                plays.append(
                    {"epoch": number, "name": name, **rollouts.describe_play(ends_s, work), **more}
                )
                keep("plays", plays)
    return compare_plays(plays)


def compare_plays(plays: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the epochs after the first, of each system that played; ratio: of the best
    baseline's makespan over Treadle's in the same play, and its range. Raises ValueError where
    Treadle or every baseline played none."""
    counted: dict[str, list[dict[str, Any]]] = {name: [] for name in rollouts.NAMES}
    for play in plays:
        if play["epoch"]:
            counted[play["name"]].append(play)
    counted = {name: of for name, of in counted.items() if of}
    if rollouts.TREADLE not in counted or len(counted) == 1:
        raise ValueError("nothing to compare: Treadle or every baseline has played no epoch")
    found: dict[str, Any] = {
        name: {
            key: median(one[key] for one in of)
            for key in ("makespan_s", "mean_s", "tokens_per_s", "straggler_tax")
        }
        for name, of in counted.items()
    }
    best = min(
        counted.keys() - {rollouts.TREADLE}, key=lambda name: float(found[name]["makespan_s"])
    )
    pairs = list(zip(counted[best], counted[rollouts.TREADLE], strict=False))
    ratios = [one["makespan_s"] / own["makespan_s"] for one, own in pairs]
    return {
        **found,
        "best_baseline": best,
        "ratio": median(ratios),
        "spread": [min(ratios), max(ratios)],
    }


def _describe_work(work: Workload) -> dict[str, float]:
    each = work.trajectories
    count = len(each)
    return {
        "trajectories": count,
        "turns": sum(len(one.steps) for one in each) / count,
        "gen_tokens": sum(one.gen_tokens for one in each) / count,
        "most_gen_tokens": max(one.gen_tokens for one in each),
        "final_context_tokens": sum(one.final_context_tokens for one in each) / count,
        "tool_s": sum(step.tool_s for one in each for step in one.steps) / count,
    }


def read_reference(data: Path) -> dict[str, float]:
    """Milliseconds of a decode step of REFERENCE by "context/batch", out of kernels' times; empty
    where `data` lacks them."""
    file = data / "engine_aiconfigurator" / "DERIVED_decode_ms_per_token.csv.gz"
    if not file.is_file():
        return {}
    with gzip.open(file, "rt") as lines:
        rows = [
            row
            for row in csv.DictReader(lines)
            if tuple(row[key] for key in REFERENCE_KEYS) == REFERENCE
        ]
    return {f"{row['context']}/{row['batch']}": float(row["ms_per_token"]) for row in rows}


def page(figures: Figures) -> Figures:
    """What the page says beside the figures: decode rows with the reference of about the same
    context."""
    reference = figures["reference"]
    decode = [
        {
            **row,
            "reference_ms": reference.get(
                f"{2 ** round(math.log2(row['context']))}/{row['batch']}"
            ),
        }
        for row in figures["curves"]["decode"]
    ]
    return {
        "decode": decode,
        "names": [name for name in rollouts.NAMES if name in figures["rollout"]],
        "count": sum(
            play["name"] == rollouts.TREADLE for play in figures["plays"] if play["epoch"]
        ),
        "runs": len({play.get("run") for play in figures["plays"]}),
    }


BENCH = Bench(
    "h100",
    "Engines on one NVIDIA card, alone and two that share it: curves, preemption, streams, moves, "
    "rollouts of a trace (--data). SGLang's flags after --.",
    measure,
    engines=2,
    page=page,
    decides=(),
)
