"""Telling Ray Train of committed checkpoints beside training.

``ray.train.report`` waits until the controller has taken the report before, which may take seconds.
So a thread of each rank reports. All ranks hand over the same checkpoints in the same order, so
that they need not meet for it (``RankLaunch.meets_to_report``).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import ray.train

from storage.run_dir import RunDir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Report:
    name: str
    metrics: dict[str, float]


class CheckpointReports:
    """One rank's reports, in order. A report that fails costs Ray Train's knowledge of a
    checkpoint, and nothing else.

    Args:
        run_dir: Where the checkpoints lie: where Ray Train expects them, so that nothing is copied.
        on_report: Called on the thread with each report that waits for the controller to take it.
    """

    def __init__(self, run_dir: RunDir, on_report: Callable[[], None]) -> None:
        self._run_dir = run_dir
        self._on_report = on_report
        self._queue: queue.SimpleQueue[_Report | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoint-reports", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, name: str, metrics: dict[str, float]) -> None:
        """Report a checkpoint by its directory's name, soon. All ranks call this with the same in
        the same order."""
        self._queue.put(_Report(name, metrics))

    def close(self, timeout_s: float) -> bool:
        """Wait until all is reported; False where that took longer than ``timeout_s`` seconds."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (report := self._queue.get()) is not None:
            try:
                self._report(report)
                self._on_report()
            except Exception as exc:
                # the group is ending, or Ray has trouble: whoever trains will find out by itself
                logger.warning(
                    "Ray Train was not told of checkpoint %s: %s: %s",
                    report.name,
                    type(exc).__name__,
                    exc,
                )

    def _report(self, report: _Report) -> None:
        context = ray.train.get_context()
        storage = context.get_storage()
        # from the experiment's directory on
        path = "/".join(self._run_dir.checkpoints_path(report.name).rsplit("/", 2)[-2:])
        checkpoint = None
        if context.get_world_rank() == 0:
            checkpoint = ray.train.Checkpoint(
                storage.build_checkpoint_path_from_name(path), storage.storage_filesystem
            )
        ray.train.report(
            metrics=report.metrics,
            checkpoint=checkpoint,
            checkpoint_dir_name=path,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )
