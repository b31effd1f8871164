"""A user's script for torchrun on the ranks of a run: its directory, its environment, and its stop.

It finds what torchrun gives: an environment to call ``init_process_group`` in, and a store of the
group's own. It runs in the rank's process, so that Ray Train's context, and what everstep.train
makes of it, are there as for a train_fn.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from everstep.spec.code import CodeSpec
from storage.run_control import STOPS, Stop
from train_fn.context import WorkerContext
from train_fn.node.network import store_at
from train_fn.node.node_dir import node_lock, own_temporary_dir
from train_fn.own_loop import OwnLoop
from train_fn.step.nccl import abort_collectives
from train_fn.step.peers import Peers, end_process_group
from train_fn.user_code.modules import files_on_node, import_from
from train_fn.user_code.script import Script, find_script, run_as_main

SHARED_VARIABLE = "EVERSTEP_SHARED_DIR"
"""Names the directory that all ranks share and that is kept with the run."""

READY_S = 300.0
"""Longest wait for all ranks to have the script's files."""
POLL_S = 0.5
"""Seconds between two looks for a stop."""
ABORT_AFTER_S = 5.0
"""Seconds after which a script that was interrupted is taken to wait for its peers."""
REPEAT_S = 10.0
"""Seconds for which a script may clean up before it is interrupted again."""
ANSWER_S = 30.0
"""Longest wait for an answer of the group's store."""
_STOP_KEY = "stop"

logger = logging.getLogger(__name__)

_server: TCPStore | None = None
"""The store that this process keeps for its group, beyond the end of its own script: other ranks
may still need it."""


class Interrupted(BaseException):
    """Ends a script whose run is stopped, past its ``except Exception``."""


@dataclass(frozen=True)
class ScriptRun:
    """A script that is ready to run: all ranks have its files, and none has a process group."""

    script: Script
    root: Path
    """Its working directory."""
    address: tuple[str, int]
    """Host and port of the group's store."""
    stops: SharedStop

    def run(self, present: OwnLoop, takes_stops: Callable[[], bool]) -> None:
        """Run the script to its end, or until the run is stopped. However the script ends then,
        ``present`` has the stop.

        Args:
            takes_stops: whether the script stops by itself where the ranks agree, at its reports.
        """
        ctx = present.ctx
        watch = _StopWatch(ctx, self.stops, takes_stops)
        logger.info("running %s in %s", self.script.file.relative_to(self.root), self.root)
        try:
            with _in_environment(environment(ctx, self.address)), contextlib.chdir(self.root):
                watch.start()
                run_as_main(self.script, self.root, _code(ctx).argv)
        finally:
            watch.close()
            if present.stop is None and (stop := self.stops.read()) is not None:
                logger.info("the script was interrupted: %s", stop)
                present.stop = stop
                end_process_group()


def prepare_script(ctx: WorkerContext) -> ScriptRun:
    """Put the script's files in place, and the process group out of its way. A collective.

    Raises BadTask, StorageError, OSError.
    """
    files = files_on_node(ctx.run_dir.storage, _code(ctx).archive)
    root, is_shared = _work_dir(ctx)
    address, store, stops = _serve(ctx)
    if ctx.world_rank == 0 or not is_shared:
        _copy(files.directory, root)
    store.set(f"ready/{ctx.world_rank}", "")
    ready = [f"ready/{rank}" for rank in range(ctx.world_size)]
    store.wait(ready, timedelta(seconds=READY_S))
    if dist.is_initialized():
        dist.destroy_process_group()
    import_from(root, files.names)
    script = find_script(root, files.names, str(_code(ctx).script))
    if not is_shared and ctx.world_rank == 0:
        logger.warning(
            "the run's storage is not a directory: files that the script writes stay on their "
            "node. Report checkpoints by ray.train.report, or protect its state"
        )
    return ScriptRun(script, root, address, stops)


def close_store() -> None:
    """End the group's store, if this process has it: ranks that wait there fail at once."""
    global _server
    _server = None


def _serve(ctx: WorkerContext) -> tuple[tuple[str, int], Store, SharedStop]:
    """Let rank 0 open a store for the group, as torchrun's agent does. Return its address, this
    rank's own connection to it, and the stop that the ranks share there. A collective."""
    global _server
    shared: tuple[str, int, str] | None = None
    if ctx.world_rank == 0:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        _server = store_at(host, timedelta(seconds=READY_S))
        shared = host, _server.port, secrets.token_hex(16)
    shared = Peers(ctx.world_rank, ctx.world_size, ctx.device).share(shared, 0)
    assert shared is not None
    host, port, word = shared
    client = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))
    store = PrefixStore("everstep", client)
    return (host, port), store, SharedStop(store, word)


def _work_dir(ctx: WorkerContext) -> tuple[Path, bool]:
    """Return the script's working directory, and whether all ranks share it and it is kept."""
    shared = ctx.run_dir.work_path
    if shared is not None:
        return Path(shared), True
    return own_temporary_dir() / "runs" / ctx.run_dir.run_id / "workdir", False


def _copy(source: Path, root: Path) -> None:
    """Copy the archive's files to where the script runs, unless an earlier attempt did."""
    with node_lock(own_temporary_dir() / "cache" / f"{root.parent.name}.lock"):
        if root.exists():
            return
        temporary = root.with_name(f"{root.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(".everstep-*"))
        temporary.rename(root)


def environment(ctx: WorkerContext, address: tuple[str, int]) -> dict[str, str]:
    """Return the variables that torchrun sets, and Everstep's own."""
    shared = {} if ctx.run_dir.work_path is None else {SHARED_VARIABLE: ctx.run_dir.work_path}
    return {
        "RANK": str(ctx.world_rank),
        "WORLD_SIZE": str(ctx.world_size),
        "LOCAL_RANK": str(ctx.local_rank),
        "LOCAL_WORLD_SIZE": str(ctx.local_world_size),
        "GROUP_RANK": os.environ.get("NODE_RANK", "0"),
        "GROUP_WORLD_SIZE": str(ctx.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(ctx.world_rank),
        "ROLE_WORLD_SIZE": str(ctx.world_size),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "TORCHELASTIC_RESTART_COUNT": str(ctx.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(ctx.spec.recovery.max_system_failures),
        "TORCHELASTIC_RUN_ID": ctx.run_dir.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "EVERSTEP_RUN_ID": ctx.run_dir.run_id,
        "EVERSTEP_ATTEMPT": str(ctx.attempt),
        **shared,
    }


@contextlib.contextmanager
def _in_environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class SharedStop:
    """The stop that rank 0 writes to the group's store, for all ranks.

    Anybody who reaches the store's port may write there, so a stop counts only with ``word``, which
    the ranks alone know.
    """

    def __init__(self, store: Store, word: str) -> None:
        self._store = store
        self._stops: dict[bytes, Stop] = {f"{word} {stop}".encode(): stop for stop in STOPS}
        self._warned = False

    def write(self, stop: Stop) -> None:
        text = next(text for text, each in self._stops.items() if each == stop)
        self._store.set(_STOP_KEY, text.decode())

    def read(self) -> Stop | None:
        """Return the stop that rank 0 has written; None if there is none, or rank 0 is gone."""
        try:
            found = self._store.get(_STOP_KEY) if self._store.check([_STOP_KEY]) else None
        except RuntimeError:
            return None
        stop = None if found is None else self._stops.get(found)
        if found is not None and stop is None and not self._warned:
            self._warned = True
            logger.warning("a process that is no rank wrote a stop to the group's store: ignored")
        return stop


class _StopWatch:
    """Interrupts the script on this thread once the run is to stop, at the same stop on all
    ranks: rank 0 hears of it, and tells the others."""

    def __init__(
        self, ctx: WorkerContext, stops: SharedStop, takes_stops: Callable[[], bool]
    ) -> None:
        self._ctx, self._stops, self._takes_stops = ctx, stops, takes_stops
        self._script_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stop-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Interrupt the script no more, even if it was about to be interrupted. Rank 0 writes no
        stop from here on."""
        with self._lock:
            self._over.set()
            _raise_in(self._script_thread, None)

    def _run(self) -> None:
        looks = 0
        while not self._over.wait(POLL_S):
            self._pass_on()
            if self._stops.read() is None:
                continue
            with self._lock:
                if not self._over.is_set() and looks % round(REPEAT_S / POLL_S) == 0:
                    _raise_in(self._script_thread, Interrupted)
            if looks == round(ABORT_AFTER_S / POLL_S):
                abort_collectives()
            looks += 1

    def _pass_on(self) -> None:
        """Tell the others of the stop that rank 0 has heard of, unless its script has ended."""
        heard = self._ctx.journal.stop_requested
        with self._lock:
            if (
                self._ctx.world_rank == 0
                and heard is not None
                and not self._over.is_set()
                and not self._takes_stops()
            ):
                self._stops.write(heard)


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in another thread at its next Python instruction; None takes back one that
    was not raised yet."""
    what: Any = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _code(ctx: WorkerContext) -> CodeSpec:
    assert ctx.spec.code is not None
    return ctx.spec.code
