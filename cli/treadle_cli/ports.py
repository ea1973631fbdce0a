"""Free TCP ports of the loopback interface.

A port is free when it is asked for, and may be taken a moment later: the one who binds it says so by name. All ports
of one call differ.
"""

import contextlib
import socket

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """`count` different ports, chosen by the kernel."""
    with contextlib.ExitStack() as sockets:
        ports = []
        for _ in range(count):
            listener = sockets.enter_context(socket.socket())
            listener.bind((HOST, 0))
            ports.append(int(listener.getsockname()[1]))
        return ports


def is_free(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
        return True
