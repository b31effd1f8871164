"""Tests that share a cluster are one piece of work, and pieces can run side by side.

A piece is a file, or all files that share a cluster, so that it is started once. With
``-n 2 --dist loadfile`` each process of pytest-xdist takes one piece after the other. A test that
cannot bear a neighbour is marked ``alone``; one that ``make test`` runs is marked ``core``.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

SHARED = {
    "service": (
        "test_doctor.py",
        "test_main_job.py",
        "test_ray_dashboard.py",
        "test_service_restart.py",
    ),
    "two_nodes": (
        "test_driver.py",
        "test_listening.py",
        "test_own_code.py",
        "test_out_of_memory.py",
        "test_own_script.py",
        "test_protect_service.py",
    ),
}
"""Files whose tests share a cluster, by the fixture that starts it."""
_PIECE = {f"tests/integration/{name}": piece for piece, names in SHARED.items() for name in names}


def only_in_chaos(*cases: Any) -> list[Any]:
    """Return cases of a test that only ``make chaos`` runs, beside telling ones that always run.

    A case of several arguments is a tuple.
    """
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.chaos)
        for case in cases
    ]


def piece_of(nodeid: str) -> str:
    """Return the cluster that a test's file shares, or else the file."""
    path = nodeid.split("::", 1)[0]
    return _PIECE.get(path, path)


def keep_pieces_together(items: list[pytest.Item]) -> None:
    """Let the files of a piece follow each other.

    Raises:
        UsageError: a test asks for a shared cluster, and its file is not in ``SHARED``.
    """
    first: dict[str, int] = {}
    for item in items:
        first.setdefault(piece_of(item.nodeid), len(first))
    items.sort(key=lambda item: first[piece_of(item.nodeid)])
    for item in items:
        for name in SHARED:
            if _is_of_conftest(item, name) and piece_of(item.nodeid) != name:
                file = PurePosixPath(item.nodeid.split("::", 1)[0]).name
                raise pytest.UsageError(
                    f"{item.nodeid} uses the shared fixture {name}; "
                    f"add {file!r} to SHARED[{name!r}] in tests/support/two_groups.py"
                )


def check_marks(items: list[pytest.Item]) -> None:
    """Refuse marks by which a test would be run twice or never; see the Makefile.

    Raises:
        UsageError: ``core`` on a unit test or beside a mark that ``make test`` leaves out, or
            ``slow`` on a test that is no unit test.
    """
    for item in items:
        is_unit = item.nodeid.startswith("tests/unit/")
        if item.get_closest_marker("slow") and not is_unit:
            raise pytest.UsageError(f"{item.nodeid}: slow is for unit tests; remove the mark")
        if not item.get_closest_marker("core"):
            continue
        if is_unit:
            raise pytest.UsageError(f"{item.nodeid}: core is for integration tests; remove it")
        for mark in ("alone", "chaos", "gpu"):
            if item.get_closest_marker(mark):
                raise pytest.UsageError(f"{item.nodeid} is core and {mark}; choose one")


class ByPiece(LoadFileScheduling):  # type: ignore[misc]
    """Gives each of the processes of pytest-xdist one piece after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)


def _is_of_conftest(item: pytest.Item, name: str) -> bool:
    """Whether a test uses the shared fixture, and not one of its module with the same name."""
    info = getattr(item, "_fixtureinfo", None)
    found = info.name2fixturedefs.get(name) if info is not None else None
    return bool(found) and found[-1].baseid == "tests/integration"
