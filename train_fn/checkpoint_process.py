"""A process that writes a rank's checkpoints, from the memory that the rank's copies of its state lie in.

To write a state of many tensors is Python for the most part, and what a thread of the rank does in Python its training waits for,
since both need the interpreter. This process has one of its own, and runs where ranks wait for each other: in Linux's class IDLE,
as long as that is enough. It imports torch for seconds before it can write, in that class, too; until then, and wherever it is not
to be had, a thread of the rank writes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from storage.checkpoints import CheckpointStore
from storage.manifest import Manifest
from train_fn.checkpoint_write import CheckpointJob, Progress
from train_fn.processes import leave_own_cores, may_idle, set_idle
from train_fn.shared_trees import NotShared, TreeSender

IDLE_S = 2.0
"""How long a save may take in the class IDLE, where ranks that never wait leave it next to nothing."""

logger = logging.getLogger(__name__)


class ProcessUnfit(Exception):
    """The process cannot do what was asked for. Nothing of it is under way any more; it is done only if ``committing`` was told."""


class CheckpointProcess:
    """The process as its rank knows it. All but ``hurry`` is for one thread, and the process ends with that thread."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._sender: TreeSender | None = None
        self._lock = threading.Lock()
        self._ready = self._may_idle = self._is_idle = self._hurried = False

    def start(self) -> None:
        """Begin the process; it can write some seconds later. Once, and only where the system knows descriptors of memory."""
        if self._process is not None or sys.platform != "linux":
            return
        self._connection, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "train_fn.checkpoint_process_main", str(theirs.fileno()), str(os.getpid())]
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        }
        with theirs:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environ)
        self._sender = TreeSender(self._connection, self._process.pid)
        self._may_idle = may_idle()
        with self._lock:
            self._give_way(idle=True)
        leave_own_cores(self._process.pid)
        with suppress(OSError):  # it has ended; which is found when it is needed
            self._sender.send(self._store)

    def write(self, job: CheckpointJob, state: Mapping[str, Any], progress: Progress) -> Manifest:
        """As ``write_checkpoint``; ``state`` must stay as it is until this returns. Raises ProcessUnfit, too."""
        manifest: Manifest = self._ask(("write", job, dict(state)), progress)
        return manifest

    def retain(self, keep_latest: int, best: str | None, submission: int) -> list[str]:
        """As ``CheckpointStore.retain``. Raises ProcessUnfit, too."""
        deleted: list[str] = self._ask(("retain", keep_latest, best, submission), None)
        return deleted

    def hurry(self) -> None:
        """From now on somebody waits for what the process writes. Called from any thread."""
        with self._lock:
            self._hurried = True
            if self._ready:
                self._give_way(idle=False)

    def end(self) -> None:
        """End the process, whatever it does; nothing that it had begun is written on when this returns."""
        if self._process is None or self._connection is None:
            return
        with self._lock:
            self._ready = False
            self._process.kill()
        self._process.wait()
        self._connection.close()
        self._connection = self._sender = None

    def _ask(self, request: tuple[Any, ...], progress: Progress | None) -> Any:
        """What the process answers. Raises what it raised, or ProcessUnfit."""
        if self._connection is None or self._sender is None:
            raise ProcessUnfit
        try:
            self._ready = self._ready or (self._connection.poll() and self._connection.recv() == "ready")
            if not self._ready:
                raise ProcessUnfit
            with self._lock:
                self._give_way(idle=not self._hurried)
            self._sender.send(request)
            kind, value = self._answer(self._connection, progress)
        except NotShared as exc:
            raise ProcessUnfit from exc
        except (EOFError, OSError) as exc:
            raise self._lost() from exc
        if kind == "error":
            raise value
        return value

    def _answer(self, connection: Connection, progress: Progress | None) -> tuple[str, Any]:
        timeout_s: float | None = IDLE_S
        while True:
            if not connection.poll(timeout_s):
                with self._lock:
                    self._give_way(idle=False)
                timeout_s = None
                continue
            kind, value = connection.recv()
            if kind in ("answer", "error"):
                return kind, value
            assert progress is not None
            progress.moved() if kind == "moved" else progress.committing(value)

    def _give_way(self, *, idle: bool) -> None:
        """Called with the lock held."""
        if self._may_idle and idle != self._is_idle:
            assert self._process is not None
            self._is_idle = idle
            set_idle(self._process.pid, idle=idle)

    def _lost(self) -> ProcessUnfit:
        assert self._process is not None
        self.end()
        logger.warning(
            "the process that writes checkpoints has ended (exit code %s); a thread of this rank writes them from now on",
            self._process.returncode,
        )
        return ProcessUnfit()
