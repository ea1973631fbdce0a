"""`treadle` as a real process, and the processes below it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from support.processes import command_line
from support.sandbox import need_sandbox

STARTS_TOOLS = ("up", "attach", "demo")
PATIENCE_S = 90.0  # services start beside whatever else this machine does


class TreadleProcess:
    """A running `treadle ...`; what it prints goes to a file."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if arguments[0] in STARTS_TOOLS:
            need_sandbox()
        self.folder = folder
        self._patience_s = patience_s
        self.screen = folder / "screen.txt"
        with self.screen.open("wb") as screen:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "treadle_cli", *arguments],
                cwd=folder,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )
        self._tree: dict[int, psutil.Process] = {}

    def text(self) -> str:
        """All that it has printed."""
        return self.screen.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, and remember every process that is below this one meanwhile."""
        give_up_at = time.monotonic() + self._patience_s
        while not condition():
            self.look()
            assert self._process.poll() is None, (
                f"treadle ended with {self._process.returncode}:\n{self.text()}"
            )
            assert time.monotonic() < give_up_at, f"it never came true:\n{self.text()}"
            time.sleep(0.1)
        self.look()

    def look(self) -> list[psutil.Process]:
        """The processes below it now; remembered for `left_over`."""
        try:
            found = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._tree |= {process.pid: process for process in found}
        return found

    def everyone(self) -> list[psutil.Process]:
        """Treadle itself and the processes below it now."""
        return [psutil.Process(self._process.pid), *self.look()]

    def named(self, words: str) -> psutil.Process:
        """The one process below it whose command line holds `words`."""
        (found,) = [process for process in self.look() if words in command_line(process)]
        return found

    def send(self, number: signal.Signals) -> None:
        """A signal to treadle itself, as Ctrl-C in a shell of its own would."""
        self.look()
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code, once it ends."""
        return self._process.wait(self._patience_s)

    def left_over(self) -> list[str]:
        """Command lines of processes seen below it that still run, after a moment for the kernel to
        clear up."""
        _, alive = psutil.wait_procs(list(self._tree.values()), timeout=10.0)
        return [line for line in map(command_line, alive) if line]

    def end(self) -> None:
        """Make sure that nothing stays, also after a failed test."""
        self._process.kill()
        self._process.wait()
        for process in self._tree.values():
            with contextlib.suppress(psutil.NoSuchProcess):  # its guardian is quicker now and then
                process.kill()  # never another's: psutil looks at when it began
