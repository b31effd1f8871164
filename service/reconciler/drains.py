"""The reading of many runs' journals. A slow journal continues on its own thread and delays no
other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from service.db.errors import DatabaseError
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from service.reconciler.facts import TailFact

RUN_PATIENCE_S: Final = 5.0
"""Longest wait of a tick for one run's journal. A slower one continues in the background and counts
as not read to its end."""
MOST_SLOW: Final = 64
"""Most journals that are read in the background, each on a thread."""

Drain = Callable[[RunRow], tuple[RunRow, TailFact]]

log = structlog.get_logger(__name__)


class Drains:
    """Reads journals on threads. A storage may hang for one directory and serve all others, and
    nothing can end a read that hangs.

    Only one thread at a time may call ``read``.
    """

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._slow: dict[str, threading.Thread] = {}
        """Run id -> the thread that still reads its journal."""
        self._were_slow: set[str] = set()
        """Runs that were slow. They come last, so that they delay no other."""

    def read(self, rows: Sequence[RunRow]) -> dict[str, tuple[RunRow, TailFact]]:
        """Read the journals. Return each run afterwards, and how far its journal was read.

        Runs that are gone are left out.

        Raises DatabaseError.
        """
        self._slow = {run_id: thread for run_id, thread in self._slow.items() if thread.is_alive()}
        self._were_slow &= {row.id for row in rows}
        waiting = deque(
            sorted(
                (row for row in rows if row.id not in self._slow),
                key=lambda row: row.id in self._were_slow,
            )
        )
        found = {row.id: (row, TailFact.BEHIND) for row in rows}
        while waiting:
            worker = _Worker(self._drain, waiting)
            stuck = worker.wait()
            for run_id, outcome in worker.done.items():
                if outcome is None:
                    del found[run_id]
                else:
                    found[run_id] = outcome
            if worker.problem is not None:
                raise worker.problem
            if stuck is None:
                break
            log.warning(
                "a run's journal is slow to read; reading the others",
                run_id=stuck,
                seconds=RUN_PATIENCE_S,
            )
            self._slow[stuck] = worker.thread
            self._were_slow.add(stuck)
            if len(self._slow) >= MOST_SLOW:
                log.error(
                    "too many journals are slow to read; reading the rest at a later tick",
                    runs=len(waiting),
                )
                break
        return found


class _Worker:
    """One thread that reads run after run, until it is left behind with a slow one."""

    def __init__(self, drain: Drain, waiting: deque[RunRow]) -> None:
        self._drain = drain
        self._waiting = waiting
        self._changed = threading.Condition()
        self._left = False
        self._ended = False
        self._current: tuple[str, float] | None = None
        self.done: dict[str, tuple[RunRow, TailFact] | None] = {}
        self.problem: Exception | None = None
        self.thread = threading.Thread(target=self._work, name="journals", daemon=True)
        self.thread.start()

    def wait(self) -> str | None:
        """Wait until all runs are read, or one is too slow. Return that one's id, or None."""
        with self._changed:
            while not self._ended:
                now = time.monotonic()
                run_id, began = self._current or ("", now)
                left_s = began + RUN_PATIENCE_S - now
                if left_s <= 0:
                    self._left = True
                    return run_id
                self._changed.wait(left_s)
        return None

    def _work(self) -> None:
        try:
            while (row := self._next()) is not None:
                self._keep(row, self._outcome(row))
        except Exception as exc:
            self._fail(exc)
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _next(self) -> RunRow | None:
        with self._changed:
            if self._left or not self._waiting:
                return None
            row = self._waiting.popleft()
            self._current = row.id, time.monotonic()
            return row

    def _outcome(self, row: RunRow) -> tuple[RunRow, TailFact] | None:
        try:
            return self._drain(row)
        except TransitionConflict:
            return None
        except DatabaseError:
            raise
        except Exception:  # A bug of ours must not stop the other runs.
            log.exception("a journal cannot be read", run_id=row.id)
            return row, TailFact.BEHIND

    def _keep(self, row: RunRow, outcome: tuple[RunRow, TailFact] | None) -> None:
        with self._changed:
            if not self._left:  # Otherwise the tick has ended, and the next one reads again.
                self.done[row.id] = outcome

    def _fail(self, exc: Exception) -> None:
        with self._changed:
            if self._left:
                log.warning("a slow journal was not applied", problem=str(exc))
            else:
                self.problem = exc
