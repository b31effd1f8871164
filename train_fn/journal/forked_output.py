"""Bring lines of processes that a rank forks, such as those of its loader, into the rank's log.

Each line is one packet of a socket. So lines of several processes never mix, and lines that a
process sent before it was killed still arrive.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable

SEND_S = 5.0
"""Timeout in seconds for the rank to take a line. After that the process sends no more."""
_LONGEST_PACKET = 1 << 17
_SETTLE = b"settle"


class ForkedOutput:
    """Send lines from forked processes to the process that made this object. There, a thread calls
    ``take(level, line)``."""

    def __init__(self, take: Callable[[str, str], None]) -> None:
        self._take = take
        self._reading, self._sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sending.settimeout(SEND_S)
        self._broken = False
        self._mark: str | None = None
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._read, name="forked-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def mark(self, mark: str) -> None:
        """Begin the lines of this forked process with ``mark`` instead of its process id."""
        self._mark = mark

    def send(self, level: str, line: str) -> None:
        """Send a line from a forked process. Drop it if the rank does not take it."""
        if self._broken:
            return
        marked = f"[{self._mark or f'process {os.getpid()}'}] {line}"
        try:
            self._sending.send(json.dumps([level, marked]).encode()[:_LONGEST_PACKET])
        except OSError:  # the rank is gone, or does not read
            self._broken = True

    def settle(self) -> None:
        """Take all lines sent so far."""
        self._settled.clear()
        with contextlib.suppress(OSError):
            self._sending.send(_SETTLE)  # after all that was sent before it
            self._settled.wait(SEND_S)

    def close(self) -> None:
        """Take all lines sent so far. Later ones are dropped."""
        with contextlib.suppress(OSError):
            self._sending.send(b"")  # after all that was sent before it
            if self._thread.is_alive():
                self._thread.join(SEND_S)
        self._reading.close()
        self._sending.close()

    def _read(self) -> None:
        while packet := self._reading.recv(_LONGEST_PACKET):
            if packet == _SETTLE:
                self._settled.set()
                continue
            with contextlib.suppress(ValueError):
                level, line = json.loads(packet)
                self._take(level, line)
