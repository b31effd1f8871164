"""What a process has open, by kind, so that a leak has a name."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import psutil


def open_descriptors(process: psutil.Process) -> Counter[str]:
    """Return how many descriptors of each kind a process has open: connections by the process at
    the other end, files by their path without numbers.

    Raises psutil.NoSuchProcess.
    """
    connections = {each.fd: each for each in process.net_connections("all") if each.fd >= 0}
    owners = _owners()
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # closed since
            continue
        connection = connections.get(int(entry.name))
        found[_kind(target) if connection is None else _end(connection, owners)] += 1
    return found


def more_than(before: Counter[str], now: Counter[str]) -> str:
    """Describe the descriptors that were opened since ``before``."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted((now - before).items()))


def _kind(target: str) -> str:
    return re.sub(r"\d+", "N", target)


def _end(connection: Any, owners: dict[tuple[str, int], str]) -> str:
    if isinstance(connection.laddr, str):
        return f"unix {_kind(connection.laddr)}"
    if not connection.raddr:
        return f"TCP {connection.status}"
    other = owners.get((connection.raddr.ip, connection.raddr.port), "a process that is gone")
    return f"TCP {connection.status} with {other}"


def _owners() -> dict[tuple[str, int], str]:
    """Return the name of the process at each end of a connection on this machine."""
    names: dict[int, str] = {}
    found = {}
    for connection in psutil.net_connections("tcp"):
        if connection.pid is None or not connection.laddr:
            continue
        if connection.pid not in names:
            try:
                names[connection.pid] = _kind(_title(psutil.Process(connection.pid)))
            except psutil.NoSuchProcess:
                continue
        found[(connection.laddr.ip, connection.laddr.port)] = names[connection.pid]
    return found


def _title(process: psutil.Process) -> str:
    words = process.cmdline()
    return " ".join(Path(word).name for word in words[:3]) or process.name()
