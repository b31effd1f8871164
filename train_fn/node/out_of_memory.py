"""Whether the kernel killed a process of this machine for want of memory: asked afterwards, since
the dead cannot tell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192


def oom_kills() -> int | None:
    """Processes that were killed so far in this process's memory cgroup; None where the kernel does
    not say."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = [
                Path(f"/sys/fs/cgroup{path}/memory.events"),
                Path("/sys/fs/cgroup/memory.events"),
            ]
        elif "memory" in controllers.split(","):
            files = [
                Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"),
                Path("/sys/fs/cgroup/memory/memory.oom_control"),
            ]
        else:
            continue
        for file in files:
            count = _count_in(file)
            if count is not None:
                return count
    return None


def _count_in(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def oom_line(pid: int, kernel_log: Path = KERNEL_LOG) -> str | None:
    """Return the kernel's line about the kill of process ``pid``; None if there is none, or this
    user may not read the log."""
    found = None
    for _, message in kernel_lines(kernel_log):
        if re.search(rf"\bKilled process {pid} \(", message):
            found = message[:500]
    return found


def kernel_lines(kernel_log: Path = KERNEL_LOG) -> Iterator[tuple[float, str]]:
    """Yield the messages of the kernel's log with their times, in seconds since the machine's
    start, oldest first; none if this user may not read it."""
    try:
        fd = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while record := _next_record(fd):
            for line in record.decode(errors="replace").splitlines():
                head, separator, rest = line.partition(";")
                message = rest if separator else line
                fields = head.split(",")
                at = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0
                yield at, message
    finally:
        os.close(fd)


def _next_record(fd: int) -> bytes:
    while True:
        try:
            return os.read(fd, _RECORD_BYTES)
        except BrokenPipeError:
            continue  # the record was overwritten before it was read
        except OSError:
            return b""


def look_for_oom(pid: int, kills_before: int | None) -> dict[str, Any] | None:
    """Return the evidence that the OOM killer ended process ``pid`` of this machine; None without
    any.

    Args:
        pid: A process that is gone.
        kills_before: ``oom_kills()`` while it lived.
    """
    line, kills = oom_line(pid), oom_kills()
    more = kills is not None and kills_before is not None and kills > kills_before
    if line is None and not more:
        return None
    return {
        "oom_line": line,
        "oom_kills": kills - kills_before
        if kills is not None and kills_before is not None
        else None,
    }
