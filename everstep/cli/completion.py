"""What the shell offers after Tab: ids of runs, statuses, files with a spec."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from everstep.client.client import Client
from everstep.client.runs import RunHandle
from everstep.client.sweeps import SweepHandle
from everstep.errors import EverstepError
from everstep.spec.plain_text import printable
from everstep.wire import RunStatus

_TIMEOUT_S = 2.0
_MOST = 50
_SPEC_FILES = (".yaml", ".yml", ".json")


def run_ids(incomplete: str) -> list[tuple[str, str]]:
    """Return the newest runs whose id begins so, each with its name and status. Nothing is offered
    while the service does not answer."""
    return _newest(lambda client: client.runs.list(), incomplete)


def sweep_ids(incomplete: str) -> list[tuple[str, str]]:
    """As ``run_ids``, for sweeps."""
    return _newest(lambda client: client.sweeps.list(), incomplete)


def _newest(
    listed: Callable[[Client], Iterator[RunHandle | SweepHandle]], incomplete: str
) -> list[tuple[str, str]]:
    try:
        with Client(timeout_s=_TIMEOUT_S, max_tries=1) as client:
            newest = list(itertools.islice(listed(client), _MOST))
    except EverstepError:
        return []
    return [
        (each.id, printable(f"{each.name} {each.status}"))
        for each in newest
        if each.id.startswith(incomplete)
    ]


def statuses(incomplete: str) -> list[str]:
    """Return the statuses that begin so."""
    return [status for status in RunStatus if status.startswith(incomplete.upper())]


def spec_paths(incomplete: str) -> list[str]:
    """Return the YAML and JSON files, and the directories, whose path begins so."""
    head, _, tail = incomplete.rpartition("/")
    folder = Path(f"{head}/" if incomplete.startswith("/") or head else ".")
    prefix = f"{head}/" if "/" in incomplete else ""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    return [
        f"{prefix}{path.name}{'/' if path.is_dir() else ''}"
        for path in found
        if path.name.startswith(tail)
        and (not path.name.startswith(".") or tail.startswith("."))
        and (path.is_dir() or path.suffix in _SPEC_FILES)
    ]
