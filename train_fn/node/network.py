"""A node's network: what a rank's processes are told about it, and peers that fell silent."""

from __future__ import annotations

import contextlib
import errno
import importlib
import ipaddress
import logging
import math
import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from everstep.doctor.nodes import GLOO_VARIABLE, NCCL_VARIABLE, lets_through

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def interface_problem(
    env: Mapping[str, str], *, nccl: bool, up: Collection[str] | None = None
) -> str | None:
    """Return why collectives could not connect through the interface that ``env`` names; None if
    they could, or if none is named.

    Args:
        nccl: whether NCCL is used, else gloo. Each reads a variable of its own.
        up: names of this machine's interfaces that are up and have an address; by default they are
            looked up.
    """
    variable = NCCL_VARIABLE if nccl else GLOO_VARIABLE
    value = env.get(variable, "").strip()
    if not value:
        return None
    known = _interfaces_up() if up is None else up
    if lets_through(variable, value, known):
        return None
    return (
        f"{variable}={value} names no network interface of node {os.uname().nodename} that is up "
        "and has an address; it has "
        f"{', '.join(sorted(known)) or 'none'}. Set env.{variable} in the spec to one that every "
        "node has, or leave it out"
    )


def meet_on_the_clusters_network(ip: str) -> None:
    """Let gloo listen at this node's address ``ip``, as Ray does, and not where the host's name
    resolves to.

    A variable that is set already stays.
    """
    interface = interface_of(ip)
    if interface is not None:
        os.environ.setdefault(GLOO_VARIABLE, interface)


def store_at(ip: str, timeout: timedelta) -> TCPStore:
    """Open a store that listens on this address only, at a free port. By itself torch's would
    listen on every address of the node."""
    from torch._C._distributed_c10d import TCPStore

    with listen_at(ip) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            ip,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def meet_at_the_given_address() -> None:
    """Let torch's own rendezvous listen only at the address that it is given (MASTER_ADDR), in this
    process. By itself it listens on every address of the node.

    If the address is not this node's, or the port is taken, torch does as ever.
    """
    from torch._C._distributed_c10d import TCPStore

    # A module: as an attribute, ``torch.distributed.rendezvous`` is a function.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original = getattr(rendezvous, "_create_c10d_store", None)
    if original is None or getattr(original, "__module__", None) == __name__:
        return  # a version of torch without it; or an earlier attempt has been here

    def create(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        *more: Any,
        **named: Any,
    ) -> Any:
        given = (hostname, port, rank, world_size, timeout)
        if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return original(*given, *more, **named)
        try:
            listening = listen_at(hostname, port)
        except OSError:
            return original(*given, *more, **named)
        with listening:
            return TCPStore(
                hostname,
                port,
                world_size,
                is_master=True,
                timeout=timeout,
                multi_tenant=True,
                master_listen_fd=listening.detach(),
            )

    rendezvous._create_c10d_store = create


def listen_at(host: str, port: int = 0) -> socket.socket:
    """Listen at this address only; at a free port by default. Raises OSError if it is not this
    node's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def _interfaces_up() -> set[str]:
    internet = (socket.AF_INET, socket.AF_INET6)
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name
        for name, found in psutil.net_if_addrs().items()
        if name in up and any(one.family in internet for one in found)
    }


# ---------------------------------------------------------------- silent peers

# End TCP connections whose other side has fallen silent, so that a collective fails in seconds if
# a host is cut off.
#
# A process that dies closes its connections, and its peers notice at once. A host that loses its
# power or its cable closes nothing: the kernel retransmits for a quarter of an hour, and neither
# gloo nor NCCL over TCP notices earlier. This watch reads the kernel's counters. It shuts a
# connection down if sent bytes were not acknowledged for ``limit_s`` and nothing arrived either. On
# an idle connection the kernel's keep-alive takes about as long. The rank that waits on such a
# connection gets an error, leaves its step and keeps its state. A peer that is slow, stopped or in
# another step still acknowledges, whatever its process does.

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
                    ends = connection.getpeername()[0], connection.getsockname()[0]
                    if inode not in self._known and ends[0] == ends[1]:  # within this host
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


def own_address() -> str:
    """Return the address of this host at which gloo listens, too."""
    interface = os.environ.get(GLOO_VARIABLE, "").partition(",")[0]
    for entry in psutil.net_if_addrs().get(interface, ()):
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address:
            return entry.address
    return socket.gethostbyname(socket.gethostname())


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


# ---------------------------------------------------------------- debug level

# How much torch checks and reports of its collectives: ``TORCH_DISTRIBUTED_DEBUG``.

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


def take_debug_level(*, over_nccl: bool) -> None:
    """Set torch's level by this process's environment, before it makes a process group.

    A warm process imported torch, which reads the variable then, before it got the run's
    environment. Over gloo DETAIL becomes INFO: with the wrapper that DETAIL puts around gloo's
    process group torch's DDP (2.13) ends in a segmentation fault.
    """
    from torch._C._distributed_c10d import (
        DebugLevel,
        get_debug_level,
        set_debug_level,
        set_debug_level_from_env,
    )

    try:
        set_debug_level_from_env()
    except (RuntimeError, ValueError) as exc:
        logger.warning("%s is ignored: %s", _VARIABLE, exc)
    if not over_nccl and get_debug_level() == DebugLevel.DETAIL:
        set_debug_level(DebugLevel.INFO)


def lowered_level() -> str | None:
    """Return what the run's user should know where this process takes DETAIL for INFO."""
    from torch._C._distributed_c10d import DebugLevel, get_debug_level

    if os.environ.get(_VARIABLE) != "DETAIL" or get_debug_level() == DebugLevel.DETAIL:
        return None
    return (
        f"{_VARIABLE}=DETAIL is taken for INFO: over gloo torch's DDP crashes with DETAIL. Set it "
        "to INFO, or use GPUs"
    )


# ---------------------------------------------------------------- probe

# Whether many hosts accept a connection at once: the fastest sign of a dead raylet.


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


# ---------------------------------------------------------------- link time

# Time how long a block of bytes takes from one node to another: one end receives it, the other one
# sends it and waits for an answer. Plain sockets need no process group, and end in time if
# a network drops all that is sent.

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
