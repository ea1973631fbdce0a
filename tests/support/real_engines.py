"""Real SGLang engines on the CPU as child processes: one thread and one core each, KV through one
shared folder."""

import atexit
import functools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from support.processes import command_line, free_port, worker_number
from treadle_cli.mesh.guardian import kill_sessions
from treadle_runtime.fork_server import ForkedProcess, ForkServer
from treadle_sidecar.engine.process import SERVER, EngineSpec, engine_command, open_fork_server

START_DEADLINE_S = 240.0  # two engines that start together on a busy machine
POLL_S = 0.25
SLOTS = 2
KV_TOKENS = 8_000
KV_LIMIT_GB = 0.05  # of the folder of pages: 254 of the small model in float32
SMALL_LAYERS = 8  # of 30: such an engine prefills in a third of the time
ROOT = Path(__file__).parents[2]


def engine_python() -> Path:
    """The python of the engine's venv. Raises AssertionError saying how to get it."""
    venv = Path(os.environ.get("TREADLE_ENGINE_VENV", ROOT / ".venv-engine"))
    assert (venv / "bin" / "python").exists(), f"no engine venv at {venv}: make setup"
    return venv / "bin" / "python"


@functools.cache
def model_folder() -> str:
    """The converted model, made at the first use."""
    command = [str(engine_python()), "-m", "treadle_sidecar.sglang_cpu.model"]
    return (
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        .stdout.strip()
        .splitlines()[-1]
    )


def small_model_folder(folder: Path) -> str:
    """Make a folder with the first SMALL_LAYERS layers of the converted model, and return it. Its
    text means nothing; it is for tests in which tokens are only counted and compared."""
    whole, small = Path(model_folder()), folder / "small-model"
    small.mkdir()
    for file in whole.iterdir():
        (small / file.name).symlink_to(file)
    config = json.loads((whole / "config.json").read_text())
    (small / "config.json").unlink()
    (small / "config.json").write_text(json.dumps({**config, "num_hidden_layers": SMALL_LAYERS}))
    return str(small)


@functools.cache
def engine_forks() -> ForkServer:
    """Return the fork server of this run of the tests, which starts all engines; it imports SGLang
    at the first call."""
    server = open_fork_server(engine_python(), subprocess.DEVNULL)
    atexit.register(server.close)
    return server


def run_beside_sglang(program: Path, *arguments: str) -> None:
    """Run a Python file to its end in a process of the engine's venv that has imported SGLang
    already. Raises AssertionError with what it printed where it fails."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TREADLE_")}
    environ["PYTHONPATH"] = str(program.parent)
    with tempfile.TemporaryFile() as output:
        process = engine_forks().start(program.stem, environ, output.fileno(), arguments=arguments)
        code = process.wait()
        output.seek(0)
        assert code == 0, output.read().decode()


class RealEngine:
    """One engine; `start` may be called again after `kill`. without: an argument of SGLang that it
    does not get. model: a folder; by default the converted model."""

    def __init__(
        self,
        index: int,
        folder: Path,
        extra_args: tuple[str, ...] = (),
        weights: str = "auto",
        without: str = "",
        otlp_endpoint: str = "",
        model: str = "",
    ) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.log = folder / f"engine-{index}.log"
        self.kv = folder / "kv"
        self.spec = EngineSpec(
            engine_id=f"e{index}",
            port=free_port(),
            nccl_port=free_port(),
            cpu=True,
            model_path=model or model_folder(),
            venv_python=engine_python(),
            cores=(cores[(index + worker_number()) % len(cores)],),
            slots=SLOTS,
            kv_tokens=KV_TOKENS,
            weights=weights,
            hicache_dir=self.kv,
            hicache_limit_gb=KV_LIMIT_GB,
            extra_args=extra_args,
            otlp_endpoint=otlp_endpoint,
        )
        self._without = without
        self._process: ForkedProcess | None = None
        self.temp_folder = Path()  # of the process that runs

    @property
    def url(self) -> str:
        """http://127.0.0.1:<port>"""
        return f"http://127.0.0.1:{self.spec.port}"

    @property
    def running(self) -> bool:
        """Whether its process is there; `wait_ready` says whether it answers."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Begins to start, unless it runs."""
        if self.running:
            return
        self.kill()  # what an engine that ended by itself has left
        self.temp_folder = Path(tempfile.mkdtemp(prefix="treadle-"))
        self.kv.mkdir(exist_ok=True)
        command = engine_command(self.spec, {**os.environ, "TMPDIR": str(self.temp_folder)})
        arguments = [word for word in command.forked_arguments if word != self._without]
        with self.log.open("ab") as log:
            self._process = engine_forks().start(
                SERVER,
                command.env,
                log.fileno(),
                arguments=arguments,
                cores=self.spec.cores or (),
                new_session=True,
            )

    def wait_ready(self) -> None:
        """Returns once the engine answers. Raises AssertionError with its log."""
        ends_at = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            assert self._process is not None
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < ends_at, (
                f"{self.spec.engine_id}:\n{self.log.read_text()[-4000:]}"
            )
            time.sleep(POLL_S)

    def scheduler_process(self) -> psutil.Process:
        """SGLang's process that generates; another one answers HTTP."""
        assert self._process is not None
        [found] = [
            child
            for child in psutil.Process(self._process.pid).children(recursive=True)
            if "sglang::scheduler" in command_line(child)
        ]
        return found

    def kill(self) -> None:
        """End it at once with all its processes, as the kernel's memory killer would, and remove
        its temporary files. Fine where it does not run."""
        if self._process is not None:
            kill_sessions({self._process.pid})
            self._process.wait()
            self._process = None
            shutil.rmtree(self.temp_folder)

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Past the sidecar: POST, JSON both ways."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60.0) as response:
            return json.loads(response.read())

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/model_info", timeout=5.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
