"""What this process and those that it forks print and log, held until a log takes it.

A process may serve several attempts, each with a log of its own. What user code has kept of the
first one (a handler on ``sys.stdout``, the level of a logger, a helper process) writes into the
newest log, because all of it leads here: streams and handlers are set once, and stay.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, TextIO, cast

from storage.logs.rank_logs import LogRecord
from train_fn import clock as head_clock
from train_fn.journal.forked_output import ForkedOutput
from train_fn.journal.log_budget import LogBudget

_RAY_REPORTS = "/ray/train/v2/_internal/execution/context.py"  # that logger is named by its file

MAX_LINES = 100_000
"""Lines held while storage does not respond, or while no log takes them. Beyond that the oldest are
dropped."""
MAX_LINE_CHARS = 8_000


class ProcessOutput:
    """Collect lines from any thread. They still go to their original destination, too."""

    def __init__(self) -> None:
        self.redact: Callable[[str], str] = str
        """Removes secrets from a line."""
        self.budget = LogBudget()
        self._lines: deque[LogRecord] = deque(maxlen=MAX_LINES)
        self._forked = ForkedOutput(self._add_forked)
        """Receives the lines of forked processes."""
        self._pid = os.getpid()
        self._handler = _Handler(self)
        self._streams = (sys.stdout, sys.stderr)
        self._root_level = logging.getLogger().level

    def begin(self) -> None:
        """Start to copy stdout, stderr and logging, including those of processes that are forked
        later."""
        self._forked.start()
        sys.stdout = cast(TextIO, _Tee(sys.stdout, self, "INFO"))
        sys.stderr = cast(TextIO, _Tee(sys.stderr, self, "WARNING"))
        root = logging.getLogger()
        root.addHandler(self._handler)
        if root.level > logging.INFO or root.level == logging.NOTSET:
            root.setLevel(logging.INFO)

    def end(self) -> None:
        """Restore stdout, stderr and logging."""
        self._forked.close()
        for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
            tee = getattr(sys, name)
            if isinstance(tee, _Tee) and tee.belongs_to(self):
                setattr(sys, name, stream)
        root = logging.getLogger()
        root.removeHandler(self._handler)
        root.setLevel(self._root_level)

    def settle(self) -> None:
        """Collect what was printed without the end of a line, and what forked processes have sent
        by now."""
        self._forked.settle()
        for tee in (sys.stdout, sys.stderr):
            if isinstance(tee, _Tee) and tee.belongs_to(self):
                tee.flush_partial()

    def add(self, level: str, message: str) -> None:
        """Add a line for which the budget has room. A very long one is cut."""
        message = self.redact(message)
        if os.getpid() != self._pid:
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

    def take(self) -> list[LogRecord]:
        """Return the lines that no log has taken yet."""
        taken = []
        while self._lines:
            taken.append(self._lines.popleft())
        notice = self.budget.notice()
        if notice is not None:
            taken.append(LogRecord(at=head_clock.now(), level="WARNING", message=notice))
        return taken

    def put_back(self, lines: Sequence[LogRecord]) -> None:
        """Hold lines again that could not be written."""
        self._lines.extendleft(reversed(lines))

    def go_on_in_child(self) -> None:
        """Replace locks that other threads held at the fork, and drop the rank's unfinished line.
        Runs in the forked process."""
        self.budget = LogBudget()
        for tee in (sys.stdout, sys.stderr):
            if isinstance(tee, _Tee) and tee.belongs_to(self):
                tee.go_on_in_child()

    def mark_child(self, mark: str) -> None:
        """Begin the lines of this forked process with ``mark``. When the process ends, send its
        last line even if it has no end."""
        if os.getpid() == self._pid:
            return
        self._forked.mark(mark)
        for tee in (sys.stdout, sys.stderr):
            if isinstance(tee, _Tee):
                Finalize(None, tee.flush_partial, exitpriority=0)

    def _add_forked(self, level: str, line: str) -> None:
        if self.budget.take(len(line) + 1, 1):
            self.add(level, line)


_output: ProcessOutput | None = None
"""That of this process and of processes that it forks."""


def listen(redact: Callable[[str], str]) -> ProcessOutput:
    """Return what this process prints and logs. Listen from now on, if it does not yet.

    Args:
        redact: removes secrets from every line.
    """
    global _output
    if _output is None:
        _output = ProcessOutput()
        _output.begin()
    _output.redact = redact
    return _output


def stop_listening() -> None:
    """Restore stdout, stderr and logging of this process. Lines that no log has taken are lost."""
    global _output
    output, _output = _output, None
    if output is not None:
        output.end()


def mark_output(mark: str) -> None:
    """Begin the lines of this process in the rank's log with ``[mark]``. Call this in a process
    that a rank has forked."""
    if _output is not None:
        _output.mark_child(mark)


def _after_fork() -> None:
    if _output is not None:
        _output.go_on_in_child()


os.register_at_fork(after_in_child=_after_fork)


class _Handler(logging.Handler):
    def __init__(self, output: ProcessOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and record.name.endswith(_RAY_REPORTS):
            return  # one line for each report would hide the lines of the user's code
        text = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        lines = text.splitlines() or [""]
        if self._output.budget.take(len(text) + 1, len(lines)):
            for line in lines:
                self._output.add(record.levelname, line)


class _Tee:
    """A text stream that also adds every complete line to the output."""

    def __init__(self, stream: TextIO, output: ProcessOutput, level: str) -> None:
        self._stream = stream
        self._output = output
        self._level = level
        self._partial = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        if not self._output.budget.take(len(text), text.count("\n")):
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
            self._output.add(self._level, line.rstrip("\r").rsplit("\r", 1)[-1])
        self._stream.write(self._output.redact(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush_partial(self) -> None:
        with self._lock:
            partial, self._partial = self._partial, ""
        if partial:
            self._output.add(self._level, partial)

    def go_on_in_child(self) -> None:
        self._lock = threading.Lock()
        self._partial = ""

    def belongs_to(self, output: ProcessOutput) -> bool:
        return self._output is output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
