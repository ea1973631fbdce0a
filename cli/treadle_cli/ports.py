"""Free TCP ports of the loopback interface for services that are started later than their addresses are told.

They lie below the range from which the kernel serves outgoing connections and binds to port 0, so that no connection of
anybody takes one of them in between, however long an engine loads. Another program may still ask for one by number: the
one who finds it taken says so by name.
"""

import contextlib
import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
LOWEST = 10_000  # above the numbers that most services are known by
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_FROM = 32_768  # Linux' own default, where that file is not there
ENOUGH = 1_000  # ports to choose from
ATTEMPTS_PER_PORT = 100


def free_ports(count: int) -> list[int]:
    """`count` different ports at random. Raises OSError if so many are not to be had."""
    among = range(LOWEST, _ephemeral_from())
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for _ in range(count * ATTEMPTS_PER_PORT):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind((HOST, random.choice(among)))
                ports.append(int(listener.getsockname()[1]))
    if len(ports) < count:
        raise OSError(f"only {len(ports)} of {count} ports from {among.start} to {among.stop - 1} are free on {HOST}")
    return ports


def free_port() -> int:
    """One of `free_ports`."""
    return free_ports(1)[0]


def is_free(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
        return True


def _ephemeral_from() -> int:
    """The first port that the kernel gives out by itself; where it leaves none below, Linux' default."""
    try:
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return EPHEMERAL_FROM
    return first if first > LOWEST + ENOUGH else EPHEMERAL_FROM
