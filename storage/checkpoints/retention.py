"""Retention: which checkpoints of a run to keep, and how to delete the others."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from everstep.spec import plain_text
from everstep.wire.events import EventKind
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.reader import (
    CheckpointReader,
    RestorePoint,
    best_of,
    in_lineage,
    named,
    restore_point,
)
from storage.checkpoints.writer import BEGUN, TRASH, put_back
from storage.claims import successor
from storage.errors import CorruptCheckpoint, CorruptFile, StorageError, StorageNotFound
from storage.logs.journal import journal_events, read_journal
from storage.run_dir import CheckpointName, Origin, RunDir

BestBy = tuple[str, Literal["min", "max"]]
"""Metric and mode by which a checkpoint is the best."""


class Retention:
    """Deletes checkpoints of one run that are no longer needed."""

    def __init__(
        self,
        reader: CheckpointReader,
        run_dir: RunDir,
        points: RestorePoints,
        rejected: Collection[str],
    ) -> None:
        self._reader = reader
        self._run_dir = run_dir
        self._points = points
        self._rejected = rejected
        """Checkpoints found to be corrupt; the caller adds to it."""
        self._known: dict[CheckpointName, Manifest] = {}
        """Manifests that were read or passed in; a manifest never changes."""
        self._holds: SeenHolds = {}

    def forget(self, name: CheckpointName) -> None:
        """Forget a checkpoint that is being written again."""
        self._known.pop(name, None)

    def retain(
        self,
        keep_latest: int,
        best: str | None,
        origin: Origin | None = None,
        written: Manifest | None = None,
        best_by: BestBy | None = None,
        proven_after: int = 0,
    ) -> list[str]:
        """Delete checkpoints that are no longer needed, and leftovers of dead writers. Return the
        names of deleted checkpoints, oldest first.

        Kept are: the ``keep_latest`` checkpoints of the lineage (at least one) that were committed
        last and are not known to be corrupt; ``written``; ``best``; those that other runs start
        from; and those with a hold (``CheckpointHold``). A corrupt one is deleted once all sound
        ones that are kept are newer. Only the process that saves may call this, between saves.

        Args:
            origin: submission and attempt of the caller. If a newer one has started, or starts
                meanwhile, nothing is deleted: it may resume from this very checkpoint.
            written: the checkpoint that the caller has just committed; it is not read back.
            best_by: metric and mode. The best existing checkpoint is kept too: ``best`` itself may
                never have been committed, if its rank died first.
            proven_after: steps after which a state's bits are known to be right. The newest
                checkpoint that is so much older than the newest one is kept too, and the one that
                will be it next; 0 for neither.
        """
        if origin is not None and any(newer > origin[0] for newer in self._run_dir.submissions()):
            return []
        if written is not None:
            self._known[_name_of(written)] = written
        entries = self._reader.entries()
        committed = self._read_committed(entries)
        if origin is not None:
            committed = {
                name: manifest for name, manifest in committed.items() if name.origin <= origin
            }
        lineage = self._lineage(committed, origin)
        if not lineage:
            return []
        kept = self._kept(lineage, keep_latest, best_by) | {best, written and written.name}
        if proven_after:
            kept |= _proven(lineage, self._rejected, proven_after)
        newest = _name_of(lineage[-1])
        counted = {manifest.name for manifest in lineage}
        doomed = [
            name
            for name in committed
            if str(name) not in kept and (str(name) in counted or self._is_past(name, newest))
        ]
        deleted = [
            str(name) for name in doomed if self._delete_unless_held(name, committed[name], origin)
        ]
        self._sweep(entries - set(map(str, committed)), newest)
        return deleted

    def _lineage(
        self, committed: Mapping[CheckpointName, Manifest | None], origin: Origin | None
    ) -> list[Manifest]:
        """Return the valid checkpoints of the committed lineage, oldest first."""
        # Once this attempt's start is known, so are all before it: read the journals once per
        # attempt, not with every save.
        points = self._points.found if origin in self._points.found else self._points.update()
        return [manifest for name in in_lineage(committed, points) if (manifest := committed[name])]

    def _kept(
        self, lineage: Sequence[Manifest], keep_latest: int, best_by: BestBy | None
    ) -> set[str | None]:
        """Return the names of the checkpoints in the lineage that must be kept."""
        listed = self._run_dir.kept()
        corrupt = {*self._rejected, *listed.corrupt}
        sound = [manifest for manifest in lineage if manifest.name not in corrupt] or lineage
        latest = sorted(sound, key=_commit_order)[-max(1, keep_latest) :]
        kept: set[str | None] = {*(manifest.name for manifest in latest), sound[-1].name}
        if best_by is not None and (best_there := best_of(sound, *best_by)):
            kept.add(best_there.name)
        kept |= {manifest.name for manifest in lineage if manifest.step in listed.steps}
        kept |= held_checkpoints(self._run_dir, self._holds)
        kept |= {
            each.name
            for each in lineage
            if each.name in corrupt and _commit_order(each) >= _commit_order(latest[0])
        }
        return kept

    def collect_orphans(self) -> list[str]:
        """Remove directories of a run that has ended which are not checkpoints. Return their names.

        No valid writer is left. A slow one finds its marker gone and cannot commit.
        """
        entries = self._reader.entries()
        rest = entries - {str(name) for name in self._reader.committed(entries)}
        orphans = sorted(name for name in rest if name.startswith(TRASH) or _unfinished(name))
        for name in orphans:
            self._clear(name)
        return orphans

    def _delete_unless_held(
        self, name: CheckpointName, manifest: Manifest | None, origin: Origin | None
    ) -> bool:
        """Delete a checkpoint and return True, unless a hold was taken or a newer attempt started
        since the listing: its reader may have found a valid manifest."""
        path = self._reader.manifest_path(name)
        self._run_dir.files.delete_file(path)
        if manifest is not None and (
            str(name) in held_checkpoints(self._run_dir, self._holds)
            or (origin is not None and successor(self._run_dir, origin) is not None)
        ):
            # restore the same bytes
            self._run_dir.files.write(path, manifest.to_bytes())
            return False
        self._run_dir.files.delete_dir(self._reader.directory(str(name)))
        return True

    def _sweep(self, names: Iterable[str], newest: CheckpointName) -> None:
        """Remove those of these directories that never became checkpoints and never will."""
        for each in names:
            name = _unfinished(each)
            if each.startswith(TRASH) or (name and self._is_past(name, newest)):
                self._clear(each)

    def _clear(self, entry: str) -> None:
        """Remove a directory that is not a checkpoint.

        If it was set aside but is a checkpoint, put it back: the process that set it aside died
        before it could.
        """
        path = self._run_dir.checkpoints_path(entry)
        if entry.startswith(TRASH) and put_back(
            self._run_dir, path, entry.removeprefix(TRASH).rpartition("-")[0]
        ):
            return
        self._run_dir.files.delete_dir(path)

    @staticmethod
    def _is_past(name: CheckpointName, newest: CheckpointName) -> bool:
        """Return whether no valid writer can still be writing it: steps of the newest attempt only
        increase."""
        return (name.origin, name.step) < (newest.origin, newest.step)

    def _read_committed(self, entries: Iterable[str]) -> dict[CheckpointName, Manifest | None]:
        """Return the committed checkpoints with their manifests; None for an invalid one. Each
        manifest is read once; later calls only check that it exists."""
        found: dict[CheckpointName, Manifest | None] = {}
        for name in named(entries):
            known = self._known.get(name)
            if known is not None and self._run_dir.files.exists(self._reader.manifest_path(name)):
                found[name] = known
                continue
            try:
                found[name] = self._reader.manifest(str(name))
            except CorruptCheckpoint:
                found[name] = None
            except StorageNotFound:
                continue
        self._known = {name: manifest for name, manifest in found.items() if manifest}
        return found


def _proven(lineage: Sequence[Manifest], corrupt: Collection[str], proven_after: int) -> set[str]:
    """Return the newest sound checkpoint that is ``proven_after`` steps older than the newest, and
    the oldest of those that are not yet."""
    proven_step = lineage[-1].step - proven_after
    sound = [each for each in lineage if each.name not in corrupt]
    proven = [each.name for each in sound if each.step <= proven_step]
    others = [each.name for each in sound if each.step > proven_step]
    return {*proven[-1:], *others[:1]}


def _name_of(manifest: Manifest) -> CheckpointName:
    name = CheckpointName.parse(manifest.name)
    assert name is not None
    return name


def _unfinished(entry: str) -> CheckpointName | None:
    """Return the name of the checkpoint that was started in a directory; None if there was none."""
    return CheckpointName.parse(
        entry.removeprefix(BEGUN).rpartition("-")[0] if entry.startswith(BEGUN) else entry
    )


def _commit_order(manifest: Manifest) -> tuple[int, int, int]:
    """Return a key that sorts checkpoints by the order of their commits.

    It uses no clock, since attempts may run on hosts with different ones. The step alone is not
    enough: an attempt that fell back past a corrupt checkpoint commits sound ones below its step.
    Within an attempt steps only increase.
    """
    return manifest.submission, manifest.attempt, manifest.step


# ---------------------------------------------------------------- holds

# Holds: renewable leases that keep retention from deleting a checkpoint while it is read.

HOLD_S = 300.0
"""A hold that was not renewed for this long has expired: its holder died."""
ACKNOWLEDGED_HOLD_S = 3600.0
"""For a run that was acknowledged: its service may be away before it has written what it needs."""
_RENEW_S = 60.0
_MAX_BYTES = 4096

SeenHolds = dict[str, tuple[bytes, float]]
"""By file name: content of a hold, and since when, by this process's monotonic clock."""


class CheckpointHold:
    """A reader's hold on a checkpoint. If the storage cannot store it (full, read-only), reading
    continues without."""

    def __init__(
        self,
        run_dir: RunDir,
        name: str,
        *,
        must_be_stored: bool = False,
        lasts_s: float = HOLD_S,
    ) -> None:
        """Take the hold at once: a checkpoint that exists afterwards stays. With
        ``must_be_stored``, raises StorageError if the storage cannot store it. Without a renewal it
        expires after ``lasts_s``."""
        self._files, self._lasts_s = run_dir.files, lasts_s
        self._path = run_dir.holds_path(f"{name}.{secrets.token_hex(6)}")
        self._renewed_at = float("-inf")
        self._num_renewals = 0
        if must_be_stored:
            self._write()
            self._renewed_at = time.monotonic()
        self.renew()

    def renew(self) -> None:
        """Renew the hold if due. Call it often while reading; most calls do nothing."""
        now = time.monotonic()
        if now - self._renewed_at >= _RENEW_S:
            self._renewed_at = now
            self._num_renewals += 1
            with suppress(StorageError):
                self._write()

    def _write(self) -> None:
        content = {
            "until": time.time() + self._lasts_s,
            "lasts_s": self._lasts_s,
            "renewals": self._num_renewals,
        }
        self._files.write(self._path, json.dumps(content).encode())

    def release(self) -> None:
        with suppress(StorageError):  # it expires by itself
            self._files.delete_file(self._path)


def held_checkpoints(run_dir: RunDir, seen: SeenHolds) -> set[str]:
    """Return the names of checkpoints with a hold, and delete expired holds. Raises StorageError.

    A hold expires when its file has not changed for so long by this process's monotonic clock.
    Reader and deleter are on different hosts, whose clocks may differ by more than that.

    Args:
        seen: state of the caller's earlier calls; updated here.
    """
    found: set[str] = set()
    before, now = dict(seen), time.monotonic()
    seen.clear()
    for entry in run_dir.files.list(run_dir.holds_path()):
        name = entry.name.rpartition(".")[0]
        path = run_dir.holds_path(entry.name)
        if CheckpointName.parse(name) is None:
            continue  # a hold that is being written
        try:
            content = run_dir.files.read(path, _MAX_BYTES)
        except StorageNotFound:
            continue  # released since it was listed
        except CorruptFile:
            content = b""  # a FIFO or the like
        known, since = before.get(entry.name, (content, now))
        if known != content:
            since = now
        if now - since < _lasts_s(content):
            found.add(name)
            seen[entry.name] = content, since
        else:
            run_dir.files.delete_file(path)
    return found


def _lasts_s(content: bytes) -> float:
    """Return for how long a hold lasts, an hour at most; 0 for what is none."""
    try:
        hold = plain_text.parse_json(content)
        float(hold["until"])
        return min(float(hold.get("lasts_s", HOLD_S)), ACKNOWLEDGED_HOLD_S)
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0.0


# ---------------------------------------------------------------- journal records

# What a run's journals record about checkpoints: where each attempt started, and what was
# committed.

_BATCH = 5000


class RestorePoints:
    """Where each attempt of a run started, by (submission, attempt). Attempts that never trained
    are left out."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._cursors: dict[int, str] = {}
        self.found: dict[Origin, RestorePoint] = {}

    def update(self) -> dict[Origin, RestorePoint]:
        """Read new events of all journals since the last call, and return all restore points.
        Raises StorageError."""
        for submission in self._run_dir.submissions():
            while True:
                cursor = self._cursors.get(submission)
                events, self._cursors[submission] = read_journal(
                    self._run_dir,
                    submission,
                    cursor,
                    _BATCH,
                    (EventKind.RESTORED,),
                    past_damage=True,
                )
                for event in events:
                    # the first one stays the first
                    self.found.setdefault((submission, event.attempt), restore_point(event.data))
                if not events:
                    break
        return self.found


def attempt_starts(run_dir: RunDir) -> dict[Origin, RestorePoint]:
    """Return where each attempt of the run started. Reads all journals."""
    return RestorePoints(run_dir).update()


def reported_checkpoints(run_dir: RunDir) -> set[CheckpointName]:
    """Return the checkpoints that the journals report as committed and not as deleted. A listing of
    the storage should contain them.

    Reads all journals. An older checkpoint may still be missing, if the process that deleted it
    died before it could report that.
    """
    kinds = (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_DELETED)
    reported: set[CheckpointName] = set()
    for event in journal_events(run_dir, kinds=kinds):
        name = CheckpointName.parse(str(event.data.get("name")))
        if name is not None and event.kind is EventKind.CHECKPOINT_COMMITTED:
            reported.add(name)
        elif name is not None:
            reported.discard(name)
    return reported
