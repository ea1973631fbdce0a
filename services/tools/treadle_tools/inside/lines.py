"""Whom a cell talks to: lines that the keeper sends in over the cell's control socket, the newest alone.

Owns: the present line. Invariants: a request that was not read whole never happened, and an answer that could not be
sent whole is still in the supervisor's hands; the next line starts at the border of a frame.
"""

import contextlib
import select
import socket
from collections.abc import Mapping
from typing import Any

from treadle_tools.inside import frames

LONGEST_ORDER_BYTES = 64


class Lines:
    """See the module. control: the keeper's socket; its end is the cell's."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._line: socket.socket | None = None

    def next_request(self) -> tuple[dict[str, Any], int | None] | None:
        """The next request on the present line, and the open file that came with it, which is the caller's. None where
        the keeper has let go.
        """
        while True:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            if self._line is not None:
                poll.register(self._line, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._control.fileno() in ready:
                if not self._changed():
                    return None
            elif self._line is not None and (request := self._received(self._line)) is not None:
                return request

    def answer(self, message: Mapping[str, Any]) -> None:
        """Say it on the present line, if somebody listens there."""
        if self._line is not None:
            try:
                frames.send(self._line, message)
            except OSError:
                self._drop()

    def _changed(self) -> bool:
        """Take the line that the keeper sends. Whether it did."""
        try:
            order, descriptors, _, _ = socket.recv_fds(self._control, LONGEST_ORDER_BYTES, 1)
        except OSError:
            return False
        if not order:
            return False
        self._drop()
        self._line = socket.socket(fileno=descriptors[0])
        return True

    def _received(self, line: socket.socket) -> tuple[dict[str, Any], int | None] | None:
        with contextlib.suppress(OSError, frames.FrameError):
            if (request := frames.receive_with_file(line)) is not None:
                return request
        self._drop()
        return None

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
