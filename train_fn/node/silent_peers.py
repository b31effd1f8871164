"""End TCP connections whose other side has fallen silent, so that a collective fails in seconds if
a host is cut off.

A process that dies closes its connections, and its peers notice at once. A host that loses its
power or its cable closes nothing: the kernel retransmits for a quarter of an hour, and neither gloo
nor NCCL over TCP notices earlier. This watch reads the kernel's counters. It shuts a connection
down if sent bytes were not acknowledged for ``limit_s`` and nothing arrived either. On an idle
connection the kernel's keep-alive takes about as long. The rank that waits on such a connection
gets an error, leaves its step and keeps its state. A peer that is slow, stopped or in another step
still acknowledges, whatever its process does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

POLL_S = 1.0
_TCP_INFO = struct.Struct("=8B13I")
_RETRANSMITS, _UNACKED, _LAST_DATA_RECEIVED, _LAST_ACK_RECEIVED = 2, 8 + 4, 8 + 11, 8 + 12

_unheard: set[str] = set()
"""Addresses of hosts whose connections this process has ended."""
_watch: SilentPeers | None = None
"""The watch of this process."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traffic:
    """The kernel's counters of one connection."""

    unacknowledged: int
    """Segments on their way."""
    silent_s: float
    """Seconds since the other side was last heard."""


class SilentPeers:
    """Watch every TCP connection of this process to another host, on a thread that ends with the
    process."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waiting_since: dict[int, float] = {}
        self._known: set[int] = set()

    def start(self) -> None:
        threading.Thread(target=self._run, name="silent-peers", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(POLL_S)
            try:
                self.look(time.monotonic())
            except Exception:
                logger.exception("cannot read the state of connections; trying again")

    def look(self, now: float) -> list[str]:
        """Check all connections once. Return the other sides, as ``address:port``, of those that
        were ended. ``now`` is monotonic."""
        ended, seen = [], set()
        for inode, connection in _connections():
            with connection:
                seen.add(inode)
                with contextlib.suppress(OSError):
                    if inode not in self._known and not _leads_away(connection):
                        continue
                    if inode not in self._known:
                        self._known.add(inode)
                        _keep_alive(connection, self._limit_s)
                    if self._is_silent(inode, _traffic(connection), now):
                        address, port = connection.getpeername()[:2]
                        _unheard.add(str(address))  # before a thread that waits can ask
                        connection.shutdown(socket.SHUT_RDWR)
                        ended.append(f"{address}:{port}")
        for inode in set(self._waiting_since) - seen:
            del self._waiting_since[inode]
        self._known &= seen
        if ended:
            logger.warning(
                "nothing arrived from %s for %g s; closing these connections",
                ", ".join(ended),
                self._limit_s,
            )
        return ended

    def _is_silent(self, inode: int, traffic: Traffic, now: float) -> bool:
        if traffic.unacknowledged == 0 or traffic.silent_s < 2 * POLL_S:
            self._waiting_since.pop(inode, None)
            return False
        since = self._waiting_since.setdefault(inode, now)
        return min(traffic.silent_s, now - since) > self._limit_s


def watch_peers(ip: str, limit_s: float) -> None:
    """Watch this process's connections, unless ``limit_s`` is 0 or the cluster's address here,
    ``ip``, is on loopback. A process has one watch, however often this is called."""
    global _watch
    _unheard.clear()
    if _watch is None and limit_s > 0 and not ipaddress.ip_address(ip).is_loopback:
        _watch = SilentPeers(limit_s)
        _watch.start()


def unheard_hosts() -> tuple[str, ...]:
    """Return the addresses of the hosts from which nothing was heard since ``watch_peers``."""
    return tuple(sorted(_unheard))


def interface_of(ip: str) -> str | None:
    """Return the network interface of this host that has the address ``ip``; None if none has."""
    addresses = psutil.net_if_addrs().items()
    return next(
        (name for name, entries in addresses if any(entry.address == ip for entry in entries)), None
    )


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and a duplicate, to be closed soon, of every TCP socket of this process."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a path for each would be made in vain
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
            if (
                duplicate.family in (socket.AF_INET, socket.AF_INET6)
                and duplicate.type == socket.SOCK_STREAM
            ):
                yield status.st_ino, duplicate
            else:
                duplicate.close()


def _leads_away(connection: socket.socket) -> bool:
    """Return whether the other side is another host. Raises OSError if there is no other side."""
    return str(connection.getpeername()[0]) != str(connection.getsockname()[0])


def _keep_alive(connection: socket.socket, limit_s: float) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(limit_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(limit_s / 6)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _traffic(connection: socket.socket) -> Traffic:
    info = _TCP_INFO.unpack(
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    )
    return Traffic(info[_UNACKED], min(info[_LAST_DATA_RECEIVED], info[_LAST_ACK_RECEIVED]) / 1000)
