"""A connection is given up when nothing is heard on it, and only then."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import psutil
import pytest

from train_fn.node.network import SilentPeers, Traffic, interface_of, unheard_hosts, watch_peers

LIMIT_S = 15.0


@pytest.fixture
def watch() -> SilentPeers:
    return SilentPeers(LIMIT_S)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection between two addresses of this machine, as of two hosts."""
    with socket.socket() as listener, socket.socket() as near:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        near.bind(("127.0.0.1", 0))
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            yield near, far


def silent(watch: SilentPeers, looks: list[tuple[float, int, float]]) -> list[bool]:
    """Verdicts at (time, segments on their way, seconds since something was heard)."""
    return [
        watch._is_silent(1, Traffic(unacknowledged, heard_s), now)
        for now, unacknowledged, heard_s in looks
    ]


def test_a_peer_that_acknowledges_nothing_is_given_up_after_the_limit(watch: SilentPeers) -> None:
    looks = [(float(now), 3, float(now)) for now in range(0, 18)]
    assert silent(watch, looks) == [False] * 18
    assert silent(watch, [(18.5, 3, 18.5)]) == [True]


def test_a_connection_that_was_idle_for_an_hour_has_the_whole_time_for_its_first_bytes(
    watch: SilentPeers,
) -> None:
    assert silent(watch, [(0.0, 0, 3600.0), (1.0, 2, 3601.0), (10.0, 2, 3610.0)]) == [False] * 3
    assert silent(watch, [(16.5, 2, 3616.0)]) == [True]


def test_a_single_answer_begins_the_time_anew(watch: SilentPeers) -> None:
    assert (
        silent(
            watch, [(0.0, 2, 5.0), (14.0, 2, 14.0), (14.5, 2, 0.2), (16.0, 2, 3.0), (28.0, 2, 15.5)]
        )
        == [False] * 5
    )


def test_a_peer_that_reads_nothing_but_lives_is_kept(
    pair: tuple[socket.socket, socket.socket], watch: SilentPeers
) -> None:
    near, far = pair
    near.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            near.send(b"\0" * (1 << 20))
    assert [watch.look(float(now)) for now in range(0, 100, 5)] == [[]] * 20
    assert far.recv(1) == b"\0"


def test_connections_to_other_addresses_are_kept_alive_by_the_kernel(
    pair: tuple[socket.socket, socket.socket], watch: SilentPeers
) -> None:
    near, _ = pair
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
    watch.look(0.0)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    options = [
        near.getsockopt(socket.IPPROTO_TCP, name)
        for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    ]
    assert options[0] + options[1] * options[2] <= LIMIT_S
    near.send(b"still there")


def test_a_host_that_was_not_heard_is_remembered_until_the_next_attempt(
    pair: tuple[socket.socket, socket.socket],
    watch: SilentPeers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch_peers("127.0.0.1", LIMIT_S)
    assert unheard_hosts() == ()
    near, _ = pair
    is_silent = [True]
    monkeypatch.setattr(watch, "_is_silent", lambda *_: bool(is_silent and is_silent.pop()))
    [ended] = watch.look(0.0)
    assert unheard_hosts() == (ended.rpartition(":")[0],)
    assert near.recv(1) == b"", "the connection was ended"
    watch_peers("127.0.0.1", LIMIT_S)
    assert unheard_hosts() == ()


def test_an_interface_is_known_by_its_address() -> None:
    name, entries = next(
        (name, entries)
        for name, entries in psutil.net_if_addrs().items()
        if entries[0].address == "127.0.0.1"
    )
    assert interface_of(entries[0].address) == name
    assert interface_of("203.0.113.7") is None
