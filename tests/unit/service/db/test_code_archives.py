"""What a project may have of uploaded code, also where uploads come at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection

from service.db.checkpoints import CodeArchives
from service.db.engine import Database
from service.db.projects import QuotaExceeded

pytest_plugins = ["tests.support.database_fixtures"]

HELD_UP_S = 0.5


class HeldUp(CodeArchives):
    """One that has counted what its project has, and waits for another that has done so as well
    before it writes."""

    both: threading.Barrier

    def _insert(self, connection: Connection, *row: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            self.both.wait(HELD_UP_S)
        super()._insert(connection, *row)


@pytest.mark.parametrize("first", ["default", "new"], ids=["known", "made by the upload"])
def test_of_two_uploads_at_once_that_fit_only_alone_one_is_refused(
    first: str, database: Database, database_url: str
) -> None:
    """As of two replicas, each with connections of its own."""
    other = Database(database_url)
    HeldUp.both = threading.Barrier(2)

    def upload(replica: Database, digest: str) -> str:
        try:
            HeldUp(replica).record(first, digest, 60, "tok_a", 100, create_project=True)
        except QuotaExceeded as exc:
            return str(exc)
        return "taken"

    digests = ["sha256:" + letter * 64 for letter in "ab"]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(upload, (database, other), digests))
    refused = [answer for answer in answers if answer != "taken"]
    assert len(refused) == 1 and f"project {first} has 60 bytes" in refused[0], answers
    held = [CodeArchives(other).holds(first, digest) for digest in digests]
    assert held == [answer == "taken" for answer in answers]
    with pytest.raises(QuotaExceeded):  # and counts nothing of what was refused
        CodeArchives(other).record(first, "sha256:" + "c" * 64, 41, "tok_a", 100)
    CodeArchives(other).record(first, "sha256:" + "c" * 64, 40, "tok_a", 100)
    other.close()
