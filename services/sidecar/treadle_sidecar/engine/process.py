"""Launch a SGLang server on a CPU core or on GPUs.

`engine_command` is a pure function from an `EngineSpec` to the command line and the environment;
the caller starts it (`treadle up`, the engine tests, or `python -m
treadle_sidecar.engine.process`). The engine lives in a venv of its own (engine/install.sh), so this
module imports nothing of it. A caller that starts several engines on a CPU has them forked
(`open_fork_server`, `EngineCommand.forked_arguments`).

Invariants: an engine listens on loopback only; a CPU engine uses one thread a core and is pinned to
its cores; no engine downloads a model.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from treadle_core.compiled import VNNI_FLAG, has_bf16, has_vnni

if TYPE_CHECKING:
    from treadle_runtime.fork_server import ForkServer

CPU_INFO = Path("/proc/cpuinfo")


WEIGHTS = (AUTO, INT8, FLOAT) = ("auto", "int8", "float")


def cpu_dtype(cpu_info: Path = CPU_INFO) -> str:
    """Return SGLang's name of the dtype to compute in: auto (the model's own) on a processor with
    bf16, else float32."""
    return "auto" if has_bf16(_read(cpu_info)) else "float32"


def choose_weights(asked: str, cpu: bool, cpu_info: Path = CPU_INFO) -> str:
    """Return int8 or float as requested; for auto, int8 on a processor that multiplies bytes.
    Raises ValueError."""
    if asked not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, not {asked!r}")
    able = cpu and has_vnni(_read(cpu_info))
    if asked == INT8 and not able:
        where = (
            f"on a processor without {VNNI_FLAG}"
            if cpu
            else "on GPUs, where SGLang has its own --quantization"
        )
        raise ValueError(f"weights must be float or auto {where}")
    return INT8 if able and asked != FLOAT else FLOAT


def _read(cpu_info: Path) -> str:
    try:
        return cpu_info.read_text()
    except OSError:
        return ""


ENGINE_HOST = "127.0.0.1"  # the sidecar beside it is the only client
PAGE_TOKENS = 16  # KV page: what HiCache stores and moves; a prefix is shared in multiples of it
# on the engine's path: its venv need not hold Treadle
STORAGE_BACKEND = Path(__file__).parents[1] / "hicache"
# host copies of the device pool; write-through passes KV through host memory on its way to storage
HICACHE_RATIO = 2
HICACHE_LIMIT_GB = 8.0  # of the folder of KV pages by default: 50,000 tokens of an 8B model
TRACE_LEVEL = "2"  # of SGLang's spans; its default, 3, sends one for each token
# engine slots above the queue's, so that a prefetch of a prefix never waits for a decoding step
SPARE_REQUESTS = 2
_REMOVED = (
    "SGLANG_USE_CPU_ENGINE",
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "TREADLE_SGLANG_CPU",
    "PYTHONPATH",
    "PYTHONHOME",
)
SERVER = "sglang.launch_server"
# All that an engine on a CPU imports until it serves: in processor seconds, five sixths of a start.
WARM_MODULES = (
    "sglang.srt.server_args",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "treadle_sidecar.sglang_cpu.cpu_platform",
    "treadle_sidecar.sglang_cpu.attention",
    "treadle_sidecar.sglang_cpu.int8",
)
CPU_MEM_FRACTION = "0.2"  # of the machine's memory; the KV pool itself is bounded by kv_tokens


@dataclass(frozen=True)
class EngineSpec:
    """Specification of one engine to start.

    `cores` pins a CPU engine (None: not pinned, one thread); `slots` is the number of steps that
    decode at once; `kv_tokens` is the KV pool (0: the engine's own choice), `context_tokens` the
    longest sequence (0: the model's own). `weights` of a CPU engine: int8, float, or auto for the
    faster. `hicache_dir` is the folder of KV pages shared by the engines between which KV moves
    (None: a move recomputes), and `hicache_limit_gb` the most that it may hold, the same for all of
    them. `extra_args` are SGLang flags and win over the ones chosen here. `nccl_port` is for the
    engine's own processes (0: SGLang chooses a port, and binds it seconds later, when another
    process may have taken it). `otlp_endpoint` is the collector of SGLang's own spans
    (http://host:port, "": none), which belong to the trace of the step's trajectory; the engine's
    venv needs OpenTelemetry for that. `config` is a YAML file of more flags, for those that must
    not stand on a command line. `rendezvous` is a new file at which the engine's own processes meet
    (None: torch's port, which is open to everybody and asks for no key).
    """

    engine_id: str
    port: int
    cpu: bool
    model_path: str
    venv_python: Path
    cores: tuple[int, ...] | None = None
    slots: int = 4
    kv_tokens: int = 0
    context_tokens: int = 0
    weights: str = AUTO
    hicache_dir: Path | None = None
    hicache_limit_gb: float = HICACHE_LIMIT_GB
    extra_args: tuple[str, ...] = ()
    seed: int = 0
    nccl_port: int = 0
    otlp_endpoint: str = ""
    config: Path | None = None
    rendezvous: Path | None = None


class EngineCommand(NamedTuple):
    """Arguments for `subprocess.Popen`; `env` is complete."""

    argv: tuple[str, ...]
    env: dict[str, str]

    @property
    def forked_arguments(self) -> tuple[str, ...]:
        """Return the arguments with which a fork server runs SERVER in place of `argv`."""
        return self.argv[self.argv.index(SERVER) + 1 :]


def engine_command(spec: EngineSpec, environ: Mapping[str, str] | None = None) -> EngineCommand:
    """Return the command that starts `spec`'s engine, which inherits `environ` (default: this
    process's).

    The argv starts with `taskset` where a CPU engine is pinned and the machine has it. Raises
    ValueError on a spec that cannot run.
    """
    if not 0 < spec.port < 65536:
        raise ValueError(f"port must be between 1 and 65535, not {spec.port}")
    if spec.slots < 1:
        raise ValueError(f"slots must be at least 1, not {spec.slots}")
    if not 0 < spec.hicache_limit_gb < math.inf:
        raise ValueError(f"hicache-limit-gb must be above 0, not {spec.hicache_limit_gb}")
    weights = choose_weights(spec.weights, spec.cpu)
    argv = [
        *_pin(spec),
        str(spec.venv_python),
        *("-m", SERVER, "--model-path", spec.model_path),
        *("--host", ENGINE_HOST, "--port", str(spec.port)),
        *("--max-running-requests", str(spec.slots + SPARE_REQUESTS)),
        *("--random-seed", str(spec.seed)),
        *("--incremental-streaming-output", "--enable-cache-report", "--enable-metrics"),
        *("--sleep-on-idle", "--log-level", "warning"),
    ]
    if spec.otlp_endpoint:
        argv += ["--enable-trace", "--otlp-traces-endpoint", spec.otlp_endpoint]
        argv += ["--otlp-service-name", "treadle-engine"]
    if spec.config is not None:
        argv += ["--config", str(spec.config)]
    if spec.nccl_port:
        argv += ["--nccl-port", str(spec.nccl_port)]
    if spec.kv_tokens:
        argv += ["--max-total-tokens", str(spec.kv_tokens)]
    if spec.context_tokens:
        argv += ["--context-length", str(spec.context_tokens)]
    if spec.cpu:
        argv += [
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--disable-overlap-schedule",
        ]
        argv += ["--mem-fraction-static", CPU_MEM_FRACTION, "--dtype", cpu_dtype()]
        if weights == INT8:
            argv += ["--quantization", "w8a8_int8"]  # of the platform plugin, not of SGLang
        # the flag under which the engine honours sampling seeds
        argv += ["--enable-deterministic-inference"]
    if spec.hicache_dir is not None:
        argv += _hicache_flags(spec.cpu, spec.hicache_limit_gb)
    return EngineCommand(
        (*argv, *spec.extra_args), _environment(spec, os.environ if environ is None else environ)
    )


def open_fork_server(venv_python: Path, output: int) -> "ForkServer":
    """Return a fork server that imports SGLang in the engine's venv, and then starts engines on a
    CPU. output: of the imports, which warn a lot; as `subprocess.Popen` takes it."""
    from treadle_runtime.fork_server import ForkServer

    env = _plain_environment(os.environ) | _cpu_environment(threads=1)
    return ForkServer(WARM_MODULES, python=str(venv_python), env=env, output=output)


def _pin(spec: EngineSpec) -> list[str]:
    taskset = shutil.which("taskset")
    if not spec.cpu or not spec.cores or taskset is None:
        return []
    return [taskset, "--cpu-list", ",".join(str(core) for core in spec.cores)]


def _hicache_flags(cpu: bool, limit_gb: float) -> list[str]:
    flags = [
        "--page-size",
        str(PAGE_TOKENS),
        "--enable-hierarchical-cache",
        "--hicache-ratio",
        str(HICACHE_RATIO),
    ]
    # write_through: a move needs the pages of the turn that has just ended; the other policies have
    # not written them.
    flags += ["--hicache-write-policy", "write_through", "--hicache-storage-backend", "dynamic"]
    # wait_complete: a prefetch that gives up early would prefill what storage has, and a move would
    # cost what it was to save.
    flags += ["--hicache-storage-prefetch-policy", "wait_complete"]
    backend = {
        "backend_name": "treadle",
        "module_path": "checked_pages",
        "class_name": "CheckedPages",
    }
    # The last two: with a page come the keys of its prefix, so that the folder's limit spares
    # prefixes in use.
    options = {"limit_gb": limit_gb, "interface_v1": 1, "hicache_storage_pass_prefix_keys": True}
    extra_config = json.dumps({"prefetch_threshold": PAGE_TOKENS, **backend, **options})
    flags += ["--hicache-storage-backend-extra-config", extra_config]
    if cpu:
        flags += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"]
    return flags


def _environment(spec: EngineSpec, environ: Mapping[str, str]) -> dict[str, str]:
    env = _plain_environment(environ)
    if spec.otlp_endpoint:
        env.setdefault("SGLANG_TRACE_LEVEL", TRACE_LEVEL)
    if spec.rendezvous is not None:
        env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = spec.rendezvous.absolute().as_uri()
    if spec.hicache_dir is not None:
        env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(spec.hicache_dir.absolute())
        env["PYTHONPATH"] = str(STORAGE_BACKEND)
    if spec.cpu:
        env |= _cpu_environment(len(spec.cores) if spec.cores else 1)
    return env


def _plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    env = {**environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Left over from a shell, these would change which platform or which folder the engine uses.
    for name in _REMOVED:
        env.pop(name, None)
    return env


def _cpu_environment(threads: int) -> dict[str, str]:
    return {
        **dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)
        ),
        "TREADLE_SGLANG_CPU": "1",
        "SGLANG_PLATFORM": "treadle_cpu",
        "CUDA_VISIBLE_DEVICES": "",
        # Without it the sampler is compiled with g++ at the first seeded token, for seconds, to no
        # gain at this size.
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one engine in the foreground, in place of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m treadle_sidecar.engine.process", description=main.__doc__
    )
    parser.add_argument("--engine-id", default="engine-0")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument(
        "--cpu", action="store_true", help="run on the CPU through Treadle's platform plugin"
    )
    model_help = "folder that SGLang serves, or a model name on a GPU machine"
    parser.add_argument("--model", dest="model_path", required=True, help=model_help)
    python_help = "python of the venv that holds SGLang"
    parser.add_argument(
        "--python", dest="venv_python", type=Path, default=Path(sys.executable), help=python_help
    )
    parser.add_argument(
        "--cores", type=int, nargs="*", default=(), help="cores to pin a CPU engine to"
    )
    for name in ("nccl_port", "slots", "kv_tokens", "context_tokens", "seed"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(EngineSpec, name)
        )
    weights_help = "of a CPU engine; auto: int8 where the processor multiplies bytes"
    parser.add_argument("--weights", choices=WEIGHTS, default=AUTO, help=weights_help)
    parser.add_argument(
        "--hicache-dir", type=Path, default=None, help="folder of KV pages that engines share"
    )
    limit_help = "most GB of pages in that folder; the same for all engines that share it"
    parser.add_argument("--hicache-limit-gb", type=float, default=HICACHE_LIMIT_GB, help=limit_help)
    otlp_help = (
        "OTLP gRPC collector of SGLang's spans, http://host:port (default: TREADLE_OTLP_ENDPOINT)"
    )
    parser.add_argument(
        "--otlp-endpoint", default=os.environ.get("TREADLE_OTLP_ENDPOINT", ""), help=otlp_help
    )
    known, extra = parser.parse_known_args(arguments)
    known.cores = tuple(known.cores) or None
    try:
        command = engine_command(
            EngineSpec(**vars(known), extra_args=tuple(arg for arg in extra if arg != "--"))
        )
    except ValueError as error:
        parser.error(str(error))
    if known.hicache_dir is not None:
        try:
            known.hicache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=known.hicache_dir):
                pass
        except OSError as error:
            parser.error(
                f"hicache-dir: user {os.getuid()} cannot write pages of KV to "
                f"{known.hicache_dir}: {error}"
            )
    os.execve(shutil.which(command.argv[0]) or command.argv[0], command.argv, command.env)


if __name__ == "__main__":
    main()
