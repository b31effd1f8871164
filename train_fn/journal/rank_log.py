"""A rank's output on its way to the run's logs: its process's streams, those of children,
loggers, and the limit of lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, TextIO

from storage.errors import StorageError
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from train_fn import clock as head_clock

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
        self._root_level = logging.getLogger().level

    def begin(self) -> None:
        """Start to copy stdout, stderr and logging, including those of processes that are forked
        later."""
        self._forked.start()
        put_tees()
        for tee in _tees():
            tee.output = self
        root = logging.getLogger()
        root.addHandler(self._handler)
        if root.level > logging.INFO or root.level == logging.NOTSET:
            root.setLevel(logging.INFO)

    def end(self) -> None:
        """Restore stdout, stderr and logging."""
        self._forked.close()
        for name in ("stdout", "stderr"):
            if (tee := getattr(sys, name)) in _tees(self):
                setattr(sys, name, tee.end())
        root = logging.getLogger()
        root.removeHandler(self._handler)
        root.setLevel(self._root_level)

    def settle(self) -> None:
        """Collect what was printed without the end of a line, and what forked processes have sent
        by now."""
        self._forked.settle()
        for tee in _tees(self):
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
        for tee in _tees(self):
            tee.go_on_in_child()

    def mark_child(self, mark: str) -> None:
        """Begin the lines of this forked process with ``mark``. When the process ends, send its
        last line even if it has no end."""
        if os.getpid() == self._pid:
            return
        self._forked.mark(mark)
        for tee in _tees(self):
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


def put_tees() -> None:
    """Let this process print by streams that an output can be given later. Whoever holds them, as a
    logger of a library does that was imported before a rank was forked, then prints there, too."""
    for name, level in (("stdout", "INFO"), ("stderr", "WARNING")):
        if not isinstance(getattr(sys, name), _Tee):
            setattr(sys, name, _Tee(getattr(sys, name), level))


def _tees(output: ProcessOutput | None = None) -> list[_Tee]:
    """Return those of this process's streams that have this output."""
    streams: list[Any] = [sys.stdout, sys.stderr]
    return [each for each in streams if isinstance(each, _Tee) and each.output is output]


class _Tee:
    """A text stream that also adds every complete line to an output, if it has one."""

    def __init__(self, stream: TextIO, level: str) -> None:
        self.output: ProcessOutput | None = None
        self._stream = stream
        self._level = level
        self._partial = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        output = self.output
        if output is None:
            return self._stream.write(text)
        if not output.budget.take(len(text), text.count("\n")):
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
            output.add(self._level, line.rstrip("\r").rsplit("\r", 1)[-1])
        self._stream.write(output.redact(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush_partial(self) -> None:
        with self._lock:
            partial, self._partial = self._partial, ""
        if partial and self.output is not None:
            self.output.add(self._level, partial)

    def end(self) -> TextIO:
        """Copy nothing more. Return the stream below."""
        self.output = None
        return self._stream

    def go_on_in_child(self) -> None:
        self._lock = threading.Lock()
        self._partial = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# ---------------------------------------------------------------- forked output

# Bring lines of processes that a rank forks, such as those of its loader, into the rank's log.
#
# Each line is one packet of a socket. So lines of several processes never mix, and lines that a
# process sent before it was killed still arrive.

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


# ---------------------------------------------------------------- rank logging

# Store what a rank and its loader processes print and log in the run's directory, where it
# outlives the node.

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
        """Write the remaining lines, and end the thread. Later ones, secret or not, are lost."""
        if self._output is not None:
            self._output.settle()
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self.flush()
        with self._write_lock:
            self._output = None
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def close(self) -> None:
        """End the log, and restore stdout, stderr and logging."""
        is_started = self._output is not None
        self.end_attempt()
        if is_started:
            stop_listening()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self.flush()


# ---------------------------------------------------------------- collected log

# Collect the log lines of a process for another one that asks for them.


class CollectedLog(logging.Handler):
    """Keep the lines of loggers, from any thread, until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[tuple[int, str]] = deque(maxlen=MAX_LINES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._some = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, self.format(record)))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                self._loop.call_soon_threadsafe(self._some.set)

    async def take(self, patience_s: float) -> list[tuple[int, str]]:
        """Return level and text of each line since the last call. If there is none, wait up to
        ``patience_s`` seconds for one.

        Call this from one event loop only.
        """
        self._loop = asyncio.get_running_loop()
        self._some.clear()
        if not self._lines:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._some.wait(), patience_s)
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines


def collect_log(*names: str) -> CollectedLog:
    """Collect the lines of loggers of these names from now on."""
    collected = CollectedLog()
    for name in names:
        log = logging.getLogger(name)
        log.addHandler(collected)
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)
    return collected


# ---------------------------------------------------------------- log budget

# Limit how much a process logs, so that neither storage nor the steps pay for it.

RATE_CHARS_PER_S = 1_000_000
"""Characters per second that a process may log for long."""
BURST_CHARS = 8_000_000
"""Characters that it may log at once. More is counted and dropped."""


class LogBudget:
    """A token bucket that fills at RATE_CHARS_PER_S. It counts what found it empty. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._left = float(BURST_CHARS)
        self._at = monotonic()
        self._lines = 0
        self._chars = 0

    def take(self, num_chars: int, num_lines: int) -> bool:
        """Return whether this may be logged now. If not, count it as dropped."""
        with self._lock:
            now = self._monotonic()
            self._left = min(BURST_CHARS, self._left + (now - self._at) * RATE_CHARS_PER_S)
            self._at = now
            if self._left >= num_chars:
                self._left -= num_chars
                return True
            self._lines += num_lines
            self._chars += num_chars
            return False

    def count_dropped(self, num_lines: int, num_chars: int) -> None:
        """Count lines that were dropped for another reason."""
        with self._lock:
            self._lines += num_lines
            self._chars += num_chars

    def notice(self) -> str | None:
        """Return a line about what was dropped since the last notice; None if nothing was."""
        with self._lock:
            lines, chars = self._lines, self._chars
            self._lines = self._chars = 0
        if not chars:
            return None
        return (
            f"{lines} lines ({chars / 1e6:.1f} MB) are left out here: this process logs more than "
            f"{RATE_CHARS_PER_S / 1e6:g} MB/s"
        )
