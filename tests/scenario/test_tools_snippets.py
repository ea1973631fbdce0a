"""The `python` tool runs a piece of Python as `python file.py` runs it."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.docker_daemon import DockerDaemon, docker_daemon
from support.processes import ServiceProcess, import_path
from support.tools import ToolsCalls, calls_to, serve, shared_tools
from treadle.tools.v1 import tools_pb2 as pb

__all__ = ["docker_daemon"]

in_bubblewrap = serve(
    "python", MODULES="support.container_tools", PYTHONPATH=import_path(Path(__file__).parents[1])
)


@pytest.fixture(scope="module")
def in_docker(
    docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("docker")
    with shared_tools(
        folder, "python", **docker_daemon.settings("test-snippets", folder)
    ) as started:
        yield started


@pytest.fixture(params=["in_bubblewrap", "in_docker"])
def service(request: pytest.FixtureRequest) -> ServiceProcess:
    process: ServiceProcess = request.getfixturevalue(request.param)
    return process


# Ordinary programs. None ends with an expression that has a value, which the tool alone shows.
SNIPPETS = {
    "the names of a program": """
import sys, __main__
print(__name__, __package__, __spec__, __doc__, type(__builtins__).__name__, sorted(globals()))
print(__main__ is sys.modules["__main__"], __main__.__dict__ is globals(), type(__loader__).__name__)
""",
    "a docstring": '"""What it does."""\nprint(__doc__)',
    "a guard": "def main():\n    print('ran')\nif __name__ == '__main__':\n    main()",
    "a pool": """
from multiprocessing import Pool
def f(x): return x * x
if __name__ == "__main__":
    with Pool(2) as pool:
        print(pool.map(f, range(5)))
""",
    "a pool that is started anew": """
import multiprocessing
def f(x): return x + 1
if __name__ == "__main__":
    for how in ("spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(how, pool.map(f, range(3)))
""",
    "a process and a queue": """
from multiprocessing import Process, Queue, Value, Manager
def work(queue, value):
    value.value += 1
    queue.put(("done", value.value))
if __name__ == "__main__":
    queue, value = Queue(), Value("i", 1)
    process = Process(target=work, args=(queue, value))
    process.start()
    print(queue.get())
    process.join()
    with Manager() as manager:
        print(dict(manager.dict(a=1)), process.exitcode)
""",
    "a process that fails": """
from multiprocessing import Process
def work(): raise ValueError("in the child")
process = Process(target=work, name="worker")
process.start()
process.join()
print(process.exitcode)
""",
    "shared memory": """
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=16)
memory.buf[:3] = b"abc"
print(bytes(memory.buf[:3]))
memory.close(); memory.unlink()
""",
    "executors": """
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
def f(x): return x ** 3
with ThreadPoolExecutor(2) as threads, ProcessPoolExecutor(2) as processes:
    print(list(threads.map(f, range(4))), list(processes.map(f, range(4))))
""",
    "an executor that is left open": """
from concurrent.futures import ThreadPoolExecutor
import time
def f(x): time.sleep(0.05); print("late", x)
ThreadPoolExecutor(1).submit(f, 1) and None
""",
    "pickle": """
import copy, pickle
class Point:
    def __init__(self, x): self.x = x
point = pickle.loads(pickle.dumps(Point(3)))
print(type(point) is Point, point.x, copy.deepcopy(point).x, pickle.dumps(Point, 0))
""",
    "doctest": '''
import doctest
def double(x):
    """
    >>> double(2)
    4
    >>> double("a")
    'ab'
    """
    return x * 2
print(doctest.testmod(report=False))
''',
    "argparse": """
import argparse, sys
parser = argparse.ArgumentParser(prog="it")
parser.add_argument("--n", type=int, default=7)
print(parser.parse_args().n, len(sys.argv))
parser.parse_args(["--m"])
""",
    "unittest": """
import unittest
class TestSum(unittest.TestCase):
    def test_good(self): self.assertEqual(sum([1, 2]), 3)
    def test_bad(self): self.assertEqual(1, 2)
if __name__ == "__main__":
    unittest.main(argv=["it", "-q"])
""",
    "unittest that is well": """
import unittest
from unittest.mock import patch
def ask(): return "no"
class TestAsk(unittest.TestCase):
    @patch("__main__.ask", return_value="yes")
    def test_ask(self, ask_): self.assertEqual(ask(), "yes")
unittest.main()
""",
    "atexit": """
import atexit
@atexit.register
def second(): print("second")
atexit.register(print, "first")
print("main")
""",
    "atexit after a failure": """
import atexit
atexit.register(print, "ended")
atexit.register(lambda: 1 / 0)
raise KeyError("gone")
""",
    "objects that are left": """
count = [1]
class Held:
    def __init__(self, name): self.name = name
    def __del__(self): print("del", self.name, count)
held = Held("held")
del held
kept = Held("kept")
print("end")
""",
    "a dataclass": """
from __future__ import annotations
from dataclasses import asdict, dataclass, field
from typing import ClassVar, NamedTuple, get_type_hints
@dataclass(order=True)
class Item:
    name: str
    many: list[int] = field(default_factory=list)
    kind: ClassVar[str] = "k"
class Pair(NamedTuple):
    left: Item
print(Item("a"), asdict(Item("b", [1])), get_type_hints(Item), get_type_hints(Pair), Item.__module__)
""",
    "its own source": """
import inspect
class Thing:
    def method(self):
        return 1
def function(): return "f"
print(inspect.getsource(Thing), inspect.getsource(function), inspect.getsource(Thing.method))
print(inspect.getmodule(function).__name__, inspect.currentframe().f_lineno)
""",
    "its file": """
import os, pathlib, sys
print(os.path.isabs(__file__), pathlib.Path(__file__).parent == pathlib.Path.cwd())
print(len(open(__file__).read().splitlines()), os.path.abspath(sys.path[0]) == os.getcwd())
""",
    "a module beside it": """
import pathlib, sys
pathlib.Path("helper.py").write_text("def f(): return __name__")
import helper
print(helper.f())
""",
    "a traceback": """
def f(x):
    return 1 / x  # why

try:
    f(0)
except ZeroDivisionError as error:
    raise RuntimeError("wrapped") from error
""",
    "a note and a group": """
error = ValueError("first")
error.add_note("a note")
raise ExceptionGroup("many", [error, TypeError("second")])
""",
    "traceback printed": """
import traceback
def f(): raise LookupError("here")
try:
    f()
except LookupError:
    traceback.print_exc()
""",
    "a hook for exceptions": """
import sys
sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, trace.tb_lineno)
1 / 0
""",
    "no module of its own": "import sys\nsys.modules['__main__'] = 3\nprint('a')",
    "no output at all": "import sys\nsys.stdout = sys.stderr = None\n1 / 0",
    "exit with a number": "import sys\nprint('a')\nsys.exit(3)",
    "exit with a text": "import sys\nsys.exit('no such thing')",
    "exit as of a prompt": "print('a')\nexit(4)\nprint('b')",
    "exit with a boolean": "raise SystemExit(True)",
    "exit with less than 0": "import sys\nsys.exit(-1)",
    "exit with more digits than can be shown": "import sys\nsys.exit(10**5000 + 5)",
    "exit with 256": "import sys\nsys.exit(256)",
    "exit with a fraction": "import sys\nsys.exit(0.0)",
    "exit with what cannot be shown": """
class Bad:
    def __str__(self): raise ValueError("x")
raise SystemExit(Bad())
""",
    "exit of a thread": """
import sys, threading
thread = threading.Thread(target=sys.exit, args=(5,))
thread.start()
thread.join()
print("main")
""",
    "threads that outlive main": """
import threading, time
def work():
    time.sleep(0.1)
    print("late")
threading.Thread(target=work).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("main")
""",
    "a thread that fails": """
import threading
def work(): raise ValueError("in a thread")
thread = threading.Thread(target=work, name="worker")
thread.start()
thread.join()
print("main")
""",
    "an error that nobody can catch": """
class Bad:
    def __del__(self): raise ValueError("in del")
Bad() and None
print("main")
""",
    "asyncio": """
import asyncio
async def f(x):
    await asyncio.sleep(0.01)
    return x
async def main():
    print(await asyncio.gather(f(1), f(2)))
    process = await asyncio.create_subprocess_exec("echo", "hi", stdout=-1)
    print(await process.communicate())
asyncio.run(main())
""",
    "subprocess": """
import subprocess, sys
code = "import sys; print(sys.argv, sys.stdin.read())"
done = subprocess.run([sys.executable, "-c", code, "x"], input="in", capture_output=True, text=True)
print(done.stdout, done.stderr, done.returncode)
subprocess.run("echo from the shell; exit 3", shell=True) and None
print(subprocess.run([sys.executable, "-c", "import numpy, treadle_tools"]).returncode)
""",
    "warnings": """
import warnings
warnings.warn("first")
warnings.warn("second", DeprecationWarning)
warnings.warn("first")
def f(): warnings.warn("third", FutureWarning, stacklevel=2)
f()
""",
    "a warning of the compiler": "x = 'a\\d'\nprint(x is 'b')",
    "logging": """
import logging
logging.warning("root %s", 1)
logger = logging.getLogger(__name__)
logger.addHandler(logging.FileHandler("log.txt"))
logger.error("%s", logger)
logging.basicConfig(format="%(module)s %(funcName)s %(lineno)d %(message)s", force=True, level=10)
try:
    [][1]
except IndexError:
    logger.exception("failed")
""",
    "logging kept in memory": """
import logging, logging.handlers, sys
target = logging.StreamHandler(sys.stdout)
logging.getLogger().addHandler(logging.handlers.MemoryHandler(10, target=target))
logging.getLogger().error("flushed at the end")
""",
    "signals": """
import os, signal, time
signal.signal(signal.SIGALRM, lambda number, frame: print("alarm", number))
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.1)
signal.signal(signal.SIGTERM, lambda *_: print("term"))
os.kill(os.getpid(), signal.SIGTERM)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGPIPE))
""",
    "input at its end": "name = input('name? ')",
    "standard input": """
import sys
print(repr(sys.stdin.read()), sys.stdin.fileno(), sys.stdin.isatty(), list(sys.stdin))
""",
    "the names of the streams": """
import logging, sys
print(sys.stdout.name, sys.stdout.mode, sys.stderr.name, sys.stdin.name)
print(logging.StreamHandler())
""",
    "the whole source": """
import inspect, sys
print(inspect.getsource(sys.modules["__main__"]))
""",
    "bytes": """
import sys
print("text", end="", flush=True)
sys.stdout.buffer.write(b"\\x00\\xff\\n")
sys.stdout.buffer.flush()
sys.stdout.reconfigure(encoding="latin-1")
print("\\xe9", flush=True)
print("own", file=sys.__stdout__)
print("err", end="", file=sys.stderr)
""",
    "much": "print('x' * 20_000)\nfor n in range(2000): print(n)",
    "output that is caught": """
import contextlib, io, sys
with contextlib.redirect_stdout(io.StringIO()) as caught:
    print("hidden")
sys.stdout = io.StringIO()
print("lost")
sys.stdout = sys.__stdout__
print(repr(caught.getvalue()), end="")
""",
    "output that is closed": "import sys\nprint('a')\nsys.stderr.close()\nsys.exit(2)",
    "exec and eval": """
names = {}
exec("def f(): return [a for a in range(b)]\\nb = 2", names)
print(names["f"](), eval("1 + c", {"c": 1}), sorted(set(locals()) - set(globals())))
exec("raise ValueError('in exec')")
""",
    "recursion": """
def f(n): return f(n + 1)
try:
    f(0)
except RecursionError as error:
    print(error)
import sys
print(sys.getrecursionlimit())
sys.setrecursionlimit(3000)
def g(n): return n and g(n - 1)
print(g(2500))
raise SystemExit(1)
""",
    "a syntax error": "x = 1\nif x\n    print(x)",
    "an indentation error": "def f():\nprint(1)",
    "a return outside of a function": "print('not reached')\nreturn 1",
    "a wrong last line": "print('not reached')\nawait f()",
    "a mark of the byte order": "\ufeffprint('read')",
    "its user": "import getpass\nprint(len(getpass.getuser()) > 0)",
    "a server of its own": """
import http.server, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204)
        self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").status)
""",
    "more memory than there is": "x = [0] * 10**12",
    "a process that is not joined": """
import multiprocessing, time
def work(wait_s):
    time.sleep(wait_s)
    print("late")
multiprocessing.Process(target=work, args=(0.1,)).start()
multiprocessing.Process(target=work, args=(60,), daemon=True).start()
print("main")
""",
    "a finalizer": """
import weakref
class Thing: pass
thing = Thing()
weakref.finalize(thing, print, "finalized") and None
def steps():
    try:
        yield 1
    finally:
        print("closed")
begun = steps()
print(next(begun))
""",
    "an import that is not there": "import no_such_module",
    "a fork": """
import os
pid = os.fork()
if pid == 0:
    print("child", flush=True)
else:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
    "a fork that fails": """
import os
if os.fork() == 0:
    raise SystemExit(9)
print(os.waitstatus_to_exitcode(os.wait()[1]))
""",
    "all files closed": "import os\nos.closerange(3, 256)\nprint('done')",
    "all files closed before a failure": "import os\nos.closerange(3, 256)\nraise SystemExit(1)",
    "an end without clean-up": "import os\nprint('a', flush=True)\nos._exit(0)",
    "another program in its place": "import os\nos.execvp('sh', ['sh', '-c', 'echo other; exit 6'])",
    "a profile": """
import cProfile, timeit
def f(): return 1
cProfile.run("f()", "profile.out")
print(timeit.timeit("f()", globals=globals(), number=1) >= 0)
""",
    "a generic class and an enum": """
import enum, pickle, typing
T = typing.TypeVar("T")
class Box(typing.Generic[T]): pass
class Colour(enum.Enum): RED = 1
print(Box[int], pickle.loads(pickle.dumps(Colour.RED)), repr(T), Colour)
""",
    "lines that end as on Windows": "def f():\r\n    raise ValueError('x')\r\nf()\r\n",
    "lines that are none": "x = 'a\\x0cb \u2028 c'\n\x0c\nraise ValueError(len(x))",
}
EXIT_CODE = re.compile(r"(?:SystemExit: |exit code )(\d+)$")


def plainly(code: str, folder: Path) -> tuple[str, int]:
    """Output and exit code of `python file.py`."""
    folder.mkdir()
    file = folder / ".snippet.py"
    file.write_text(code, encoding="utf-8", newline="")
    done = subprocess.run(
        [sys.executable, "-u", "-X", "utf8", str(file)],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "USER": "nobody"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return shown(done.stdout.decode(errors="backslashreplace"), folder), done.returncode


def shown(output: str, folder: Path) -> str:
    """Output without what differs between any two runs: folders, addresses, process ids."""
    output = output.replace(str(folder), "/tmp")
    return re.sub(r"0x[0-9a-f]+|Process-\d+|in \d\.\d+s", "…", output)


async def by_the_tool(code: str, calls: ToolsCalls) -> tuple[str, int]:
    """Output and exit code of the tool."""
    result = await calls.python(code)
    if result.status == pb.RESULT_STATUS_OK:
        return shown(result.output, Path("/tmp")), 0
    code_of = EXIT_CODE.search(result.error)
    return shown(result.output, Path("/tmp")), int(code_of[1]) if code_of else 1


@pytest.mark.parametrize("name", SNIPPETS)
async def test_a_snippet_does_what_python_does(
    name: str, service: ServiceProcess, tmp_path: Path
) -> None:
    async with calls_to(service) as calls:
        tool, plain = await asyncio.gather(
            by_the_tool(SNIPPETS[name], calls),
            asyncio.to_thread(plainly, SNIPPETS[name], tmp_path / "plain"),
        )
    assert tool == plain


async def test_a_program_that_ends_itself_is_well(in_bubblewrap: ServiceProcess) -> None:
    async with calls_to(in_bubblewrap) as calls:
        result = await calls.python("import os\nos.execvp('true', ['true'])")
    assert (result.status, result.error) == (pb.RESULT_STATUS_OK, "")


async def test_a_hook_that_fails_hides_no_traceback(in_bubblewrap: ServiceProcess) -> None:
    async with calls_to(in_bubblewrap) as calls:
        for hook in ("del sys.excepthook", "sys.excepthook = lambda *_: sys.exit(0)"):
            result = await calls.python(f"import sys\n{hook}\n1 / 0")
            assert result.status == pb.RESULT_STATUS_TOOL_ERROR
            assert result.output.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("last", "error"),
    [("1 / 0", "ZeroDivisionError: division by zero"), ("sys.exit('why')", "SystemExit: why")],
)
async def test_a_failure_is_an_answer_although_its_output_is_closed(
    in_bubblewrap: ServiceProcess, last: str, error: str
) -> None:
    async with calls_to(in_bubblewrap) as calls:
        result = await calls.python(f"import sys\nsys.stderr.close()\n{last}")
    assert (result.status, result.error) == (pb.RESULT_STATUS_TOOL_ERROR, error)


async def test_the_snippets_of_a_session_leave_their_own_files_alone(
    in_bubblewrap: ServiceProcess,
) -> None:
    """One writes a file that it does not close, one is killed while its source is a file. Result:
    the next finds the first one's file, whole, and nothing else."""
    async with calls_to(in_bubblewrap) as calls:
        session = (await calls.open("counter")).session.session_id
        await calls.step(session, {"code": "f = open('notes', 'w')\nf.write('whole') and None"})
        await calls.step(session, {"code": "import os\nos.kill(os.getpid(), 9)  # __file__"})
        read = "import os\nprint(os.listdir(), os.listdir('/dev/shm'), open('notes').read())"
        assert (await calls.step(session, {"code": read})).output == "['notes'] [] whole\n"
        counted = await calls.step(session, {"add": 3})
    assert counted.output == "3", "the environment's own interpreter is as it was"
