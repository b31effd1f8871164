"""Writers of SQLite that are committed together: each is whole or not there, and nobody is told
before it is on the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import IntegrityError

from service.db import connections as shared_commits
from service.db.engine import Database, DatabaseUnavailable
from tests.support.service_process import wait_for

INSERT = text("INSERT INTO projects (name, created_at) VALUES (:name, 0)")
Write = Callable[[Connection], object]


class Writers:
    """Threads that write to one database, the later ones while the first is not done."""

    def __init__(self, database: Database, pool: ThreadPoolExecutor) -> None:
        self.database, self._pool = database, pool
        self.commits = 0
        event.listen(database._engine, "commit", self._count)

    def _count(self, _connection: Connection) -> None:
        self.commits += 1

    @contextmanager
    def beside(self, *later: Write) -> Iterator[list[Future[None]]]:
        """While the first one has its turn the ``later`` ones wait for theirs; with the block's end
        it is done, too."""
        begun, done = threading.Event(), threading.Event()

        def first(connection: Connection) -> None:
            connection.execute(INSERT, {"name": "first"})
            begun.set()
            assert done.wait(60)

        futures = [self._pool.submit(self._write, first)]
        assert begun.wait(60)
        commits = self.database._shared_commits
        assert commits is not None
        for number, write in enumerate(later, start=1):
            futures.append(self._pool.submit(self._write, write))
            wait_for(
                lambda number=number: commits._num_waiting == number, 60, "a writer that waits"
            )  # type: ignore[misc]
        yield futures
        done.set()

    def _write(self, write: Write) -> None:
        with self.database.write() as connection:
            write(connection)

    def names(self) -> set[str]:
        with self.database.read() as connection:
            return set(connection.execute(text("SELECT name FROM projects")).scalars()) - {
                "default"
            }


@pytest.fixture
def writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writers]:
    monkeypatch.setattr(shared_commits, "LONGEST_S", 60.0)
    database = Database(f"sqlite:///{tmp_path / 'e.db'}")
    database.migrate()
    with ThreadPoolExecutor(8) as pool:
        yield Writers(database, pool)
    database.close()


def named(name: str) -> Write:
    return lambda connection: connection.execute(INSERT, {"name": name})


def raising(connection: Connection) -> None:
    connection.execute(INSERT, {"name": "undone"})
    raise ValueError("changed its mind")


def orphan(connection: Connection) -> None:
    connection.execute(text("PRAGMA defer_foreign_keys=ON"))
    connection.execute(
        text("INSERT INTO run_tags (run_id, key, value) VALUES ('nobody', 'k', 'v')")
    )


def losing(connection: Connection) -> None:
    connection.execute(
        text("INSERT OR ROLLBACK INTO projects (name, created_at) VALUES ('first', 0)")
    )


def test_writers_that_wait_share_the_commit_of_the_one_before(writers: Writers) -> None:
    with writers.beside(named("a"), named("b"), named("c")) as futures:
        assert writers.commits == 0 and not any(future.done() for future in futures)
    for future in futures:
        future.result(20)
    assert writers.commits == 1 and writers.names() == {"first", "a", "b", "c"}


def test_one_that_fails_is_undone_alone(writers: Writers) -> None:
    with writers.beside(named("a"), raising, named("first"), named("b")) as futures:
        pass
    outcomes = [type(future.exception(20)) for future in futures]
    assert sorted(each.__name__ for each in outcomes) == [
        "IntegrityError",
        "NoneType",
        "NoneType",
        "NoneType",
        "ValueError",
    ]
    assert writers.commits == 1 and writers.names() == {"first", "a", "b"}


def test_a_first_one_that_fails_takes_none_along(writers: Writers) -> None:
    with (
        pytest.raises(ValueError, match="changed its mind"),
        writers.database.write() as connection,
    ):
        raising(connection)
    with writers.database.write() as connection:
        connection.execute(INSERT, {"name": "next"})
    assert writers.commits == 1 and writers.names() == {"next"}


def test_a_commit_that_fails_has_failed_for_all(writers: Writers) -> None:
    with writers.beside(named("a"), orphan) as futures:
        pass
    assert all(isinstance(future.exception(20), IntegrityError) for future in futures)
    assert writers.names() == set()
    with writers.database.write() as connection:
        connection.execute(INSERT, {"name": "next"})
    assert writers.names() == {"next"}


def test_a_transaction_that_sqlite_gave_up_is_nobodys(writers: Writers) -> None:
    with writers.beside(losing) as [first, second]:
        pass
    assert isinstance(first.exception(20), DatabaseUnavailable) and isinstance(
        second.exception(20), IntegrityError
    )
    assert writers.names() == set()


def test_a_writer_that_gives_up_leaves_the_commit_to_those_that_wait(
    writers: Writers, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = writers.database._shared_commits
    assert commits is not None
    # as it is at the very moment at which the last one gives up
    monkeypatch.setattr(commits, "_num_waiting", 1)
    future = writers._pool.submit(writers._write, named("a"))
    wait_for(lambda: commits._open is not None, 60, "a transaction that is left open")
    assert not future.done()
    commits._num_waiting = 0
    future.result(20)
    assert writers.names() == {"a"}


def test_what_a_thread_writes_together_has_one_commit_and_fails_alone(writers: Writers) -> None:
    with writers.database.together():
        with pytest.raises(ValueError, match="changed its mind"):
            writers._write(raising)
        writers._write(named("a"))
        with pytest.raises(IntegrityError):
            writers._write(named("a"))
        writers._write(named("b"))
        assert writers.names() == {"a", "b"} and writers.commits == 0
    assert writers.commits == 1 and writers.names() == {"a", "b"}


def test_what_is_written_together_is_called_done_once_it_is_committed(writers: Writers) -> None:
    done: list[int] = []
    writers.database.companion = lambda _: lambda: done.append(writers.commits)
    with writers.database.together():
        writers._write(named("a"))
        writers._write(named("b"))
        assert not done
    assert done == [1, 1]


def test_a_commit_that_fails_fails_what_was_written_together(writers: Writers) -> None:
    done: list[None] = []
    writers.database.companion = lambda _: lambda: done.append(None)
    with pytest.raises(IntegrityError), writers.database.together():
        writers._write(named("a"))
        writers._write(orphan)
    assert writers.names() == set() and not done
    writers._write(named("next"))
    assert writers.names() == {"next"}


def test_nothing_more_is_written_together_once_sqlite_gave_the_transaction_up(
    writers: Writers,
) -> None:
    writers._write(named("first"))
    with pytest.raises(DatabaseUnavailable), writers.database.together():
        writers._write(named("a"))
        with pytest.raises(IntegrityError):
            writers._write(losing)
        with pytest.raises(DatabaseUnavailable):
            writers._write(named("b"))
    assert writers.names() == {"first"}
