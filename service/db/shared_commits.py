"""Group commit for SQLite, which allows one writer at a time: writers that wait for another one
share its commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

LONGEST_S: Final = 0.02
"""Maximum time that the first writer of a transaction waits for more of them."""
_LOOK_S: Final = 0.05
"""Interval at which a waiting writer checks whether the one that was to commit has gone away."""


class WriterTimeout(Exception):
    """Another writer held the database for too long."""


class _Group:
    """Writers of one transaction. Each writer after the first has a savepoint in it."""

    def __init__(self, engine: Engine) -> None:
        self.connection = engine.connect().execution_options(everstep_begin="BEGIN IMMEDIATE")
        try:
            self.transaction = self.connection.begin()
        except BaseException:
            self.connection.close()
            raise
        self.began_at = time.monotonic()
        self.num_writers = 0
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def commit(self) -> None:
        """End the transaction, and report the result to all waiting writers."""
        try:
            self.transaction.commit()
        except BaseException as exc:
            self.error = exc
            # SQLite still has the transaction open; closing the connection ends it.
            self.connection.invalidate()
        self._end()

    def abandon(self, error: BaseException) -> None:
        """Roll back the writes of all writers."""
        self.error = error
        try:
            self.transaction.rollback()
        except DBAPIError:
            self.connection.invalidate()
        self._end()

    def _end(self) -> None:
        try:
            self.connection.close()
        finally:
            self.ended.set()


class SharedCommits:
    """Serialises writers and lets them share commits.

    A commit waits for the disk, which takes longer than most writes. A writer that is done while
    others wait for their turn leaves the commit to the last of them, and returns once it has
    succeeded: no write is acknowledged before it is on the disk. A write that fails is rolled back
    alone; a commit that fails has failed for all its writers.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self._num_waiting = 0
        self._open: _Group | None = None
        """Transaction that the writer with the next turn will commit."""
        self._own = threading.local()
        """The group of a thread that is inside ``together``."""

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a part of a transaction. It is committed when this returns, and rolled back if the
        block raises. Raises WriterTimeout.

        Inside ``together`` it is committed with the rest. If SQLite has rolled back the
        transaction, it raises that error.
        """
        own: _Group | None = getattr(self._own, "group", None)
        if own is None:
            with self._turn_of() as group, self._part(group):
                yield group.connection
            return
        if own.error is not None:
            raise own.error
        with self._part(own):
            yield own.connection

    @contextmanager
    def together(self) -> Iterator[Connection]:
        """Commit everything that this thread writes in the block at its end; a part that fails is
        rolled back alone.

        Raises WriterTimeout, and the commit's error: then nothing was written.
        """
        with self._turn_of() as group:
            # count the block itself, so that each of its parts gets a savepoint
            group.num_writers += 1
            self._own.group = group
            try:
                yield group.connection
            except BaseException as exc:
                if group.error is None:
                    self._abandon(group, exc)
                raise
            finally:
                self._own.group = None

    @contextmanager
    def _turn_of(self) -> Iterator[_Group]:
        """Take a turn to write; commit at its end, or wait for the commit."""
        self._take_turn()
        try:
            group = self._open = self._open or _Group(self._engine)
            yield group
        finally:
            self._end_turn()
        while not group.ended.wait(_LOOK_S):
            if self._turn.acquire(blocking=False):
                self._end_turn()
        if group.error is not None:
            raise group.error

    @contextmanager
    def _part(self, group: _Group) -> Iterator[None]:
        is_first = group.num_writers == 0
        group.num_writers += 1
        if not is_first:
            group.connection.exec_driver_sql("SAVEPOINT writer")
        try:
            yield
            if not is_first:
                group.connection.exec_driver_sql("RELEASE writer")
        except BaseException as exc:
            if is_first:
                self._abandon(group, exc)
            else:
                self._undo(group)
            raise

    def _undo(self, group: _Group) -> None:
        """Roll back the last writer's part, or everything if SQLite has lost the transaction, for
        example on a full disk."""
        try:
            group.connection.exec_driver_sql("ROLLBACK TO writer")
            group.connection.exec_driver_sql("RELEASE writer")
        except DBAPIError as exc:
            self._abandon(group, exc)

    def _abandon(self, group: _Group, error: BaseException) -> None:
        self._open = None
        group.abandon(error)

    def _take_turn(self) -> None:
        with self._counting:
            self._num_waiting += 1
        taken = self._turn.acquire(timeout=self._timeout_s)
        with self._counting:
            self._num_waiting -= 1
        if not taken:
            raise WriterTimeout

    def _end_turn(self) -> None:
        """Commit the open transaction, unless a waiting writer will."""
        try:
            group = self._open
            if group is not None and (
                self._num_waiting == 0 or time.monotonic() - group.began_at > LONGEST_S
            ):
                self._open = None
                group.commit()
        finally:
            self._turn.release()
