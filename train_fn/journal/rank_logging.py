"""A rank's output in the run's directory: what it and its loader processes print and log, kept
after its node is gone."""

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
"""Lines held while storage is away; beyond it the oldest are let go."""
MAX_LINE_CHARS = 8_000
FLUSH_S = 0.5
MOST_FLUSH_S = 1.0
"""Longest that a line waits here, also where each write is an object of its own: it is to be
durable within two seconds."""


class RankLog:
    """Gathers lines from any thread and writes them from a background thread, so that no step waits
    for storage."""

    def __init__(self, run_dir: RunDir, submission: int, attempt: int, rank: int | None) -> None:
        self._where = (run_dir, submission, attempt, rank)
        self._interval_s = min(max(FLUSH_S, run_dir.storage.batch_s), MOST_FLUSH_S)
        self.redact: Callable[[str], str] = str
        """Takes out of every line what nobody may read."""
        self._lines: deque[LogRecord] = deque(maxlen=MAX_LINES)
        self.budget = LogBudget()
        self._writer: RankLogWriter | None = None
        self._write_lock = threading.Lock()
        self._closing = threading.Event()
        self._handler = _Handler(self)
        self._streams: tuple[TextIO, TextIO] | None = None
        self._root_level = logging.WARNING
        self._forked: ForkedOutput | None = None
        """Where the lines of forked processes come from."""
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rank-log", daemon=True)

    def start(self) -> None:
        """Begin to take stdout, stderr and logging, also of processes that are forked from now on.

        They still go where they went.
        """
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
        self._thread.start()

    def add(self, level: str, message: str) -> None:
        """One line that the budget has room for, cut where it is unreasonably long."""
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
        """In a process that was just forked: let go of locks that other threads held, and of a line
        that the rank began."""
        self.budget = LogBudget()
        for name in ("stdout", "stderr"):
            tee = getattr(sys, name)
            if isinstance(tee, _Tee) and tee.belongs_to(self):
                tee.go_on_in_child()

    def mark_child(self, mark: str) -> None:
        """In a forked process: begin its lines with ``mark``, and send the last one, if it has no
        end, when the process ends."""
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
        """Write what was gathered; False when storage did not take it, which is tried again
        later."""
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
        """Give stdout, stderr and logging back, write the rest, end the threads."""
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
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self.flush()
        with self._write_lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self.flush()


_started: RankLog | None = None
"""The log that takes this process's output, and that of the processes which it forks."""


def mark_output(mark: str) -> None:
    """In a process that a rank forked: have its lines in the rank's log begin with ``[mark]``."""
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
            return  # a line for each report, between which those of the user's code would be lost
        text = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        lines = text.splitlines() or [""]
        if self._log.budget.take(len(text) + 1, len(lines)):
            for line in lines:
                self._log.add(record.levelname, line)


class _Tee:
    """A text stream that also hands every complete line to the log."""

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
            # A line without end must not grow, nor be copied whole with every piece: of a progress
            # bar the last state is enough.
            self._partial = (
                partial
                if len(partial) <= MAX_LINE_CHARS
                else partial.rsplit("\r", 1)[-1][: MAX_LINE_CHARS + 1]
            )
        for line in lines:
            # A progress bar rewrites its line with carriage returns; only its last state is a line.
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
