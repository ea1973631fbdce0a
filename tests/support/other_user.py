"""A second user of this machine, as which a test tries what it can of a mesh that root runs: files,
processes, ports."""

import contextlib
import encodings.idna  # noqa: F401 - the other user may not be able to import it
import json
import os
import pickle
import socket
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TypeVar, cast
from urllib.parse import urlsplit

import psutil
import pytest

OTHER_USER = 54_321  # not 65534, as which sandboxes run
ANSWER_S = 10.0
# An HTTP/2 server answers the preface with its settings: a frame of type 4 of stream 0.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
SETTINGS_TYPE, HEAD_BYTES = 4, 9
T = TypeVar("T")
Address = tuple[str, int]
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can run a process as another user"
)


def as_other_user(look: Callable[[], T]) -> T:
    """What `look` returns in a fork of this process that belongs to the other user. It is a fork,
    and not a program, because that user need not be able to read this Python."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer: tuple[bool, object]
        try:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            answer = True, look()
        except BaseException as error:  # noqa: BLE001 - the parent shows it
            answer = False, repr(error)
        os.close(reader)
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        done, found = pickle.load(pipe)
    os.waitpid(pid, 0)
    assert done, found
    return cast(T, found)


def reachable(paths: Iterable[Path]) -> list[str]:
    """Those of the files, folders and sockets that this process can open, or write to."""
    found = []
    for path in paths:
        with contextlib.suppress(PermissionError, FileNotFoundError, OSError):
            if os.access(path, os.W_OK):
                found.append(f"{path} can be written")
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            found.append(f"{path} can be read")
    return found


def below(folder: Path) -> list[Path]:
    """Return all files and folders below one in which other processes work. A folder that they
    remove meanwhile is left out; `Path.rglob` would raise FileNotFoundError."""
    return [
        Path(parent, name)
        for parent, folders, files in os.walk(folder)
        for name in (*folders, *files)
    ]


def files_of(processes: Collection[psutil.Process], *folders: Path) -> set[Path]:
    """All files and sockets below these folders, and all that the processes have open, but for the
    kernel's own."""
    found = {path for folder in folders for path in (folder, *below(folder))}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {Path(file.path) for file in process.open_files()}
            names = [str(each.laddr) for each in process.net_connections("unix")]
            found |= {Path(name) for name in names if name.startswith("/")}
    return {path for path in found if path.parts[1] not in ("proc", "sys")}


def listeners_of(processes: Collection[psutil.Process]) -> dict[Address, str]:
    """The command of the process that listens at an address, by address."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    found[each.laddr.ip.removeprefix("::ffff:"), each.laddr.port] = " ".join(
                        process.cmdline()
                    )
    return found


@dataclass(frozen=True)
class OfProcess:
    """What this user learns of a process. more: what it can reach beyond that."""

    command: str
    more: list[str]


def look_at_processes(pids: Iterable[int]) -> list[OfProcess]:
    """What every user can read of these processes."""
    found = []
    for pid in pids:
        more = []
        for name in ("environ", "mem", "maps", "fd"):
            with contextlib.suppress(OSError):
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
                more.append(f"/proc/{pid}/{name}")
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            more.append(f"signals to {pid}")
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            found.append(OfProcess(command, more))
    return found


def ask(
    at: Address,
    path: str,
    headers: Mapping[str, str] = {},
    *,
    method: str = "GET",
    tls: bool = False,
) -> tuple[int, str]:
    """Status and beginning of the answer of an HTTP server; its certificate is not checked."""
    connection: HTTPConnection
    if tls:
        context = ssl._create_unverified_context()
        connection = HTTPSConnection(*at, timeout=ANSWER_S, context=context)
    else:
        connection = HTTPConnection(*at, timeout=ANSWER_S)
    try:
        body = json.dumps({}) if method == "POST" else None
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read(4096).decode(errors="replace")
    finally:
        connection.close()


def speaks_http2(at: Address, tls: Mapping[str, str] | None = None) -> bool:
    """Whether a gRPC server takes this caller. tls: certificate, key and authority by those names,
    all empty: without a certificate; None: plaintext."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        link = stack.enter_context(socket.create_connection(at, ANSWER_S))
        if tls is not None:
            context = ssl._create_unverified_context()
            context.set_alpn_protocols(["h2"])
            if tls:
                context.load_cert_chain(tls["certificate"], tls["key"])
            link = stack.enter_context(context.wrap_socket(link))
        link.sendall(HTTP2_PREFACE)
        head = link.recv(HEAD_BYTES)
        return len(head) == HEAD_BYTES and head[3] == SETTINGS_TYPE
    return False


def nats_answer(at: Address, user: str = "", password: str = "") -> str:
    """What a NATS server in plaintext says to a caller with these words, after its greeting."""
    with socket.create_connection(at, ANSWER_S) as link:
        lines = link.makefile("rb")
        assert lines.readline().startswith(b"INFO ")
        words = {"verbose": False, "pedantic": False, "user": user, "pass": password}
        link.sendall(f"CONNECT {json.dumps(words)}\r\nPING\r\n".encode())
        return lines.readline().decode().strip()


def address_of(url: str) -> Address:
    """Host and port."""
    parts = urlsplit(url)
    return str(parts.hostname), parts.port or 0


def require_grpc(addresses: Iterable[Address], certificates: Path | None) -> None:
    """The other user reaches these gRPC servers in plaintext, and none of a mesh with certificates.
    certificates: the folder of the mesh's."""
    addresses = list(addresses)
    if certificates is None:
        closed = as_other_user(lambda: [at for at in addresses if not speaks_http2(at)])
        assert not closed, closed
        return
    own = {"certificate": "tls.crt", "key": "tls.key"}
    own = {name: str(certificates / "operator" / file) for name, file in own.items()}
    others = [at for at in addresses if not speaks_http2(at, own)]
    assert not others, f"{others} are no gRPC"
    ways: tuple[dict[str, str] | None, ...] = ({}, None)
    taken = as_other_user(
        lambda: [(at, way) for at in addresses for way in ways if speaks_http2(at, way)]
    )
    assert not taken, taken


def require_nats(url: str) -> None:
    """The other user gets nothing of NATS without its password, or without a certificate where the
    URL has none."""
    parts = urlsplit(url)
    at, password = address_of(url), parts.password or ""
    if not password:
        assert not as_other_user(lambda: greets_without_tls(at))
        return
    tried = [("", ""), ("treadle", ""), ("treadle", "treadle"), ("", password), ("root", password)]
    answers = as_other_user(lambda: {nats_answer(at, *words) for words in tried})
    assert answers == {"-ERR 'Authorization Violation'"}, answers
    assert nats_answer(at, parts.username or "", password) == "PONG", "its owner"


def greets_without_tls(at: Address) -> bool:
    """Whether a caller in plaintext hears anything of a NATS server."""
    with socket.create_connection(at, 1.0) as link:
        try:
            return link.recv(5) == b"INFO "
        except (TimeoutError, ConnectionError):
            return False


def require_console(url: str) -> None:
    """The other user sees nothing of a console without the token that its URL has."""
    at = address_of(url)
    tried: dict[str, dict[str, str]] = {
        "/": {},
        "/?token=": {},
        "/?token=guess": {},
        "/api/events": {"Cookie": f"treadle-console-{at[1]}=guess"},
        "/api/trajectory?id=t": {},
        "/static/app.js": {},
    }
    found = as_other_user(lambda: {path: ask(at, path, more)[0] for path, more in tried.items()})
    assert set(found.values()) == {401}, found
    assert as_other_user(lambda: ask(at, "/api/control", method="POST")[0]) == 401
    assert ask(at, f"/?{urlsplit(url).query}")[0] == 200, "its owner"


def require_gateway(url: str, api_key: str) -> None:
    """The other user may call a gateway without a key, and sees no more than its health of one that
    has a key, by HTTPS alone."""
    at, secure = address_of(url), url.startswith("https://")
    assert secure == bool(api_key)
    paths = {"/v1/models": "GET", "/workers": "GET", "/flush_cache": "POST", "/nothing": "POST"}

    def look(key: str) -> list[int]:
        headers = {"Authorization": key}
        return [ask(at, path, headers, method=how, tls=secure)[0] for path, how in paths.items()]

    assert as_other_user(lambda: ask(at, "/health", tls=secure)[0]) in (200, 503)
    for key in ("", "Bearer ", "Bearer none", f"Bearer {'x' * 43}"):
        answers = as_other_user(partial(look, key))
        assert set(answers) == {401} if secure else 401 not in answers, answers
    if secure:
        assert 401 not in look(f"Bearer {api_key}"), "its owner"
        with pytest.raises((OSError, HTTPException)):
            ask(at, "/health")


def require_quiet_processes(pids: Iterable[int], secrets: Iterable[str]) -> list[str]:
    """The other user reads the command lines of these processes, without a secret in them, and
    nothing else. Return the command lines."""
    pids = list(pids)
    found = as_other_user(lambda: look_at_processes(pids))
    open_to_all = [each for each in found if each.more]
    assert not open_to_all, open_to_all
    lines = [each.command for each in found]
    told = [secret for secret in secrets if secret in "\n".join(lines)]
    assert not told, told
    return lines


def require_closed_files(paths: Collection[Path]) -> None:
    """The other user can open none of these files, folders and sockets."""
    assert as_other_user(os.geteuid) == OTHER_USER
    found = as_other_user(lambda: reachable(paths))
    assert not found, found
    assert len(reachable(paths)) >= len(paths) / 2, "their owner can: the paths are right"
