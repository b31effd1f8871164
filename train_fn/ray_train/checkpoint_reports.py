"""Report committed checkpoints to Ray Train in the background.

``ray.train.report`` waits until the controller has taken the previous report, which may take
seconds. So each rank reports on a thread. All ranks add the same checkpoints in the same order, so
reports need no synchronisation (``RankLaunch.meets_to_report``).
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
    """Send one rank's reports in order. If a report fails, Ray Train does not learn of that
    checkpoint, and nothing else is lost.

    Args:
        run_dir: holds the checkpoints where Ray Train expects them, so that nothing is copied.
        on_report: called on the thread after each report, which then waits for the controller.
    """

    def __init__(self, run_dir: RunDir, on_report: Callable[[], None]) -> None:
        self._run_dir = run_dir
        self._on_report = on_report
        self._queue: queue.SimpleQueue[_Report | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoint-reports", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, name: str, metrics: dict[str, float]) -> None:
        """Queue the report of a checkpoint by its directory's name. All ranks call this with the
        same checkpoints in the same order."""
        self._queue.put(_Report(name, metrics))

    def close(self, timeout_s: float) -> bool:
        """Wait until all reports are sent. Return False after ``timeout_s`` seconds."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (report := self._queue.get()) is not None:
            try:
                self._report(report)
                self._on_report()
            except Exception as exc:
                # The group is ending, or Ray fails. The training thread will notice by itself.
                logger.warning(
                    "checkpoint %s could not be reported to Ray Train: %s: %s",
                    report.name,
                    type(exc).__name__,
                    exc,
                )

    def _report(self, report: _Report) -> None:
        context = ray.train.get_context()
        storage = context.get_storage()
        # relative to the experiment's directory
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
