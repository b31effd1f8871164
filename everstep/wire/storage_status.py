"""Answers about the storage: which one the database belongs to, and what does not fit."""

from __future__ import annotations

from everstep.wire.base import Answer


class RunBehind(Answer):
    """A run of which the storage holds more than the database knows."""

    run_id: str
    database_submission: int
    """Newest submission that the database knows."""
    storage_submission: int
    """Newest one that has a journal in the storage."""


class StorageStatus(Answer):
    """Whether the storage is the one that the database belongs to."""

    uri: str
    known_id: str | None
    """Id of the storage that the database belongs to; null before the first use."""
    found_id: str | None
    """Id of the storage that is there; null where it has none, or could not be read."""
    problem: str | None
    """Why nothing is begun in the storage, and what to do; null where all is well."""
    behind: tuple[RunBehind, ...]
    """Runs of which the storage holds more than the database knows: the database is older than its
    storage."""
    unknown_runs: tuple[str, ...]
    """Directories of runs that the database does not know, 100 at most."""


class StorageAdoption(Answer):
    """What the service took over."""

    storage_id: str
    previous_id: str | None
    caught_up: tuple[str, ...]
    """Runs whose later submissions count again, with what their journals tell."""
    lost: tuple[str, ...]
    """Runs of which the storage lacks what was known; each goes on from what it holds, if
    anything."""
