"""Memory: a host's, a GPU's, and whether the kernel's OOM killer ended a process."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc

LARGEST_KEPT = 64 << 20
"""Bytes of a block up to which its memory is kept, as large as a thread's heaps; what is larger (a
checkpoint's copy) goes back."""

_OPERATORS_WORD = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


def keep_memory() -> bool:
    """Let malloc keep freed tensors of up to LARGEST_KEPT bytes for the next step. Return whether
    it does.

    By default glibc returns the memory of activations to the system at the end of a step, and gets
    it again in the next, each page cleared. Nothing is changed if the environment chooses how to
    allocate (``MALLOC_TRIM_THRESHOLD_``, another malloc), or if malloc is not glibc's. Source:
    mallopt(3).
    """
    if any(name in os.environ for name in _OPERATORS_WORD):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        _M_MMAP_THRESHOLD: LARGEST_KEPT,
        _M_TRIM_THRESHOLD: -1,  # never; of a heap's end
        _M_TOP_PAD: LARGEST_KEPT,  # a heap that is free as a whole stays, too
    }
    return all([mallopt(name, value) for name, value in settings.items()])


# ---------------------------------------------------------------- gpu memory

# Memory of a GPU: what it held when it was too small, and waiting for that of dead ranks.

FREED_S = 30.0
"""Longest wait for the memory of processes that have just ended."""
_SETTLED_S = 2.0
"""No more of it will be freed, once nothing was for so long: another program holds the rest."""
_LOOK_S = 0.1
_MOSTLY_FREE = 0.95
_GIB = 1 << 30

logger = logging.getLogger(__name__)


def _free_or_own(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU that are free or kept by torch in this process, and all bytes."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device), total


def wait_for_free_memory(
    device: torch.device,
    look: Callable[[torch.device], tuple[int, int]] = _free_or_own,
) -> None:
    """Wait until the memory of ranks that died on ``device`` is free: the driver takes seconds for
    many gigabytes. Nothing on a CPU.

    Args:
        device: This rank's.
        look: Gives the bytes that are free or this process's own, and those that there are.
    """
    if device.type != "cuda":
        return
    began = grew_at = time.monotonic()
    most, total = look(device)
    while most < _MOSTLY_FREE * total:
        now = time.monotonic()
        if now - grew_at > _SETTLED_S or now - began > FREED_S:
            logger.warning(
                "%s: %.1f of %.1f GiB are free after %.1f s; other processes hold the rest",
                device,
                most / _GIB,
                total / _GIB,
                now - began,
            )
            return
        time.sleep(_LOOK_S)
        free, _ = look(device)
        if free > most:
            most, grew_at = free, now


def memory_summary(cause: BaseException, device: torch.device) -> str | None:
    """Return who held the memory of ``device`` when ``cause`` was raised, in words; None unless a
    GPU was too small."""
    if device.type != "cuda":
        return None
    import torch

    if not isinstance(cause, torch.OutOfMemoryError):
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = (
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
        head = (
            f"{device}: {total / _GIB:.2f} GiB, {free / _GIB:.2f} free; this rank: "
            f"{allocated / _GIB:.2f} in tensors, "
            f"{(reserved - allocated) / _GIB:.2f} kept by torch for reuse; others and the CUDA "
            "context: "
            f"{(total - free - reserved) / _GIB:.2f}"
        )
        return f"{head}\n{torch.cuda.memory_summary(device, abbreviated=True)}"
    except RuntimeError as exc:
        return f"{device}: its memory could not be looked at: {exc}"


# ---------------------------------------------------------------- out of memory

# Whether the kernel killed a process of this machine for want of memory: asked afterwards, since
# the dead cannot tell.

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
