"""Whether the storage and the database belong together."""

from __future__ import annotations

from everstep.wire.base import Answer


class RunBehind(Answer):
    """A run that is further in the storage than in the database."""

    run_id: str
    database_submission: int
    """Newest submission in the database."""
    storage_submission: int
    """Newest submission with a journal in the storage."""


class StorageStatus(Answer):
    """Whether the storage is the one that the database belongs to."""

    uri: str
    known_id: str | None
    """Id of the storage that the database belongs to; null before its first use."""
    found_id: str | None
    """Id found in the storage; null if it has none or could not be read."""
    problem: str | None
    """Why the service starts no run in this storage, and what to do; null if all is well."""
    behind: tuple[RunBehind, ...]
    """Runs that are further in the storage than in the database: the database is older."""
    unknown_runs: tuple[str, ...]
    """Run directories that the database does not know, 100 at most."""


class StorageAdoption(Answer):
    """The result of adopting a storage."""

    storage_id: str
    previous_id: str | None
    caught_up: tuple[str, ...]
    """Runs whose later submissions were read from their journals."""
    lost: tuple[str, ...]
    """Runs of which the storage lacks something that was known. Each continues from what is
    left."""
