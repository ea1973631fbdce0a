"""Choose ports for processes that bind them later."""

import itertools
import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
LOWEST = 10_000  # above the ports of well-known services
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_FROM = 32_768  # Linux' own default, where that file is not there
CANDIDATES = 1_000  # ports that are tried, at most


class Ports:
    """Free ports of one address of this machine; none is chosen twice, since an earlier one may not
    be bound yet."""

    def __init__(self, host: str = HOST) -> None:
        self.host = host
        self._chosen: set[int] = set()

    def choose(self, count: int) -> list[int]:
        """Return `count` different free ports, at random. Raises OSError if there are not so many.

        They lie below the range from which the kernel takes ports for outgoing connections and for
        port 0, so that no connection takes one of them before its service starts, however long an
        engine loads.
        """
        first = int(EPHEMERAL_RANGE.read_text().split()[0]) if EPHEMERAL_RANGE.exists() else 0
        among = range(LOWEST, first if first >= LOWEST + CANDIDATES else EPHEMERAL_FROM)
        new = (port for port in random.sample(among, CANDIDATES) if port not in self._chosen)
        ports = list(itertools.islice((port for port in new if is_free(port, self.host)), count))
        if len(ports) < count:
            among_text = f"from {among.start} to {among.stop - 1}"
            raise OSError(
                f"only {len(ports)} of {count} ports {among_text} are free on {self.host}"
            )
        self._chosen.update(ports)
        return ports


def is_free(port: int, host: str = HOST) -> bool:
    """Return whether no socket listens on this port of an address of this machine."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
        return True
