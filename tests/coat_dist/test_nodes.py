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


@pytest.mark.parametrize(
    "places, found",
    [
        ([("a", None, 0), ("a", None, 1), ("b", None, 0)], [[0, 1], [2]]),
        # srun --distribution=cyclic: ranks of a node do not follow one another.
        ([("a", "0", 0), ("b", "1", 0), ("a", "0", 1), ("b", "1", 1)], [[0, 2], [1, 3]]),
        # Two launchers on one host, or containers of one name.
        ([("a", None, 0), ("a", None, 1), ("a", None, 0), ("a", None, 1)], [[0, 1], [2, 3]]),
        ([("a", "0", 0), ("a", "1", 0), ("a", "1", 1)], [[0], [1, 2]]),
    ],
)
def test_by_node_has_the_ranks_of_each_node(places, found):
    assert nodes.by_node([nodes.Place(*place) for place in places]) == found
