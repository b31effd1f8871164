"""Report now and then what a rank takes of its host: processor time, memory, network."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from everstep.wire.events import EventKind

FIRST_REPORT_S: Final = 10.0
REPORT_EVERY_S: Final = 60.0
RANKS_A_MINUTE: Final = 16
"""Ranks of larger groups report less often after the first time: so often all together."""

logger = logging.getLogger(__name__)

Emit = Callable[[EventKind, dict[str, Any]], None]


@dataclass(frozen=True)
class HostSample:
    """Counters of this process and its host."""

    at: float
    """Monotonic seconds."""
    cpu_s: float
    """Processor time of all threads of this process so far."""
    rss_bytes: int
    """Memory of this process that is in RAM."""
    received_bytes: int
    sent_bytes: int
    """Of the host's network interfaces so far, without the loopback."""


def sample_host(proc: Path = Path("/proc")) -> HostSample:
    """Read the counters. Raises OSError where there is no such /proc."""
    pages = int((proc / "self/statm").read_text().split()[1])
    received = sent = 0
    for line in (proc / "net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            columns = numbers.split()
            received, sent = received + int(columns[0]), sent + int(columns[8])
    rss_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    return HostSample(time.monotonic(), time.process_time(), rss_bytes, received, sent)


class HostWatch:
    """Report a rank's use of its host while its attempt trains. Its thread sleeps in between."""

    def __init__(
        self,
        emit: Emit,
        rank: int,
        world_size: int,
        node_id: str,
        sample: Callable[[], HostSample] = sample_host,
        *,
        first_s: float = FIRST_REPORT_S,
        every_s: float = REPORT_EVERY_S,
    ) -> None:
        self._emit, self._rank, self._node_id, self._sample = emit, rank, node_id, sample
        self._first_s, self._every_s = first_s, every_s * max(1.0, world_size / RANKS_A_MINUTE)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            before, pause_s = self._sample(), self._first_s
            while not self._closing.wait(pause_s):
                now = self._sample()
                self._emit(EventKind.RANK_USE, self._between(before, now))
                before, pause_s = now, self._every_s
        except OSError as exc:
            logger.warning("the use of this host is not reported: %s", exc)

    def _between(self, before: HostSample, now: HostSample) -> dict[str, Any]:
        seconds = max(now.at - before.at, 1e-6)
        return {
            "rank": self._rank,
            "node_id": self._node_id,
            "cpu_cores": round((now.cpu_s - before.cpu_s) / seconds, 3),
            "rss_bytes": now.rss_bytes,
            "net_in_bytes_per_s": round((now.received_bytes - before.received_bytes) / seconds),
            "net_out_bytes_per_s": round((now.sent_bytes - before.sent_bytes) / seconds),
            "seconds": round(seconds, 1),
        }
