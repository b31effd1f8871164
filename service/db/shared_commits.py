"""Writers of a SQLite database, which lets in one at a time: those that come while another one
writes share its commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

LONGEST_S: Final = 0.02
"""How long the first writer of a transaction waits for more of them."""
_LOOK_S: Final = 0.05
"""Between two looks of one who waits for its commit whether the one who was to make it went
away."""


class WriterTimeout(Exception):
    """Another writer held the database for too long."""


class _Group:
    """Writers of one transaction. The first has all of it, each later one a savepoint in it."""

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
        """End the transaction, and tell everybody who waits for it how."""
        try:
            self.transaction.commit()
        except BaseException as exc:
            self.error = exc
            # SQLite still has the transaction; with the connection it goes.
            self.connection.invalidate()
        self._end()

    def abandon(self, error: BaseException) -> None:
        """Undo what every writer wrote."""
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
    """Turns of writers, and what they commit together.

    A commit waits for the disk, which takes longer than most writes. Whoever is done while others
    wait for their turn leaves the commit to the last of them, and goes on once that is through:
    nobody is told of a write that is not on the disk. A write that fails is undone alone; a commit
    that fails has failed for all who are in it.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self._num_waiting = 0
        self._open: _Group | None = None
        """Written to, and to be committed by whoever has the next turn."""
        self._own = threading.local()
        """The group of a thread that is in ``together``."""

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A part of a transaction, committed when this returns; undone where the block raises.
        Raises WriterTimeout.

        In ``together`` it is committed with the rest of that. Where SQLite gave the transaction up,
        it raises what that was.
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
        """One turn, and one commit at its end, for all that this thread writes in the block; each
        part that fails is undone alone.

        Raises WriterTimeout, and what the commit raises: then nothing of it was written.
        """
        with self._turn_of() as group:
            # the block itself: none of its parts stands for all of the transaction
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
        """A turn to write, and then the commit of what was written."""
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
        """Undo the last writer's part, or everything where SQLite has lost the transaction: no room
        on the disk, for one."""
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
        """Commit what is open, unless somebody waits who will."""
        try:
            group = self._open
            if group is not None and (
                self._num_waiting == 0 or time.monotonic() - group.began_at > LONGEST_S
            ):
                self._open = None
                group.commit()
        finally:
            self._turn.release()
