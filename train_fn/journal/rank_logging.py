"""Store what a rank and its loader processes print and log in the run's directory, where it
outlives the node."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, TextIO, cast

from storage.errors import StorageError
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from train_fn import clock as head_clock
from train_fn.journal.forked_output import ForkedOutput
from train_fn.journal.log_budget import LogBudget

_RAY_REPORTS = "/ray/train/v2/_internal/execution/context.py"  # that logger is named by its file

MAX_LINES = 100_000
"""Lines held while storage does not respond. Beyond that the oldest are dropped."""
MAX_LINE_CHARS = 8_000
FLUSH_S = 0.5
MOST_FLUSH_S = 1.0
"""Longest time in seconds that a line waits here, even if each write is a separate object. A line
must be durable within two seconds."""


class RankLog:
    """Collect lines from any thread, and write them from a background thread, so that no step waits
    for storage."""

    def __init__(self, run_dir: RunDir, submission: int, attempt: int, rank: int | None) -> None:
        self._where = (run_dir, submission, attempt, rank)
        self._interval_s = min(max(FLUSH_S, run_dir.storage.batch_s), MOST_FLUSH_S)
        self.redact: Callable[[str], str] = str
        """Removes secrets from a line."""
        self._lines: deque[LogRecord] = deque(maxlen=MAX_LINES)
        self.budget = LogBudget()
        self._writer: RankLogWriter | None = None
        self._write_lock = threading.Lock()
        self._closing = threading.Event()
        self._handler = _Handler(self)
        self._streams: tuple[TextIO, TextIO] | None = None
        self._root_level = logging.WARNING
        self._forked: ForkedOutput | None = None
        """Receives the lines of forked processes."""
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rank-log", daemon=True)

    def start(self) -> None:
        """Start to copy stdout, stderr and logging, including those of processes that are forked
        later. They still go to their original destination, too. Lines that were put by come first.
        """
        self._lines.extend(_put_by)
        _put_by.clear()
        self.listen()
        self._thread.start()

    def listen(self) -> None:
        """Start to copy, but write nothing yet."""
        global _started
        self._forked = ForkedOutput(self._add_forked)
        self._forked.start()
        _started = self
        self._streams = (sys.stdout, sys.stderr)
        sys.stdout = cast(TextIO, _Tee(sys.stdout, self, "INFO"))
        sys.stderr = cast(TextIO, _Tee(sys.stderr, self, "WARNING"))
        root = logging.getLogger()
        self._root_level = root.level
        root.addHandler(self._handler)
        if root.level > logging.INFO or root.level == logging.NOTSET:
            root.setLevel(logging.INFO)

    def add(self, level: str, message: str) -> None:
        """Add a line for which the budget has room. A very long one is cut."""
        message = self.redact(message)
        if self._forked is not None and os.getpid() != self._pid:
            notice = self.budget.notice()
            for each, text in ((level, message[:MAX_LINE_CHARS]), ("WARNING", notice)):
                if text is not None:
                    self._forked.send(each, text)
            return
        if len(message) > MAX_LINE_CHARS:
            message = (
                f"{message[:MAX_LINE_CHARS]} … {len(message) - MAX_LINE_CHARS} characters left out"
            )
        if len(self._lines) == MAX_LINES:
            self.budget.count_dropped(1, len(self._lines[0].message))
        self._lines.append(LogRecord(at=head_clock.now(), level=level, message=message))

    def go_on_in_child(self) -> None:
        """Replace locks that other threads held at the fork, and drop the rank's unfinished line.
        Runs in the forked process."""
        self.budget = LogBudget()
        for name in ("stdout", "stderr"):
            tee = getattr(sys, name)
            if isinstance(tee, _Tee) and tee.belongs_to(self):
                tee.go_on_in_child()

    def mark_child(self, mark: str) -> None:
        """Begin the lines of this forked process with ``mark``. When the process ends, send its
        last line even if it has no end."""
        if self._forked is None or os.getpid() == self._pid:
            return
        self._forked.mark(mark)
        for tee in (sys.stdout, sys.stderr):
            if isinstance(tee, _Tee):
                Finalize(None, tee.flush_partial, exitpriority=0)

    def _add_forked(self, level: str, line: str) -> None:
        if self.budget.take(len(line) + 1, 1):
            self.add(level, line)

    def flush(self) -> bool:
        """Write the collected lines. Return False if storage failed; a later call retries."""
        with self._write_lock:
            batch = []
            while self._lines:
                batch.append(self._lines.popleft())
            notice = self.budget.notice()
            if notice is not None:
                batch.append(LogRecord(at=head_clock.now(), level="WARNING", message=notice))
            if not batch:
                return True
            try:
                if self._writer is None:
                    self._writer = RankLogWriter(*self._where)
                self._writer.write(batch)
            except StorageError:
                # Not logged: the line would come back here.
                self._lines.extendleft(reversed(batch))
                return False
            return True

    def close(self) -> None:
        """Restore stdout, stderr and logging, write the remaining lines, and end the threads."""
        self._stop_listening()
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self.flush()
        with self._write_lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def put_by(self) -> None:
        """Restore stdout, stderr and logging, and keep the lines for the next log of this
        process."""
        self._stop_listening()
        _put_by.extend(self._lines)

    def _stop_listening(self) -> None:
        global _started
        if _started is self:
            _started = None
        if self._forked is not None:
            self._forked.close()
            self._forked = None
        if self._streams is not None:
            for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
                tee = getattr(sys, name)
                if isinstance(tee, _Tee) and tee.belongs_to(self):
                    tee.flush_partial()
                    setattr(sys, name, stream)
            self._streams = None
        root = logging.getLogger()
        root.removeHandler(self._handler)
        root.setLevel(self._root_level)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self.flush()


_started: RankLog | None = None
"""The log of this process and of processes that it forks."""
_put_by: deque[LogRecord] = deque(maxlen=MAX_LINES)
"""Lines of this process from before it had a rank."""


def mark_output(mark: str) -> None:
    """Begin the lines of this process in the rank's log with ``[mark]``. Call this in a process
    that a rank has forked."""
    if _started is not None:
        _started.mark_child(mark)


def _after_fork() -> None:
    if _started is not None:
        _started.go_on_in_child()


os.register_at_fork(after_in_child=_after_fork)


class _Handler(logging.Handler):
    def __init__(self, log: RankLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and record.name.endswith(_RAY_REPORTS):
            return  # one line for each report would hide the lines of the user's code
        text = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        lines = text.splitlines() or [""]
        if self._log.budget.take(len(text) + 1, len(lines)):
            for line in lines:
                self._log.add(record.levelname, line)


class _Tee:
    """A text stream that also adds every complete line to the log."""

    def __init__(self, stream: TextIO, log: RankLog, level: str) -> None:
        self._stream = stream
        self._log = log
        self._level = level
        self._partial = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        if not self._log.budget.take(len(text), text.count("\n")):
            return len(text)
        with self._lock:
            *lines, partial = (self._partial + text).split("\n")
            # A line without an end must not grow, nor be copied whole with each piece. Only the
            # last state of a progress bar is needed.
            self._partial = (
                partial
                if len(partial) <= MAX_LINE_CHARS
                else partial.rsplit("\r", 1)[-1][: MAX_LINE_CHARS + 1]
            )
        for line in lines:
            # A progress bar rewrites its line with carriage returns. Only its last state counts.
            self._log.add(self._level, line.rstrip("\r").rsplit("\r", 1)[-1])
        self._stream.write(self._log.redact(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush_partial(self) -> None:
        with self._lock:
            partial, self._partial = self._partial, ""
        if partial:
            self._log.add(self._level, partial)

    def go_on_in_child(self) -> None:
        self._lock = threading.Lock()
        self._partial = ""

    def belongs_to(self, log: RankLog) -> bool:
        return self._log is log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
