"""Free ports are told before they are bound, so nobody else may be given them meanwhile."""

import random
import socket

import pytest
from treadle_cli.mesh import services as ports


def test_ports_differ_and_can_be_bound() -> None:
    chosen = ports.free_ports(50)
    assert len(set(chosen)) == 50
    assert all(ports.is_free(port) for port in chosen)


def test_the_kernel_gives_none_of_them_to_a_connection() -> None:
    first = int(ports.EPHEMERAL_RANGE.read_text().split()[0])
    assert all(ports.LOWEST <= port < first for port in ports.free_ports(50))


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((ports.HOST, ports.free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda among, count: [port])
        assert not ports.is_free(port)
        with pytest.raises(OSError, match="only 0 of 1 ports from 10000 to"):
            ports.free_ports(1)
