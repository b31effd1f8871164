"""What templates say beyond plain values: times, shares, statuses, buckets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from everstep.text import words as cli_words
from everstep.wire import GoodputBuckets, RunStatus

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
"""Statuses behind each filter of the list of runs."""

BUCKET_WORDS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "productive": ("Productive", "steps that count"),
        "rework": ("Rework", "steps done again after a failure"),
        "checkpoint_stall": ("Saving", "training stood still for a checkpoint"),
        "detecting": ("Detecting", "from a failure until it was noticed"),
        "restarting": ("Restarting", "from there until the next step"),
        "starting": ("Starting", "from the submission to the first step"),
        "queued": ("Queued", "waiting for room on the cluster"),
        "paused": ("Paused", "as asked"),
        "idle": ("Idle", "no ranks: waiting for nodes"),
    }
)
"""Title and meaning of each bucket of the goodput ledger, in the order in which they are shown."""

_UNKNOWN: Final = "\N{EN DASH}"


def percent(share: float | None) -> str:
    """``97.3 %``; a dash for what is not known."""
    return _UNKNOWN if share is None else f"{100 * share:.1f} %"


def clock(at: datetime | None) -> str:
    """``2026-01-02 03:04:05`` in UTC; a dash for what is not known."""
    return _UNKNOWN if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def span(seconds: float) -> str:
    """A length of time in as few words as a list has room for: ``12 s``, ``4 min``, ``3 h 12 min``,
    ``2 d 5 h``."""
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min"
    return cli_words.duration(seconds)


def headline(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """The two metrics that say most about a run: its loss, and a validation metric that is not a
    loss."""
    names = [name for name in metrics if name == "loss"][:1]
    validation = sorted(
        (name for name in metrics if name.startswith("val_")),
        key=lambda name: (name == "val_loss", name),
    )
    return [(name, metrics[name]) for name in (names + validation[:1] or sorted(metrics)[:2])]


def progress_share(step: int, total_steps: int | None) -> float:
    """0 to 1."""
    return min(1.0, step / total_steps) if total_steps else 0.0


def bucket_shares(buckets: GoodputBuckets, wall_s: float) -> list[dict[str, Any]]:
    """Each bucket with something in it: where its part of the bar begins, how wide it is (0 to 1),
    and its seconds."""
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


def leaves(value: Any, path: str = "") -> dict[str, str]:
    """Every leaf of a JSON value by its path, as JSON: ``{"train.epochs": "5"}``. An empty object
    or list is a leaf."""
    if isinstance(value, Mapping) and value:
        return {
            name: text
            for key, item in value.items()
            for name, text in leaves(item, f"{path}.{key}" if path else key).items()
        }
    return {path: json.dumps(value, ensure_ascii=False)}


def differences(specs: list[dict[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Paths at which the specs are not all the same, with each one's value there; None where it has
    none. Names are left out."""
    flat = [leaves(spec) for spec in specs]
    paths = dict.fromkeys(path for spec in flat for path in spec)
    rows = [(path, [spec.get(path) for spec in flat]) for path in paths if path != "name"]
    return [(path, values) for path, values in rows if len(set(values)) > 1]
