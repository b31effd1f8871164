"""Commands on a terminal of 80 columns: what they write, before the terminal would break it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

COLUMNS = 80
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class NarrowTerminal:
    """``everstep`` on a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        environ = {name: os.environ[name] for name in os.environ if name not in ("COLUMNS", "CI")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "everstep.cli.main", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(theirs)
        self._written = bytearray()

    @property
    def lines(self) -> list[str]:
        """Return the lines so far, without colours and empty ones."""
        text = _CONTROL.sub("", self._written.decode(errors="replace"))
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    def read_until(self, text: str, timeout_s: float = 180.0) -> None:
        """Read until a line contains ``text``."""
        deadline = time.monotonic() + timeout_s
        while not any(text in line for line in self.lines):
            assert time.monotonic() < deadline, f"no {text!r} in {self.lines}"
            assert self._read(), f"ended without {text!r}: {self.lines}"

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self._ours, f"{text}\n".encode())

    def stop(self) -> int:
        """End the command gracefully; return its exit code."""
        self._process.terminate()
        return self.finish()

    def finish(self) -> int:
        """Read to the end; return the exit code."""
        while self._read():
            pass
        os.close(self._ours)
        return self._process.wait(60)

    def _read(self) -> bool:
        """Read what there is within a second. Return False at the end."""
        if not select.select([self._ours], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # Linux's word for: nobody writes any more
            return False
        self._written += data
        return bool(data)


def on_terminal(*arguments: str) -> tuple[int, list[str]]:
    """Run a command to its end. Return its exit code and its lines."""
    terminal = NarrowTerminal(*arguments)
    return terminal.finish(), terminal.lines
