"""Ray Train's checkpoints: repair and shorten its list, record what a user's function reported, and
report those that Everstep's loop committed.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

import ray
import ray.train
from pyarrow.fs import LocalFileSystem

from everstep.spec import plain_text
from everstep.wire import base
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptFile, StorageError, StorageNotFound, StorageUnavailable
from storage.run_dir import CheckpointName, RunDir
from train_fn.ray_train.ray_internals import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME, ReportCallback

STEP_METRIC = "everstep_step"
"""Metric with the number of a report. Ray stores it with the checkpoint."""

_COPY = "checkpoint_list_copy.json"
_SHORT = 16
"""A list of fewer checkpoints is never shortened."""

logger = logging.getLogger(__name__)


class KeepCheckpointList(ReportCallback):  # type: ignore[misc]
    """Write a manifest of each checkpoint that a user's function reports, and copy Ray's list.

    Runs in the controller after Ray's own callback. Ray overwrites the list in place, so without a
    copy a crash meanwhile would make the function start again from the beginning.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def after_report(self, training_report: Any, metrics: Any) -> None:
        if training_report.checkpoint is None:
            return
        root, files = _root(self._run_dir), self._run_dir.files
        try:
            directory = f"{root}/{PurePosixPath(training_report.checkpoint.path).name}"
            step = int(training_report.metrics.get(STEP_METRIC, 0))
            write_manifest(
                self._run_dir,
                directory,
                step,
                [of_rank.get(PARTS_METRIC, {}) for of_rank in metrics],
            )
            files.write(
                f"{root}/{_COPY}", files.read(f"{root}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}")
            )
        except StorageError as exc:
            logger.warning(
                "a reported checkpoint could not be recorded; the next report retries: %s", exc
            )


class ListTrimmer:
    """Remove checkpoints from Ray's list that Everstep's retention has deleted. Ray does not know
    of these deletions, but it deletes by itself what a user's function reports.

    Args:
        run_dir: holds the checkpoints.
        manager: Ray's CheckpointManager, in the process of the controller.
    """

    def __init__(self, run_dir: RunDir, manager: Any) -> None:
        self._checkpoints, self._manager = CheckpointStore(run_dir), manager
        self._long = 0
        """Length of the list at which it is shortened next."""

    def trim(self) -> None:
        """Shorten the list if it has doubled since the last time, so that storage is rarely
        listed."""
        manager = self._manager
        results = manager._checkpoint_results
        if len(results) < max(_SHORT, self._long):
            return
        names = [
            CheckpointName.parse(PurePosixPath(result.checkpoint.path).name) for result in results
        ]
        try:
            gone = set(self._checkpoints.missing(filter(None, names)))
        except StorageError as exc:
            logger.warning(
                "Ray Train's checkpoint list could not be shortened; retrying later: %s", exc
            )
            gone = set()
        kept = [
            result
            for result, name in zip(results, names, strict=True)
            if str(name) not in gone or result is manager._latest_checkpoint_result
        ]
        manager._checkpoint_results = kept
        manager._checkpoint_to_report_index = {
            each.checkpoint: manager._checkpoint_to_report_index[each.checkpoint] for each in kept
        }
        self._long = 2 * len(kept)


def repair_snapshot_file(run_dir: RunDir) -> None:
    """Repair Ray's list if Ray could not load it: it is missing, torn, from another version of Ray,
    or names a checkpoint that is incomplete.

    Use the list, or else its copy, without incomplete checkpoints. If no checkpoint is left, delete
    the file. Everstep's own loop loses nothing by that: its ranks restore from manifests, never
    from Ray's list.
    """
    path, copy = (
        f"{_root(run_dir)}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}",
        f"{_root(run_dir)}/{_COPY}",
    )
    data, kept = _content(run_dir, path), _content(run_dir, copy)
    if data is None and kept is None:
        return
    problem = _problem(run_dir, data) if data is not None else "it is missing"
    if problem is None:
        return
    for candidate in (data, kept):
        whole = None if candidate is None else _of_whole_checkpoints(run_dir, candidate)
        if whole is not None:
            logger.warning("repaired Ray Train's checkpoint list: %s", problem)
            run_dir.files.write(path, whole)
            return
    logger.warning("deleted Ray Train's checkpoint list, so a new one begins: %s", problem)
    run_dir.files.delete_file(path)


def _content(run_dir: RunDir, path: str) -> bytes | None:
    """Return the bytes of a file; None if there is no such file."""
    try:
        return run_dir.files.read(path)
    except StorageNotFound:
        return None


def latest_reported(run_dir: RunDir) -> tuple[int, str | None]:
    """Return the newest checkpoint in Ray's list: the number of its report, and its name; (0, None)
    if there is none.

    Ray's own numbers also count reports that a restart repeated.
    """
    try:
        state: dict[str, Any] = json.loads(
            run_dir.files.read(f"{_root(run_dir)}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}")
        )
    except StorageNotFound:
        return 0, None
    latest = state.get("latest_checkpoint_result")
    if latest is None:
        return 0, None
    return int(latest["metrics"].get(STEP_METRIC, 0)), latest["checkpoint_dir_name"]


def rejected_reports(run_dir: RunDir) -> dict[str, str]:
    """Return the checkpoints that a user's function reported but must not resume from, newest
    first, with what each lacks. They are in the copy of Ray's list, but not in the list.

    Raise StorageUnavailable if nothing of any reported checkpoint exists. Then the storage may not
    be mounted, and a function must not start again from the beginning for that.
    """
    root = _root(run_dir)
    listed, copied = (
        _names(_content(run_dir, f"{root}/{each}"))
        for each in (CHECKPOINT_MANAGER_SNAPSHOT_FILENAME, _COPY)
    )
    rejected = {
        name: missing
        for name in copied[::-1]
        if name not in listed and (missing := _missing(run_dir, name)) is not None
    }
    if rejected and not listed and set(rejected.values()) == {ALL}:
        raise StorageUnavailable(
            f"run {run_dir.run_id} has reported {copied[-1]}, but {run_dir.uri} has no file of it "
            "or of any other checkpoint. Mount that storage or restore its files. To start from "
            "the beginning, submit the spec as a new run"
        )
    return {name: f"it lacks {missing}" for name, missing in rejected.items()}


def _names(data: bytes | None) -> list[str]:
    """Return the names of the checkpoints in a list of Ray's; none if it cannot be read."""
    try:
        return [
            result["checkpoint_dir_name"]
            for result in json.loads(data or b"{}").get("checkpoint_results", ())
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _problem(run_dir: RunDir, data: bytes) -> str | None:
    """Return why Ray could not load this list; None if it could."""
    try:
        state: dict[str, Any] = json.loads(data)
        if state["ray_version"] != ray.__version__:
            return f"it was written by ray {state['ray_version']}"
        names = [result["checkpoint_dir_name"] for result in state["checkpoint_results"]]
    except (ValueError, KeyError, TypeError) as exc:
        return f"it is torn ({exc})"
    for name in names:
        missing = _missing(run_dir, name)
        if missing is not None:
            return f"it names {name}, which lacks {missing}"
    return None


def _of_whole_checkpoints(run_dir: RunDir, data: bytes) -> bytes | None:
    """Return the list without incomplete checkpoints; None if it cannot be read, or if no
    checkpoint is left."""
    if _problem(run_dir, data) is None:
        return data
    try:
        state: dict[str, Any] = json.loads(data)
        if state["ray_version"] != ray.__version__:
            return None
        numbered = zip(state["checkpoint_results"], state["checkpoint_report_indices"], strict=True)
        whole = [
            (result, index)
            for result, index in numbered
            if _missing(run_dir, result["checkpoint_dir_name"]) is None
        ]
    except (ValueError, KeyError, TypeError):
        return None
    if not whole:
        return None
    state["checkpoint_results"] = [result for result, _ in whole]
    state["checkpoint_report_indices"] = [index for _, index in whole]
    state["latest_checkpoint_result"] = max(whole, key=itemgetter(1))[0]
    state |= {"pending_training_results": [], "pending_validation_specs": []}
    names = {result["checkpoint_dir_name"] for result, _ in whole}
    for field in (field for field in state if field.endswith("_checkpoint_dir_names")):
        state[field] = [name for name in state[field] if name in names]
    return json.dumps(state).encode()


def _missing(run_dir: RunDir, name: str) -> str | None:
    """Return what a checkpoint lacks, or None. Everstep's own exist once their manifest does. Those
    of a user's function are directories of files."""
    path = f"{_root(run_dir)}/{name}"
    if name.startswith("checkpoints/"):
        return None if run_dir.files.exists(f"{path}/manifest.json") else "its manifest"
    return what_is_missing(run_dir, path)


def _root(run_dir: RunDir) -> str:
    """Return the path of the run's directory for ``run_dir.files``. It is Ray Train's experiment
    directory."""
    return run_dir.checkpoints_path().rsplit("/", 1)[0]


# ---------------------------------------------------------------- user checkpoints

# Record the files of checkpoints that a user's function reports, and check later that all are
# there.
#
# Every rank may report a part, as in sharded saves, and names its files with the report. Once Ray
# has all parts, the controller writes the files' names, sizes and ranks into a manifest beside
# them. A run does not resume from a checkpoint that lacks a file.

PARTS_METRIC = "everstep_parts"
"""Metric name under which a rank sends its files to the controller."""
MANIFEST = "everstep_manifest.json"
SCHEMA_VERSION = 1
ALL = "all of it"
"""What is missing if the whole checkpoint is."""


def parts_of(checkpoint: Any) -> dict[str, int]:
    """Return the sizes in bytes of the files that a rank reports, by path; empty if they are not on
    a local file system."""
    if checkpoint is None or not isinstance(checkpoint.filesystem, LocalFileSystem):
        return {}
    root = Path(checkpoint.path)
    return {
        str(path.relative_to(root)): path.stat().st_size
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def write_manifest(
    run_dir: RunDir, directory: str, step: int, parts_by_rank: Sequence[dict[str, int]]
) -> None:
    """Write the manifest of all ranks' files into a complete reported checkpoint. Raise
    StorageError if that fails.

    If several ranks report a file with different sizes, the last write wins. The manifest then
    holds only its name.
    """
    files: dict[str, dict[str, int | None]] = {}
    for rank, parts in enumerate(parts_by_rank):
        for path, size_bytes in parts.items():
            known = files.setdefault(path, {"size_bytes": size_bytes, "rank": rank})
            if known["size_bytes"] != size_bytes:
                known["size_bytes"] = None
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "world_size": len(parts_by_rank),
        "files": files,
    }
    run_dir.files.write(
        f"{directory}/{MANIFEST}", json.dumps(manifest, indent=1, sort_keys=True).encode()
    )


def what_is_missing(run_dir: RunDir, directory: str) -> str | None:
    """Return what a reported checkpoint lacks; None if all files of its manifest are there, or if
    it has files but no manifest."""
    files = run_dir.files
    try:
        manifest = plain_text.parse_json(files.read(f"{directory}/{MANIFEST}"))
        parts = dict(manifest["files"])
        if odd := next((path for path in parts if base.fault_of(path)), None):
            raise ValueError(f"it names {odd[:200]!r}")
    except StorageNotFound:
        return None if files.list(directory) else ALL
    except (CorruptFile, ValueError, KeyError, TypeError, AttributeError) as exc:
        return f"a manifest that can be read ({exc})"
    for path, known in parts.items():
        if not _has_size(run_dir, f"{directory}/{path}", known["size_bytes"]):
            return f"{path} of rank {known['rank']}"
    return None


def _has_size(run_dir: RunDir, path: str, size_bytes: int | None) -> bool:
    """Return whether a file has this size. Only its last byte is read, and that no byte follows is
    checked, so no listing is needed."""
    if not size_bytes:
        return run_dir.files.exists(path)
    try:
        with run_dir.files.open_read(path, size_bytes - 1) as stream:
            return len(stream.read(2)) == 1
    except StorageNotFound:
        return False


# ---------------------------------------------------------------- checkpoint reports

# Report committed checkpoints to Ray Train in the background.
#
# ``ray.train.report`` waits until the controller has taken the previous report, which may take
# seconds. So each rank reports on a thread. All ranks add the same checkpoints in the same order,
# so reports need no synchronisation (``RankJob.calls_ray``).


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
        self._queue: queue.SimpleQueue[tuple[str, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoint-reports", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, name: str, metrics: dict[str, float]) -> None:
        """Queue the report of a checkpoint by its directory's name. All ranks call this with the
        same checkpoints in the same order."""
        self._queue.put((name, metrics))

    def close(self, timeout_s: float) -> bool:
        """Wait until all reports are sent. Return False after ``timeout_s`` seconds."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (report := self._queue.get()) is not None:
            try:
                self._report(*report)
                self._on_report()
            except Exception as exc:
                # The group is ending, or Ray fails. The training thread will notice by itself.
                logger.warning(
                    "checkpoint %s could not be reported to Ray Train: %s: %s",
                    report[0],
                    type(exc).__name__,
                    exc,
                )

    def _report(self, name: str, metrics: dict[str, float]) -> None:
        context = ray.train.get_context()
        storage = context.get_storage()
        # relative to the experiment's directory
        path = "/".join(self._run_dir.checkpoints_path(name).rsplit("/", 2)[-2:])
        checkpoint = None
        if context.get_world_rank() == 0:
            checkpoint = ray.train.Checkpoint(
                storage.build_checkpoint_path_from_name(path), storage.storage_filesystem
            )
        ray.train.report(
            metrics=metrics,
            checkpoint=checkpoint,
            checkpoint_dir_name=path,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )
