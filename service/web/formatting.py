"""Formatting for templates: times, shares, statuses, buckets."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from everstep.text import words as cli_words
from everstep.wire import GoodputBuckets, Run, RunStatus

STATUS_GROUPS: Final[Mapping[str, tuple[RunStatus, ...]]] = MappingProxyType(
    {
        "active": (
            RunStatus.QUEUED,
            RunStatus.STARTING,
            RunStatus.RUNNING,
            RunStatus.RECOVERING,
            RunStatus.STOPPING,
        ),
        "paused": (RunStatus.PAUSED,),
        "succeeded": (RunStatus.SUCCEEDED,),
        "failed": (RunStatus.FAILED,),
        "cancelled": (RunStatus.CANCELLED,),
    }
)
"""Statuses of each filter of the list of runs."""

BUCKET_WORDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "productive": ("Productive", "training that counts"),
        "rework": ("Rework", "steps repeated after a failure"),
        "checkpoint_stall": ("Saving", "training waited for a checkpoint"),
        "detecting": ("Detecting", "from a failure to its detection"),
        "unreported": (
            "Unreported",
            "from the last report to a failure; a script may have kept it",
        ),
        "restarting": ("Restarting", "from detection until training goes on"),
        "starting": ("Starting", "from the submission until training begins"),
        "queued": ("Queued", "waiting for room on the cluster"),
        "paused": ("Paused", "as requested"),
        "idle": ("Idle", "no ranks: waiting for nodes"),
    }
)
"""Title and meaning of each bucket of the goodput ledger, in display order."""

GOODPUT_AFTER_S: Final = 60.0
_UNKNOWN: Final = "\N{EN DASH}"


def percent(share: float | None) -> str:
    """Return text such as ``97.3 %``; a dash if unknown."""
    return _UNKNOWN if share is None else f"{100 * share:.1f} %"


def early_goodput(run: Run) -> str:
    """Return the goodput of a run in a list; a dash in its first minute, whose start would look
    like waste."""
    is_young = run.progress is not None and run.progress.elapsed_s < GOODPUT_AFTER_S
    return percent(None if is_young else run.goodput)


def clock(at: datetime | None) -> str:
    """Return a time such as ``2026-01-02 03:04:05`` in UTC; a dash if unknown."""
    return _UNKNOWN if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def span(seconds: float) -> str:
    """Return a short duration for lists: ``12 s``, ``4 min``, ``3 h 12 min``, ``2 d 5 h``."""
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min"
    return cli_words.duration(seconds)


def headline(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the two most informative metrics of a run: its loss, and a validation metric other
    than the loss."""
    names = [name for name in metrics if name == "loss"][:1]
    validation = sorted(
        (name for name in metrics if name.startswith("val_")),
        key=lambda name: (name == "val_loss", name),
    )
    return [(name, metrics[name]) for name in (names + validation[:1] or sorted(metrics)[:2])]


def progress_share(step: int, total_steps: int | None) -> float:
    """Return the progress from 0 to 1."""
    return min(1.0, step / total_steps) if total_steps else 0.0


def bucket_shares(buckets: GoodputBuckets, wall_s: float) -> list[dict[str, Any]]:
    """Return each non-empty bucket: start and width of its part of the bar (0 to 1), and its
    seconds."""
    found, start = [], 0.0
    for name, (title, meaning) in BUCKET_WORDS.items():
        seconds = getattr(buckets, name)
        share = seconds / wall_s if wall_s else 0.0
        if seconds > 0:
            found.append(
                {
                    "name": name,
                    "title": title,
                    "meaning": meaning,
                    "seconds": seconds,
                    "start": start,
                    "share": share,
                }
            )
        start += share
    return found
