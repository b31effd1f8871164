"""End a controller whose driver is gone, after its ranks had time to save and exit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from train_fn.journal.client import ActorJournalClient
from train_fn.recovery.launch import Engine

FLUSH_S = 10.0
"""Timeout in seconds for the controller's last events to become durable."""


class DriverWatch:
    """Notice that the driver died or a newer submission takes over, then end this process.

    Ranks end with their controller. The next submission continues from what they saved.

    Args:
        engine: its ``driver`` is watched.
        journal: flushed before the process ends.
        has_group: returns whether ranks run or are shut down. A group that only starts has nothing
            to save that its nodes do not keep anyway.
    """

    def __init__(
        self, engine: Engine, journal: ActorJournalClient, has_group: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._has_group = has_group
        self._leaving = threading.Event()
        self._ended = threading.Event()

    @property
    def is_leaving(self) -> bool:
        """Return whether the ranks should save and exit, since the next submission continues."""
        return self._leaving.is_set()

    def start(self) -> None:
        """Watch the driver on a thread. Another thread ends this process later."""
        threading.Thread(target=self._watch, name="driver-watch", daemon=True).start()
        threading.Thread(target=self._leave, name="leave", daemon=True).start()

    def leave(self) -> None:
        """Act as if the driver had died."""
        self._leaving.set()

    def ended(self) -> None:
        """Note that the control loop has returned, so that nothing is waited for any more."""
        self._ended.set()

    def _watch(self) -> None:
        self._engine.driver.wait()
        self._leaving.set()

    def _leave(self) -> None:
        """Wait until the driver is gone, then for the ranks, then end this process and so theirs.

        A user's function exits only at its next report, which may never come, so it gets no time.
        """
        self._leaving.wait()
        patience_s = (
            0.0
            if self._engine.job.spec.runs_own_function
            else self._engine.settings.yield_timeout_s
        )
        gives_up_at = time.monotonic() + patience_s
        while self._has_group() and time.monotonic() < gives_up_at:
            if self._ended.wait(self._engine.settings.poll_s):
                break
        self._journal.flush(FLUSH_S)
        os._exit(0)
