"""Curves of a run's metrics, grouped into charts, with marks for its restarts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from everstep.text import failure
from everstep.wire import Failure
from everstep.wire.events import PREFIX, EventKind, system_figure, system_name
from service.model.rows import EventRow

MARK_KINDS: Final = frozenset({EventKind.FAILURE, EventKind.RESTORED})
_FIRST: Final = ("loss", "accuracy", "perplexity")
_MOST_MARKS: Final = 200


def charts(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return charts for these metrics as ``[{title, names}]``: training and validation of a metric
    together, the loss first."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (name.startswith(PREFIX), name)):
        groups.setdefault(name.removeprefix(PREFIX) or name, []).append(name)

    def order(title: str) -> tuple[int, str]:
        return (_FIRST.index(title) if title in _FIRST else len(_FIRST), title)

    return [{"title": title, "names": groups[title]} for title in sorted(groups, key=order)]


_SYSTEM_TITLES: Final = {
    "cpu_cores": "CPU",
    "rss_bytes": "Memory",
    "net_in_bytes_per_s": "Network in, of the host",
    "net_out_bytes_per_s": "Network out, of the host",
    "gpu_busy_percent": "GPU use",
    "gpu_used_bytes": "GPU memory",
    "gpu_power_w": "GPU power",
    "gpu_celsius": "GPU temperature",
}
_MOST_LINES: Final = 8


def system_charts(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return charts of what ranks took of their hosts, a line for each of the first ranks."""
    found: dict[str, list[int]] = {}
    for name in names:
        figure = system_figure(name)
        if figure is not None:
            found.setdefault(figure[0], []).append(figure[1])
    return [
        {
            "title": title,
            "names": [system_name(figure, rank) for rank in ranks],
            "labels": [f"rank {rank}" for rank in ranks],
            "figure": figure,
        }
        for figure, title in _SYSTEM_TITLES.items()
        if (ranks := sorted(found.get(figure, ()))[:_MOST_LINES])
    ]


def marks(events: Sequence[EventRow]) -> list[dict[str, Any]]:
    """Return restarts, newest last: where the run resumed (step, unix seconds) after which failure.

    Args:
        events: history with the kinds in MARK_KINDS.
    """
    found, why = [], ""
    attempts: set[int] = set()
    for event in events:
        if event.kind == EventKind.FAILURE:
            why = failure.who(Failure.of(event))
        elif event.attempt not in attempts:
            if (attempts or event.attempt > 1) and event.data.get("step") is not None:
                label = f"attempt {event.attempt}" + (f": {why}" if why else "")
                found.append(
                    {
                        "step": event.data["step"],
                        "at": event.at,
                        "attempt": event.attempt,
                        "label": label,
                    }
                )
            attempts.add(event.attempt)
            why = ""
    return found[-_MOST_MARKS:]
