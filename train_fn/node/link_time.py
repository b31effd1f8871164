"""Time how long a block of bytes takes from one node to another: one end receives it, the other
sends it and waits for an answer.

It uses plain sockets, so that it works before there is a process group. It is limited in time,
since a network may drop all that is sent. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from train_fn.node.network import listen_at

LINK_BYTES = 4 << 20
REPEATS = 3
"""The best of so many times counts, so that other load of the moment does not."""

_CHUNK_BYTES = 1 << 16


def take_in(ip: str, timeout_s: float) -> tuple[str, int]:
    """Receive the blocks of one sender, in a thread that ends with it or after ``timeout_s`` of
    silence. Return the address to send to.

    Raises OSError if ``ip`` is not this node's.
    """
    listener = listen_at(ip)
    listener.settimeout(timeout_s)
    threading.Thread(
        target=_take_in, args=(listener, timeout_s), name="link-time", daemon=True
    ).start()
    return ip, int(listener.getsockname()[1])


def pass_time(address: tuple[str, int], timeout_s: float) -> float | None:
    """Return the seconds in which a block of ``LINK_BYTES`` reached ``address``, the best of
    several; None if one took too long."""
    try:
        with socket.create_connection(address, timeout_s) as connection:
            return best_time(partial(_pass_block, connection, bytes(LINK_BYTES)))
    except OSError:
        return None


def _pass_block(connection: socket.socket, block: bytes) -> None:
    connection.sendall(block)
    if not connection.recv(1):
        raise ConnectionResetError("the other end has closed")


def _take_in(listener: socket.socket, timeout_s: float) -> None:
    with listener, contextlib.suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(timeout_s)
            received = 0
            while data := connection.recv(_CHUNK_BYTES):
                received += len(data)
                if received % LINK_BYTES == 0:
                    connection.sendall(b".")


def best_time(action: Callable[[], None], enough_s: float = 0.0) -> float:
    """Return the seconds of the fastest of several runs, or of the first that took less than
    ``enough_s``. An action must wait for its device."""
    times: list[float] = []
    while len(times) < REPEATS and min(times, default=math.inf) >= enough_s:
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)
