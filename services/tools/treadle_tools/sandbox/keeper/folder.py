"""The state folder of one service: where it finds its keeper again.

Owns: the folder (mode 0700), its lock, the socket `keeper.sock` in it. Invariants: one service at a time holds the
lock, and the kernel lets go of it when that process ends, however it ends; only the holder makes a socket or a keeper.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import stat
from pathlib import Path

SOCKET = "keeper.sock"
LOG = "keeper.log"
SNAPSHOTS = "snapshots"
BACKLOG = 8


class FolderRefused(Exception):  # noqa: N818 - the folder's state, not a fault
    """The folder cannot be used; the message says why and what to do."""


class StateFolder:
    """See the module. Made by `StateFolder.take`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> "StateFolder":
        """The folder, made where it is missing, and locked. Raises FolderRefused."""
        while True:
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError as error:
                raise FolderRefused(f"{path} cannot be used: {error.strerror}") from error
            try:
                _require_private(path, os.fstat(descriptor))
                if not _lock(descriptor):
                    raise FolderRefused(
                        f"{path} belongs to another tools service that runs: give each service a folder of its own"
                    )
                if _is(path, descriptor):
                    return cls(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its keeper has just removed it

    @property
    def log(self) -> Path:
        """Where the keeper writes what it has to say."""
        return self.path / LOG

    @property
    def _socket(self) -> str:
        # A unix socket's path ends at 107 bytes; a folder's may be longer.
        return f"/proc/self/fd/{self._descriptor}/{SOCKET}"

    def connect(self) -> socket.socket | None:
        """To the keeper that runs; None where there is none."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self._socket)
        except OSError:
            end.close()
            return None
        return end

    def listen(self) -> socket.socket:
        """The socket of a keeper that is about to start. The folder has no keeper that runs."""
        Path(self._socket).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._socket)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    @property
    def snapshots(self) -> Path:
        """Where the service keeps snapshots."""
        return self.path / SNAPSHOTS

    def release(self, *, keep: bool) -> None:
        """Let another service have it. keep: with what is in it, for a keeper that runs on; else it is removed."""
        if not keep:
            _remove(self.path)
        os.close(self._descriptor)


def clear(path: Path) -> None:
    """A keeper's last act, after its socket: remove its log, and the folder unless a service holds it."""
    with contextlib.suppress(OSError):
        (path / LOG).unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if _lock(descriptor) and _is(path, descriptor):
                _remove(path)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    """A folder of somebody else's, with more in it, stays."""
    shutil.rmtree(path / SNAPSHOTS, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rmdir()


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Whether the open folder is still the one that `path` names."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _require_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise FolderRefused(f"{path} belongs to another user (uid {status.st_uid}): name a folder of your own")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FolderRefused(f"{path} is open to other users: chmod 700 {path}, or name another folder")
