"""What a driver does beside the training: it watches for stops, orders and its own successor, and
has a restart rehearsed."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from everstep.spec.run_spec import RunSpec
from everstep.wire import ReasonCode
from everstep.wire.drills import Rehearsal
from everstep.wire.events import EventKind
from storage.claims import successor
from storage.cluster import read_rehearsal, rehearsal_key
from storage.errors import StorageError
from storage.filesystem import Storage
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn.drills import Drills, Faults
from train_fn.errors import Replaced
from train_fn.journal.client import ActorJournalClient, PassedOrders
from train_fn.node.node_dir import node_lock, own_temporary_dir
from train_fn.recovery.history import History
from train_fn.recovery.launch import ControllerOutcome
from train_fn.recovery.outcome import Stopping
from train_fn.recovery.settings import RecoverySettings

EXIT_REPLACED = 3
STOP_POLL_S = 0.5
ORDER_POLL_S = 0.5
FENCE_POLL_S = 5.0

logger = logging.getLogger(__name__)


def require_newest(run_dir: RunDir, submission: int) -> None:
    """Raise Replaced if a newer submission of the run has begun."""
    newest = max(run_dir.submissions(), default=0)
    if newest > submission:
        raise replaced(run_dir, newest, submission)
    why = successor(run_dir, (submission, 0))
    if why is not None:
        raise Replaced(why)


def replaced(run_dir: RunDir, newest: int | None, submission: int) -> Replaced:
    """Return the error of a submission that ``newest`` has taken over from; None if its number is
    not known."""
    by = "a newer submission" if newest is None else f"submission {newest}"
    return Replaced(f"{by} of run {run_dir.run_id} has taken over from submission {submission}")


class ControlWatch:
    """Two threads that read the run directory until ``close``."""

    def __init__(
        self, run_dir: RunDir, submission: int, client: ActorJournalClient, stopping: Stopping
    ) -> None:
        self._run_dir, self._submission = run_dir, submission
        self._client, self._stopping = client, stopping
        self._done = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.watch_stops, name="stop-watch", daemon=True).start()
        threading.Thread(target=self.watch_orders, name="orders", daemon=True).start()

    def close(self) -> None:
        """End both threads, each after what it is doing."""
        self._done.set()

    def watch_stops(self) -> None:
        """Send the user's stop, or the deadline's, to the journal, whose replies tell every rank.
        End this process once a newer submission has taken over."""
        next_fence = time.monotonic() + FENCE_POLL_S
        while not self._done.wait(STOP_POLL_S):
            asked: Stop | None = None
            try:
                asked = self._run_dir.stop_requested(self._submission)
                if time.monotonic() >= next_fence:
                    next_fence = time.monotonic() + FENCE_POLL_S
                    require_newest(self._run_dir, self._submission)
            except Replaced as exc:
                logger.error("%s; this driver ends now", exc)
                os._exit(EXIT_REPLACED)
            except StorageError as exc:
                logger.warning("the run directory could not be read, trying again: %s", exc)
            stop = self._stopping.decide(asked, time.time())
            if stop is not None:
                self._client.announce_stop(stop)

    def watch_orders(self) -> None:
        """Carry out drills, and pass on orders for profiles and stacks. On a thread of its own,
        since drills take seconds."""
        passed_on = PassedOrders(self._run_dir, self._submission, self._client)
        drills = Drills(self._run_dir, self._submission, self._client, _ray_faults)
        while not self._done.wait(ORDER_POLL_S):
            for tick in (passed_on.tick, drills.tick):
                try:
                    tick()
                except Exception as exc:
                    # an order that cannot be read must not take the driver along
                    logger.warning("orders could not be looked for, trying again: %s", exc)


def _ray_faults() -> Faults:
    from train_fn.ray_train.journal_actor import RayFaults

    return RayFaults()


# ---------------------------------------------------------------- rehearsal

# A restart is rehearsed on the run's code, by a process of its own: beside the run, where a
# processor is idle, or before it.

_PROGRAM = "train_fn.rehearsal.beside"
_LOOK_S = 10.0
_UNPROTECTED = "the code calls no es.protect, so no step of it is known; protect its loop"
_WAITS = "A restart is rehearsed on this code before it trains: recovery.rehearse is require."


class RestartRehearsal:
    """The rehearsal that ``recovery.rehearse`` asks for. Nothing that happens to it ends the run,
    unless the run requires it."""

    def __init__(
        self, run_dir: RunDir, spec: RunSpec, settings: RecoverySettings, client: ActorJournalClient
    ) -> None:
        self._run_dir, self._spec, self._client = run_dir, spec, client
        self._settings = settings
        self._mode = spec.rehearses
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._is_running = False
        """Whether the rehearsal has begun, and has not ended."""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Rehearse beside the run, if it wants that, once it has run for a while."""
        if self._mode == "warn" and self._settings.rehearse_after_s > 0:
            threading.Thread(target=self._made, args=(True,), name="rehearsal", daemon=True).start()

    def close(self) -> None:
        """End a rehearsal that has not come to its end. Its process cleans up by itself: the run
        does not wait for it."""
        if self._is_running:
            self._report(_not_made("the run ended first"))
        self._ending.set()
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def refusal(self, stopping: Stopping, history: History) -> ControllerOutcome | None:
        """Wait for the rehearsal, if the run requires it. Return how the run ends if a restart
        would change what it trains, if that could not be found out, or if it was stopped
        meanwhile; None if it may train."""
        if self._mode != "require" or history.steps_done:
            return None
        if read_rehearsal(self._run_dir.storage, self._key) is None:
            code = ReasonCode.WAITING_FOR_REHEARSAL.value
            self._client.emit(EventKind.WAITING, {"code": code, "message": _WAITS, "missing": {}})
        found: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: found.append(self._made(False)), daemon=True)
        thread.start()
        ended = ControllerOutcome(False, last_step=history.last_step, attempts=history.last_attempt)
        while thread.is_alive():
            thread.join(STOP_POLL_S)
            if thread.is_alive() and (stopping.asked is not None or stopping.overdue):
                self.close()
                return replace(ended, finished=True, stopped=stopping.asked or "cancel")
        refused = refusal_of(found[0])
        if refused is None:
            return None
        return replace(ended, failed=ReasonCode.REHEARSAL_NOT_PASSED, message=refused)

    @cached_property
    def _key(self) -> str:
        from train_fn.node.node_check import versions  # imports torch

        return rehearsal_key(self._spec, versions())

    def _made(self, beside: bool) -> dict[str, Any]:
        """Return what the rehearsal showed, and report it. Raises nothing."""
        try:
            found = self._found(beside)
            if found["state"] == "made":
                found["text"] = Rehearsal.model_validate(found["report"]).explanation
        except Exception as exc:  # whatever it is, it must not end the run
            logger.warning("the rehearsal failed", exc_info=True)
            found = _not_made(f"{type(exc).__name__}: {exc}")
        if found["state"] != "none":
            self._report(found)
        return found

    def _found(self, beside: bool) -> dict[str, Any]:
        """Rehearse, one run of this node after the other, unless another one has done so."""
        storage = self._run_dir.storage
        if (known := read_rehearsal(storage, self._key)) is not None:
            return {"state": "made", "report": known, "reused": True}
        if beside and self._ending.wait(self._settings.rehearse_after_s):
            return {"state": "none"}
        if not is_protected(storage, self._spec):
            return {"state": "none"} if beside else _not_made(_UNPROTECTED)
        with node_lock(own_temporary_dir() / f"rehearsal-{self._mode}.lock"):
            if (known := read_rehearsal(storage, self._key)) is not None:
                return {"state": "made", "report": known, "reused": True}
            if (beside and not self._waits_for_idle()) or self._ending.is_set():
                return {"state": "none"}
            self._report({"state": "running"})
            return self._run(beside)

    def _waits_for_idle(self) -> bool:
        """Wait until processors of this node are idle. Return whether they are; else the run
        ends."""
        while idle_cpus() < self._settings.rehearse_idle_cpus:
            if self._ending.wait(_LOOK_S):
                return False
        return True

    def _run(self, beside: bool) -> dict[str, Any]:
        """Run the process to its end. Return what it found."""
        where = (self._run_dir.storage.uri, self._run_dir.run_id, self._key)
        command = [sys.executable, "-m", _PROGRAM, *where, f"{self._settings.rehearse_limit_s:g}"]
        process = self._process = subprocess.Popen(
            [*command, "idle"] if beside else command,
            env=rehearsal_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        if self._ending.is_set():
            process.stdin.close()
        with process.stdout:
            said = process.stdout.read()
        code = process.wait()
        with suppress(OSError):
            process.stdin.close()
        with suppress(ProcessLookupError):  # ranks that it could not end itself
            os.killpg(process.pid, signal.SIGKILL)
        if not said:
            return _not_made(f"its process on the driver's node ended with code {code}")
        found: dict[str, Any] = json.loads(said)
        return found

    def _report(self, found: dict[str, Any]) -> None:
        """Report a state, unless the run has ended."""
        with self._lock:
            if self._ending.is_set():
                return
            self._is_running = found["state"] == "running"
            facts = {"state": found["state"], "mode": self._mode, "text": found.get("text", "")}
            facts |= {"reused": found.get("reused", False), "report": found.get("report")}
            logger.info("rehearsal of a restart: %(state)s %(text)s", facts)
            self._client.emit(EventKind.REHEARSAL, facts)


def _not_made(text: str) -> dict[str, Any]:
    return {"state": "not_made", "text": text, "report": None, "reused": False}


def refusal_of(found: dict[str, Any]) -> str | None:
    """Return why a run that requires its rehearsal does not train, with the way out; None if a
    restart was shown to change nothing."""
    if found["state"] == "made" and found["report"]["outcome"] == "equal":
        return None
    why = "" if found["state"] == "made" else "the rehearsal could not be made: "
    return (
        f"recovery.rehearse is require, so the run does not train: {why}{found['text']} Use "
        "`everstep rehearse` until a restart changes nothing, or set recovery.rehearse to warn"
    )


def idle_cpus() -> float:
    """Return how many processors of this node were idle in the last minute."""
    return max(0.0, (os.cpu_count() or 1) - os.getloadavg()[0])


def is_protected(storage: Storage, spec: RunSpec) -> bool:
    """Return whether the steps of a run's code can be known. Another script might run to its
    end."""
    from train_fn.user_code.modules import DOOR, files_on_node, imports

    if spec.code is None or not spec.runs_own_function:
        return True
    code = files_on_node(storage, spec.code.archive)
    return imports(code.directory, code.names, DOOR)


def rehearsal_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rehearsal: the driver's, but for its cluster and its GPUs, and
    with nothing recorded at Weights & Biases."""
    kept = {name: value for name, value in environ.items() if not name.startswith("RAY_")}
    fixed = {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1"}
    return {"PYTHONHASHSEED": "0", **kept, **fixed}
