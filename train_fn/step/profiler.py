"""Record a few steps of this rank with torch's profiler, when a user requests it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from everstep.wire.events import EventKind
from storage.errors import StorageError
from storage.run_control import ProfileOrder
from train_fn.context import WorkerContext
from train_fn.step import trace_file

WRITE_S = 60.0
"""Longest wait at a run's end for a trace that is being written."""
_PREPARE_S = 300.0
_CHUNK_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class StepProfiler:
    """Record steps that a user requested. Called between two steps.

    Without a request it only reads the journal's last reply. It exchanges nothing with other ranks,
    and changes no result.
    """

    def __init__(self, ctx: WorkerContext, bucket_sizes: Callable[[], Sequence[int]]) -> None:
        """``bucket_sizes`` gives the bytes of DDP's gradient buckets, in the order in which
        backward fills them."""
        self._ctx = ctx
        self._bucket_sizes = bucket_sizes
        self._taken: str | None = None
        self._order: ProfileOrder | None = None
        self._profile: profile | None = None
        self._step_mark: Any = None
        self._steps_left = 0
        self._writing: threading.Thread | None = None

    def boundary(self, step: int) -> None:
        """Note that ``step`` steps are done, and another one begins."""
        if self._profile is not None:
            self._end_step()
            if self._steps_left:
                self._begin_step(step + 1)
            else:
                self._keep()
            return
        order = self._ctx.profile_ordered()
        if order is not None and order.id != self._taken:
            self._taken = order.id
            if (order.rank, order.attempt) == (self._ctx.world_rank, self._ctx.attempt):
                self._begin(order, step + 1)

    def close(self) -> None:
        """Keep what was recorded, since no further step follows."""
        if self._profile is not None:
            self._end_step()
            self._keep()
        if self._writing is not None:
            self._writing.join(WRITE_S)

    def give_up(self) -> None:
        """Drop the trace of a failed attempt, whose rank exits at once."""
        if self._profile is None or self._order is None:
            return
        recorded, self._profile = self._profile, None
        try:
            self._end_step()
            recorded.stop()
        except Exception as exc:
            logger.warning("the profiler could not be stopped: %s", exc)
        self._failed(self._order, "the attempt failed while the steps were recorded")

    def _begin(self, order: ProfileOrder, step: int) -> None:
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if self._ctx.device.type == "cuda" else []),
        ]
        recorded = profile(activities=activities, record_shapes=True)
        try:
            recorded.start()
        except Exception as exc:  # another profiler of the user's own runs, say
            self._failed(order, f"torch's profiler did not start: {type(exc).__name__}: {exc}")
            return
        self._order, self._profile, self._steps_left = order, recorded, order.steps
        self._ctx.journal.emit(
            EventKind.PROFILE_STARTED, {"id": order.id, "rank": order.rank, "step": step}
        )
        self._begin_step(step)

    def _begin_step(self, step: int) -> None:
        self._steps_left -= 1
        self._step_mark = record_function(f"{trace_file.STEP} {step}")
        self._step_mark.__enter__()

    def _end_step(self) -> None:
        mark, self._step_mark = self._step_mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _keep(self) -> None:
        """Stop recording, and have a thread write the trace: the peers wait for this rank."""
        order, recorded = self._order, self._profile
        assert order is not None and recorded is not None
        self._order = self._profile = None
        if self._ctx.device.type == "cuda":
            torch.cuda.synchronize()  # kernels of the last step, that it is in the trace
        recorded.stop()
        sizes = [int(size) for size in self._bucket_sizes()]
        self._writing = threading.Thread(
            target=self._write, args=(order, recorded, sizes), name="profile", daemon=True
        )
        self._writing.start()

    def _write(self, order: ProfileOrder, recorded: profile, sizes: Sequence[int]) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="everstep-profile-") as directory:
                raw, ready = Path(directory, "raw.json"), Path(directory, "trace.json.gz")
                recorded.export_chrome_trace(str(raw))
                summary = _prepared(raw, ready, sizes)
                self._upload(order, ready)
                size_bytes = ready.stat().st_size
        except Exception as exc:
            logger.exception("the profile %s could not be kept", order.id)
            self._failed(order, f"{type(exc).__name__}: {exc}")
            return
        self._ctx.journal.emit(
            EventKind.PROFILE_DONE,
            {"id": order.id, "rank": order.rank, "size_bytes": size_bytes, **summary},
        )

    def _upload(self, order: ProfileOrder, ready: Path) -> None:
        files, path = self._ctx.run_dir.files, self._ctx.run_dir.trace_path(order.id)
        stream = files.create(path)
        try:
            with ready.open("rb") as source:
                while chunk := source.read(_CHUNK_BYTES):
                    stream.write(chunk)
            stream.close()
        except BaseException:
            with suppress(StorageError):
                files.delete_file(path)
            raise

    def _failed(self, order: ProfileOrder, problem: str) -> None:
        self._order = None
        self._ctx.journal.emit(
            EventKind.PROFILE_FAILED, {"id": order.id, "rank": order.rank, "problem": problem}
        )


def _prepared(raw: Path, ready: Path, sizes: Sequence[int]) -> dict[str, Any]:
    """Name, pack and sum up the trace in a process of its own: reading megabytes of JSON here would
    delay training. Return the summary."""
    command = [sys.executable, "-I", trace_file.__file__, str(raw), str(ready), *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PREPARE_S, check=False)
    if done.returncode:
        raise RuntimeError(
            (done.stderr.strip().splitlines() or ["the trace could not be prepared"])[-1]
        )
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary
