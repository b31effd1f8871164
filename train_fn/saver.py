"""Checkpoints: rank 0 copies the state between two steps, and a thread writes the copy while training goes on."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import IO, cast

import torch

from everstep.events import EventKind
from storage.errors import CheckpointExists, StorageError
from storage.manifest import Manifest
from storage.run_dir import CheckpointName
from train_fn.boundary_copy import BoundaryCopies, BoundaryCopy
from train_fn.context import WorkerContext
from train_fn.errors import CheckpointFailed
from train_fn.safetensors_file import safetensors_name, write_safetensors
from train_fn.state import TrainState

MODEL_FILE = "model.pt"
"""The model's plain ``state_dict`` on the CPU."""
EMA_FILE = "model_ema.pt"
"""The same with averaged weights, where the run keeps them."""
STATE_FILE = "train_state.pt"
"""Everything else of TrainState."""
FINAL_TRIES = 3
RETRY_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Save:
    """One checkpoint to be written; it holds its copy until it is."""

    copy: BoundaryCopy
    is_best: bool
    best: str | None
    """Name of the checkpoint that retention keeps as the best."""


class Saver:
    """Saves on rank 0; on the others every call returns at once. One save is written at a time, one waits.

    A save that comes while another waits takes its place, unless the waiting one is the best and the new one is not.
    """

    def __init__(self, ctx: WorkerContext, state: TrainState, copies: BoundaryCopies) -> None:
        self._ctx, self._state, self._copies = ctx, state, copies
        self._active = ctx.world_rank == 0
        self._store = ctx.run_dir.checkpoints
        self._lock = threading.Condition()
        self._waiting: Save | None = None
        self._writing = False
        self._closed = False
        self._committed: Manifest | None = None
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
        if self._active:
            self._thread.start()

    def offer(self, *, is_best: bool) -> None:
        """Save in the background if a checkpoint is due: by steps, by time, or because this is the best state so far."""
        if not self._active or not (is_best or self._is_due()):
            return
        with self._lock:
            if self._waiting is not None:
                if self._waiting.is_best and not is_best:
                    return
                self._copies.release(self._waiting.copy)
                self._waiting = None
        save = self._take(is_best)
        with self._lock:
            self._waiting = save
            self._lock.notify_all()

    def save_now(self, *, is_best: bool = False) -> None:
        """Commit the present state before returning, after what is under way. Raises CheckpointFailed."""
        if not self._active:
            return
        self._drain()
        if self._committed is not None and self._committed.step == self._state.step:
            return
        save = self._take(is_best)
        for attempt in range(1, FINAL_TRIES + 1):
            error = self._write(save)
            if error is None:
                self._copies.release(save.copy)
                return
            if attempt < FINAL_TRIES:
                time.sleep(RETRY_S)
        raise CheckpointFailed(
            f"the checkpoint of step {save.copy.step} could not be committed in {FINAL_TRIES} tries: {error}"
        ) from error

    def newest_committed(self, already_reported: int) -> int:
        """Step of the newest checkpoint committed by this attempt, when later than ``already_reported``; else 0."""
        committed = self._committed
        return committed.step if committed is not None and committed.step > already_reported else 0

    def metrics_of_newest(self) -> dict[str, float]:
        return dict(self._committed.metrics) if self._committed else {}

    def close(self) -> None:
        """Take no more; a save under way is left to its thread, which dies with the process."""
        with self._lock:
            self._closed = True
            self._waiting = None
            self._lock.notify_all()

    def _is_due(self) -> bool:
        checkpoint, step = self._ctx.spec.checkpoint, self._state.step
        by_step = checkpoint.every_steps is not None and step % checkpoint.every_steps == 0
        by_time = checkpoint.every_s is not None and time.monotonic() - self._saved_at >= checkpoint.every_s
        return (by_step or by_time) and step != self._saved_step

    def _take(self, is_best: bool) -> Save:
        copy = self._copies.take()
        self._saved_at, self._saved_step = time.monotonic(), copy.step
        best = self._state.best
        return Save(copy, is_best, best.checkpoint if best else None)

    def _drain(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._waiting is None and not self._writing)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._writing = False
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._waiting is not None or self._closed)
                if self._waiting is None:
                    return
                save, self._waiting, self._writing = self._waiting, None, True
            self._write(save)
            self._copies.release(save.copy)

    def _write(self, save: Save) -> Exception | None:
        """Write, commit, report, and delete what retention lets go; the error when it was not committed."""
        ctx, began = self._ctx, time.perf_counter()
        try:
            manifest = self._commit(save)
        except CheckpointExists as exc:
            self._committed = self._store.manifest(exc.name)
            return None
        except Exception as exc:
            logger.exception("the checkpoint of step %d was not committed; training goes on", save.copy.step)
            ctx.journal.emit(EventKind.CHECKPOINT_FAILED, {"step": save.copy.step, "error": f"{type(exc).__name__}: {exc}"})
            return exc
        self._committed = manifest
        ctx.journal.emit(
            EventKind.CHECKPOINT_COMMITTED,
            {
                "step": manifest.step,
                "epoch": manifest.epoch,
                "name": manifest.name,
                "size_bytes": manifest.size_bytes,
                "digest": manifest.digest,
                "metrics": manifest.metrics,
                "stall_s": round(save.copy.stall_s, 6),
                "write_s": round(time.perf_counter() - began, 6),
            },
        )
        self._retain(save)
        return None

    def _commit(self, save: Save) -> Manifest:
        ctx, state = self._ctx, dict(save.copy.state)
        model, ema = state.pop("model"), state.pop("ema")
        with self._store.begin(save.copy.step, ctx.submission) as writer:
            files = {MODEL_FILE: model, STATE_FILE: state}
            if ema is not None:
                files[EMA_FILE] = {**model, **ema}
            for name, content in files.items():
                with writer.write_file(name) as file:
                    torch.save(content, cast(IO[bytes], file))
                if name != STATE_FILE and ctx.spec.checkpoint.safetensors:
                    with writer.write_file(safetensors_name(name)) as file:
                        write_safetensors(content, cast(IO[bytes], file))
            return writer.commit(
                epoch=save.copy.epoch,
                attempt=ctx.attempt,
                parent=state["parent"],
                world_size=ctx.world_size,
                sample_digest=state["ledger"]["chain"],
                metrics=state["metrics"],
            )

    def _retain(self, save: Save) -> None:
        try:
            deleted = self._store.retain(self._ctx.spec.checkpoint.keep_latest, save.best, self._ctx.submission)
        except StorageError:
            logger.exception("old checkpoints could not be deleted; the next save tries again")
            return
        for name in deleted:
            parsed = CheckpointName.parse(name)
            assert parsed is not None
            self._ctx.journal.emit(EventKind.CHECKPOINT_DELETED, {"step": parsed.step, "name": name})
