"""Store what a rank and its loader processes print and log in the run's directory, where it
outlives the node."""

from __future__ import annotations

import threading
from collections.abc import Callable

from storage.errors import StorageError
from storage.logs.rank_logs import RankLogWriter
from storage.run_dir import RunDir
from train_fn.journal.process_output import ProcessOutput, listen, stop_listening

FLUSH_S = 0.5
MOST_FLUSH_S = 1.0
"""Longest time in seconds that a line waits here, even if each write is a separate object. A line
must be durable within two seconds."""


class RankLog:
    """Write what this process prints and logs from a background thread, so that no step waits for
    storage."""

    def __init__(self, run_dir: RunDir, submission: int, attempt: int, rank: int | None) -> None:
        self._where = (run_dir, submission, attempt, rank)
        self._interval_s = min(max(FLUSH_S, run_dir.storage.batch_s), MOST_FLUSH_S)
        self.redact: Callable[[str], str] = str
        """Removes secrets from a line."""
        self._output: ProcessOutput | None = None
        """None before the start and after the end."""
        self._writer: RankLogWriter | None = None
        self._write_lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-log", daemon=True)

    def start(self) -> None:
        """Start to write what the process prints and logs, beginning with the lines that no log has
        taken yet: what it printed before it had a rank, or between two attempts."""
        self._output = listen(self.redact)
        self._thread.start()

    def flush(self) -> bool:
        """Write the collected lines. Return False if storage failed; a later call retries."""
        with self._write_lock:
            if self._output is None:
                return True
            batch = self._output.take()
            if not batch:
                return True
            try:
                if self._writer is None:
                    self._writer = RankLogWriter(*self._where)
                self._writer.write(batch)
            except StorageError:
                # Not logged: the line would come back here.
                self._output.put_back(batch)
                return False
            return True

    def end_attempt(self) -> None:
        """Write the remaining lines, and end the thread. Later lines wait for the next log of this
        process."""
        if self._output is not None:
            self._output.settle()
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self.flush()
        with self._write_lock:
            self._output = None  # a thread that still runs must not take lines of the next log
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def close(self) -> None:
        """End the log of a process that has no other: restore stdout, stderr and logging, too."""
        is_started = self._output is not None
        self.end_attempt()
        if is_started:
            stop_listening()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self.flush()
