"""Lines from processes that a rank forks, such as those of its loader, on their way into the rank's
log.

Each line is one packet of a socket, so that lines of several processes never mix, and what a
process sent before it was killed arrives all the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable

SEND_S = 5.0
"""Longest that a process waits for the rank to take a line; then it sends no more."""
_LONGEST_PACKET = 1 << 17


class ForkedOutput:
    """Carries lines from forked processes to the process that made it. ``take(level, line)`` is
    called there, by a thread."""

    def __init__(self, take: Callable[[str, str], None]) -> None:
        self._take = take
        self._reading, self._sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sending.settimeout(SEND_S)
        self._broken = False
        self._mark: str | None = None
        self._thread = threading.Thread(target=self._read, name="forked-output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def mark(self, mark: str) -> None:
        """In a forked process: what its lines begin with; else its pid."""
        self._mark = mark

    def send(self, level: str, line: str) -> None:
        """In a forked process: send a line. It is dropped if nobody takes it."""
        if self._broken:
            return
        marked = f"[{self._mark or f'process {os.getpid()}'}] {line}"
        try:
            self._sending.send(json.dumps([level, marked]).encode()[:_LONGEST_PACKET])
        except OSError:  # the rank is gone, or does not read
            self._broken = True

    def close(self) -> None:
        """Take what was sent so far; what forked processes send later is dropped."""
        with contextlib.suppress(OSError):
            self._sending.send(b"")  # after all that was sent before it
            if self._thread.is_alive():
                self._thread.join(SEND_S)
        self._reading.close()
        self._sending.close()

    def _read(self) -> None:
        while packet := self._reading.recv(_LONGEST_PACKET):
            with contextlib.suppress(ValueError):
                level, line = json.loads(packet)
                self._take(level, line)
