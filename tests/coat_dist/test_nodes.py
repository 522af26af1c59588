import socket

import pytest

from coat_dist import nodes


def test_free_port_is_unused_and_not_ephemeral(monkeypatch):
    with socket.socket() as other:
        port = nodes.free_port()
        assert port < 32768
        other.bind(("", port))  # it is free
        other.listen()
        monkeypatch.setattr(nodes, "_PORTS", range(port, port + 1))
        monkeypatch.setattr(
            nodes.random.SystemRandom, "sample", lambda self, ports, count: list(ports)
        )
        with pytest.raises(OSError, match="no free port: tried"):
            nodes.free_port()
    assert nodes.free_port() == port
