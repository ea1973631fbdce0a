"""Hold the state folder of one service, where its next run finds the sandbox daemon and session
records.

This module owns the folder (mode 0700), its lock, the socket `daemon.sock` in it. Invariants: one
service at a time holds the lock, and the kernel releases it when that process ends, however it
ends; only the holder makes a socket or a daemon.
"""

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

SOCKET = "daemon.sock"
LOG = "daemon.log"
BACKLOG = 8


class FolderRefused(Exception):  # noqa: N818 - the folder's state, not a fault
    """The state folder cannot be used; the message gives the reason and the remedy."""


class StateFolder:
    """A folder that this process has locked. Made by `StateFolder.take`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.log = path / LOG  # of the daemon
        self._descriptor = descriptor
        # A unix socket's path ends at 107 bytes; a folder's may be longer.
        self._socket = f"/proc/self/fd/{descriptor}/{SOCKET}"

    @classmethod
    def take(cls, path: Path) -> "StateFolder":
        """Lock the folder, and make it where it is missing. Raises FolderRefused."""
        while True:
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError as error:
                raise FolderRefused(f"{path} cannot be used: {error.strerror}") from error
            try:
                _require_private(path, os.fstat(descriptor))
                if not _lock(descriptor):
                    why = (
                        "belongs to another tools service that runs: give each service a folder "
                        "of its own"
                    )
                    raise FolderRefused(f"{path} {why}")
                if _is(path, descriptor):
                    return cls(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its daemon has just removed it

    def connect(self) -> socket.socket | None:
        """Connect to the daemon that runs; None where there is none."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self._socket)
        except OSError:
            end.close()
            return None
        return end

    def listen(self) -> socket.socket:
        """Make the socket of a daemon that is about to start. No other daemon may run in the
        folder."""
        Path(self._socket).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._socket)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def release(self, *, keep: bool) -> None:
        """Unlock the folder.

        keep: whether its content stays for a daemon that goes on; else the folder is removed.
        """
        if not keep:
            _remove(self.path)
        os.close(self._descriptor)


def clear(path: Path) -> None:
    """Remove a daemon's log, once its socket is gone, and its folder unless a service holds it."""
    with contextlib.suppress(OSError):
        (path / LOG).unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if _lock(descriptor) and _is(path, descriptor):
                _remove(path)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove the folder, unless it holds files."""
    with contextlib.suppress(OSError):
        path.rmdir()


def _lock(descriptor: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is(path: Path, descriptor: int) -> bool:
    """Return whether `path` still names the open folder."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _require_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise FolderRefused(
            f"{path} belongs to another user (uid {status.st_uid}): name a folder of your own"
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FolderRefused(
            f"{path} is open to other users: chmod 700 {path}, or name another folder"
        )
