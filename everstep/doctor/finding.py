"""One finding of a deployment check: what was checked, the result and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """Subject: service, cluster, nodes, versions, clocks, ports, network, storage, memory, gpus,
    all_reduce."""
    level: Level
    message: str
    remedy: str | None = None
    """What to do; None if nothing needs to be done."""


def ok(check: str, message: str) -> Finding:
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    return Finding(check, "problem", message, remedy)


def joined(words: Iterable[str]) -> str:
    """Return words joined by commas and "and"."""
    *first, last = list(words) or ["nobody"]
    return f"{', '.join(first)} and {last}" if first else last
