"""What the shell offers after Tab: ids of runs, statuses, files with a spec."""

from __future__ import annotations

from pathlib import Path

from everstep.client.client import Client
from everstep.errors import EverstepError
from everstep.spec.plain_text import printable
from everstep.wire import RunStatus

_TIMEOUT_S = 2.0
_MOST_RUNS = 50
_SPEC_FILES = (".yaml", ".yml", ".json")


def run_ids(incomplete: str) -> list[tuple[str, str]]:
    """Return the newest runs whose id begins so, each with its name and status. Nothing is offered
    while the service does not answer."""
    try:
        with Client(timeout_s=_TIMEOUT_S, max_tries=1) as client:
            newest = [run for run, _ in zip(client.runs.list(), range(_MOST_RUNS), strict=False)]
    except EverstepError:
        return []
    return [
        (run.id, printable(f"{run.name} {run.status}"))
        for run in newest
        if run.id.startswith(incomplete)
    ]


def sweep_ids(incomplete: str) -> list[tuple[str, str]]:
    """Return the newest sweeps whose id begins so, each with its name and status."""
    try:
        with Client(timeout_s=_TIMEOUT_S, max_tries=1) as client:
            newest = [
                each for each, _ in zip(client.sweeps.list(), range(_MOST_RUNS), strict=False)
            ]
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
