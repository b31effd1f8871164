"""The line between a rank and its host: each calls functions of the other by name.

Messages are pickles on a stream socket. A call is answered whenever it is done, so a call that
waits delays no other one. The end of one process ends the line of the other at once.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from train_fn.ranks.zygote import Streams
from train_fn.recovery.launch import RankJob, RankLaunch

_CALL, _ANSWER, _ERROR = range(3)


class LineEnded(Exception):
    """The process at the other end is gone."""


class Wire:
    """One end of a line.

    Args:
        connection: to the other process.
        serve: carries out a call of the other side, given its name and arguments, on a thread of
            its own. It returns the answer, or a Future of it.
        on_end: called once the other process is gone.
    """

    def __init__(
        self,
        connection: Connection,
        serve: Callable[[str, tuple[Any, ...]], Any],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection, self._serve, self._on_end = connection, serve, on_end
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._ended = False
        threading.Thread(target=self._read, name="line", daemon=True).start()

    def ask(self, name: str, *arguments: Any) -> Future[Any]:
        """Call a function of the other side. The Future raises LineEnded if that process ends
        before it has answered, and what the function raises."""
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            if self._ended:
                answer.set_exception(LineEnded(f"{name}: the process is gone"))
                return answer
            self._asked[number] = answer
        self._send((_CALL, number, name, arguments))
        return answer

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a function of the other side, and return its answer. Raises TimeoutError, and as
        ``ask``."""
        return self.ask(name, *arguments).result(timeout_s)

    def _send(self, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            pass  # the reader finds the end

    def _read(self) -> None:
        try:
            while True:
                kind, number, *rest = pickle.loads(self._connection.recv_bytes())
                if kind == _CALL:
                    threading.Thread(
                        target=self._answer, args=(number, *rest), name="line-call", daemon=True
                    ).start()
                    continue
                with self._lock:
                    asked = self._asked.pop(number)
                if kind == _ANSWER:
                    asked.set_result(rest[0])
                else:
                    asked.set_exception(rest[0])
        except (EOFError, OSError):
            pass
        with self._lock:
            self._ended = True
            lost, self._asked = self._asked, {}
        for each in lost.values():
            each.set_exception(LineEnded("the process is gone"))
        self._on_end()

    def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer = self._serve(name, arguments)
            if isinstance(answer, Future):
                answer = answer.result()
            message = (_ANSWER, number, answer)
            pickle.dumps(message)
        except BaseException as exc:
            message = (_ERROR, number, _that_travels(exc))
        self._send(message)


def _that_travels(exc: BaseException) -> BaseException:
    """Return an exception that the other side can read."""
    try:
        pickle.loads(pickle.dumps(exc))
    except Exception:
        return RuntimeError(f"{type(exc).__name__}: {exc}")
    return exc


# ---------------------------------------------------------------- orders

# What a host tells the processes that it has forked, and what they answer.


@dataclass(frozen=True)
class BuildOrder:
    """What a run's builder on a node is told."""

    job: RankJob
    path: Path
    """Of the socket at which it will fork ranks."""
    environ: dict[str, str]
    """The environment of its host."""
    env: dict[str, str]
    """What every rank of the run sets in addition."""
    streams: Streams


@dataclass(frozen=True)
class BuildResult:
    """What the builder says once it has built."""

    why_not: str | None
    """Why ranks cannot be forked from it; None if they can."""
    failed: str | None
    """What the build has raised; None if it was well."""
    seconds: float


@dataclass(frozen=True)
class RankFacts:
    """What a rank is told when it begins."""

    launch: RankLaunch
    environ: dict[str, str]
    """The environment of its host."""
    node_id: str
    ip: str
    """The node's address in the cluster."""
    use_gpu: bool
    streams: Streams
    remembered: Mapping[str, Any] = field(default_factory=dict)
    """As of ``WorkerContext``."""
