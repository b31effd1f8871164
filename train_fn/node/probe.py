"""Test whether many hosts accept a connection at once: the fastest sign of a dead raylet.

Imports no torch: a driver, which imports this, starts before torch is loaded.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Sequence


def accepts_connection(addresses: Sequence[tuple[str, int]], timeout_s: float) -> list[bool]:
    """Return, for each ``(host, port)``, whether it accepted a TCP connection in ``timeout_s``."""
    return [answer is True for answer in ask(addresses, timeout_s)]


def ask(addresses: Sequence[tuple[str, int]], timeout_s: float) -> list[bool | None]:
    """Return, for each ``(host, port)``, whether it accepts a TCP connection; None if it does not
    respond within ``timeout_s``.

    All are tried in parallel. The host of a dead process refuses at once; a dead or cut-off host
    does not respond. Hosts must be IP addresses, since resolving a name would block.
    """
    accepted: list[bool | None] = [None] * len(addresses)
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as waiting:
        for index, (host, port) in enumerate(addresses):
            try:
                connection = socket.socket(
                    socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
                )
                connection.setblocking(False)
                connection.connect_ex((host, port))
                waiting.register(connection, selectors.EVENT_WRITE, index)
            except OSError:
                continue
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                connection = key.fileobj  # type: ignore[assignment]
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                # connected, refused by the host, or the network cannot reach it
                refused = False if error == errno.ECONNREFUSED else None
                accepted[key.data] = refused if error else True
                waiting.unregister(connection)
                connection.close()
        for key in list(waiting.get_map().values()):
            waiting.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
    return accepted
