"""The checkpoints of a run: list them, read them verified, and delete old ones."""

from __future__ import annotations

import builtins
import io
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Literal, TypeVar, cast

from storage.checkpoints.holds import SeenHolds, held_checkpoints
from storage.checkpoints.journal_records import RestorePoints
from storage.checkpoints.lineage import best_of, in_lineage
from storage.checkpoints.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    parse_manifest,
)
from storage.checkpoints.tar_stream import Archive, file_blocks
from storage.checkpoints.verified_file import VerifiedFile
from storage.checkpoints.writer import BEGUN, TRASH, CheckpointWriter, begin_checkpoint, put_back
from storage.claims import successor
from storage.errors import (
    CorruptCheckpoint,
    CorruptFile,
    InvalidStorage,
    StorageNotFound,
    StorageUnavailable,
    StorageUnreadable,
)
from storage.files.protocol import Files
from storage.run_dir import CheckpointName, Origin, RunDir

T = TypeVar("T")


@dataclass(frozen=True)
class Rejected:
    """A committed checkpoint that cannot be trusted."""

    name: str
    problem: str


class CheckpointStore:
    """All checkpoints of one run. Picklable. Do not delete in one thread while another reads.

    A store remembers which checkpoints it found to be corrupt: code that restores and code that
    deletes share one store in a process.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._points = RestorePoints(run_dir)
        self._rejected: set[str] = set()
        """Checkpoints that this object found to be corrupt."""
        self._known: dict[CheckpointName, Manifest] = {}
        """What retention read or was given; nobody changes a manifest."""
        self._holds: SeenHolds = {}

    def __reduce__(self) -> tuple[object, ...]:
        return CheckpointStore, (self._run_dir,)

    def begin(self, step: int, submission: int, attempt: int) -> CheckpointWriter:
        """Begin to write ``step-STEP.sSUBMISSION.aATTEMPT``. Replace what an earlier writer left
        there unfinished or corrupt.

        Raises:
            CheckpointExists: it is committed and verifies. Its manifest names the writer.
        """
        name = CheckpointName(step, submission, attempt)

        def is_sound() -> bool:
            try:
                self.verify(str(name))
            except (CorruptCheckpoint, StorageNotFound):
                return False
            return True

        self._rejected.discard(str(name))
        self._known.pop(name, None)
        return begin_checkpoint(self._run_dir, name, is_sound)

    def list(self) -> builtins.list[Manifest]:
        """Return every checkpoint with a valid manifest, oldest first (step, submission, attempt).
        Their files are not read."""
        return self._manifests(_named(self._entries()))

    def lineage(self) -> builtins.list[Manifest]:
        """Return the checkpoints of ``list`` that count, oldest first: all but those that a newer
        attempt did not go on from."""
        return self._manifests(self._lineage_names())

    def newest_valid(self) -> tuple[Manifest | None, builtins.list[Rejected]]:
        """Return the newest checkpoint of the lineage that verifies, and the newer ones that do
        not. Every file is read back.

        Raises StorageError where the storage itself fails: that must not send a run back to an
        older checkpoint.
        """
        newest, _, rejected = self.read_newest(lambda manifest: self.verify(manifest.name))
        return newest, rejected

    def read_newest(
        self,
        read: Callable[[Manifest], T],
        told: Collection[CheckpointName] = (),
    ) -> tuple[Manifest | None, T | None, builtins.list[Rejected]]:
        """Return the newest checkpoint that verifies, what ``read`` made of it, and the newer ones
        that do not. Each file is read once.

        Args:
            read: raises CorruptCheckpoint if the checkpoint is not what its manifest says, as
                ``read_file`` does.
            told: checkpoints that must exist (``told_checkpoints``), listed or not. Missing ones
                are rejected like damaged ones.

        Raises:
            StorageUnavailable: all of ``told`` are missing and there is no other checkpoint. The
                storage has lost its content, and the run must not begin anew for that.
        """
        rejected: builtins.list[Rejected] = []
        num_missing = 0
        for name in reversed(self._lineage_names(told)):
            try:
                manifest = self.manifest(str(name))
                return manifest, read(manifest), rejected
            except StorageNotFound:
                if name in told:  # else it was deleted since it was listed
                    num_missing += 1
                    rejected.append(
                        Rejected(
                            str(name),
                            "the journal says it was committed, but it does not exist any more",
                        )
                    )
            except CorruptCheckpoint as exc:
                self._rejected.add(str(name))
                rejected.append(Rejected(str(name), str(exc)))
        if num_missing and num_missing == len(rejected):
            raise StorageUnavailable(
                f"run {self._run_dir.run_id} committed {rejected[0].name}, its journal says, but "
                f"{self._run_dir.uri} holds no checkpoint at all; mount or restore what is missing "
                "there. To begin again, submit the spec as a new run"
            )
        return None, None, rejected

    def manifest(self, name: str) -> Manifest:
        """Return a checkpoint's manifest. Raises StorageNotFound for no such checkpoint,
        CorruptCheckpoint for a manifest that is not valid."""
        path = f"{self._directory(name)}/{MANIFEST}"
        try:
            manifest = parse_manifest(self._files.read(path, MAX_MANIFEST_BYTES))
        except StorageNotFound as exc:
            raise StorageNotFound(
                f"run {self._run_dir.run_id} has no committed checkpoint {name}"
            ) from exc
        except (CorruptFile, StorageUnreadable) as exc:
            raise CorruptCheckpoint(name, MANIFEST, "a valid manifest", str(exc)) from exc
        if (manifest.name, manifest.run_id) != (name, self._run_dir.run_id):
            raise CorruptCheckpoint(
                name,
                MANIFEST,
                f"{name} of run {self._run_dir.run_id}",
                f"{manifest.name} of run {manifest.run_id}",
            )
        return manifest

    def verify(self, name: str, on_block: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Read back every file. Raises CorruptCheckpoint for the first that differs,
        StorageNotFound for no checkpoint.

        Args:
            on_block: called with the size of every block read. It may wait, to limit the rate, or
                raise, to stop.
        """
        manifest = self.manifest(name)
        for relpath in sorted(manifest.files):
            self._verify_file(manifest, relpath, on_block)

    def verify_file(self, name: str, relpath: str) -> None:
        """Read back one file of a checkpoint. Raises as ``verify``."""
        self._verify_file(self.manifest(name), relpath, lambda num_bytes: None)

    def read_file(self, name: str, relpath: str) -> bytes:
        """Return a file's bytes, verified. Raises CorruptCheckpoint, StorageNotFound."""
        manifest = self.manifest(name)
        if relpath not in manifest.files:
            raise StorageNotFound(
                f"checkpoint {name} has no file {relpath}; it has {sorted(manifest.files)}"
            )
        return b"".join(self._blocks(manifest, relpath))

    def load_file(self, name: str, relpath: str, load: Callable[[IO[bytes]], T]) -> T:
        """Return what ``load`` (such as torch.load) makes of a file, verified. Damage raises
        CorruptCheckpoint, also where it made ``load`` fail first.

        On a local filesystem ``load`` reads from the file straight into its own memory. If it did
        not read front to back, it is called again with a copy of the verified bytes, as on an
        object store.

        Raises CorruptCheckpoint, StorageNotFound, StorageError.
        """
        manifest = self.manifest(name)
        if self._run_dir.storage.is_local and relpath in manifest.files:
            with self._as_damage(manifest, relpath):
                stream = cast(
                    io.FileIO, self._files.open_read(f"{self._directory(name)}/{relpath}")
                )
                with VerifiedFile(stream, name, relpath, manifest.files[relpath]) as file:
                    found = load(cast(IO[bytes], file))
            if not file.came_back:
                return found
        return load(io.BytesIO(self.read_file(name, relpath)))

    def archive(self, name: str) -> Archive:
        """Return the checkpoint as a tar file, to be streamed in blocks that are verified as they
        pass.

        Raises StorageNotFound or CorruptCheckpoint at once for the manifest; CorruptCheckpoint in
        the stream for a file.
        """
        manifest = self.manifest(name)
        return Archive(manifest, partial(self._blocks, manifest))

    def path(self, name: str) -> str:
        """Return the checkpoint's directory as the filesystem names it."""
        return self._files.path(self._directory(name))

    def delete(self, name: str) -> None:
        """Delete a checkpoint, the manifest first: a crash leaves no checkpoint rather than half of
        one."""
        directory = self._directory(name)
        self._files.delete_file(f"{directory}/{MANIFEST}")
        self._files.delete_dir(directory)

    def damage(self, name: str) -> str:
        """Flip one byte of a checkpoint's smallest file, as a failing disk would: for drills.
        Return the file's relative path.

        Raises StorageNotFound, CorruptCheckpoint for one whose manifest is damaged already.
        """
        sizes = {
            relpath: entry.size_bytes
            for relpath, entry in self.manifest(name).files.items()
            if entry.size_bytes
        }
        relpath = min(sizes, key=lambda each: sizes[each])
        path = f"{self._directory(name)}/{relpath}"
        data = bytearray(self._files.read(path, sizes[relpath]))
        data[len(data) // 2] ^= 0xFF
        self._files.write(path, bytes(data))
        return relpath

    def retain(
        self,
        keep_latest: int,
        best: str | None,
        origin: Origin | None = None,
        written: Manifest | None = None,
        best_by: tuple[str, Literal["min", "max"]] | None = None,
    ) -> builtins.list[str]:
        """Delete checkpoints that need not be kept, and what dead writers left. Return the names of
        deleted checkpoints, oldest first.

        Kept are: the ``keep_latest`` of the lineage (at least one) that were committed last and are
        not known to be corrupt; ``written``; ``best``; those that other runs begin from; and those
        that are being read (``CheckpointHold``). A corrupt one goes once all sound ones that are
        kept are newer. Call it only from the one process that saves, between saves.

        Args:
            origin: submission and attempt of the caller. Where a newer one has begun, or begins
                meanwhile, nothing is deleted: it may go on from just this checkpoint.
            written: the checkpoint that the caller has just committed; it is not read back.
            best_by: metric and mode. The best checkpoint that exists is kept too: ``best`` itself
                may never have been committed, if its rank died first.
        """
        if origin is not None and any(newer > origin[0] for newer in self._run_dir.submissions()):
            return []
        if written is not None:
            self._known[_name_of(written)] = written
        entries = self._entries()
        committed = self._read_committed(entries)
        if origin is not None:
            committed = {
                name: manifest for name, manifest in committed.items() if name.origin <= origin
            }
        # Who has begun knows where all before it began: their journals are read once in an attempt,
        # not with every save.
        points = self._points.found if origin in self._points.found else self._points.update()
        lineage = [
            manifest for name in in_lineage(committed, points) if (manifest := committed[name])
        ]
        if not lineage:
            return []
        told = self._run_dir.kept()
        corrupt = self._rejected | told.corrupt
        sound = [manifest for manifest in lineage if manifest.name not in corrupt] or lineage
        latest = sorted(sound, key=_commit_order)[-max(1, keep_latest) :]
        kept = {manifest.name for manifest in latest} | {sound[-1].name, best}
        if written is not None:
            kept.add(written.name)
        if best_by is not None and (best_there := best_of(sound, *best_by)):
            kept.add(best_there.name)
        kept |= {manifest.name for manifest in lineage if manifest.step in told.steps}
        kept |= held_checkpoints(self._run_dir, self._holds)
        kept |= {
            each.name
            for each in lineage
            if each.name in corrupt and _commit_order(each) >= _commit_order(latest[0])
        }
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

    def missing(self, told: Iterable[CheckpointName]) -> builtins.list[str]:
        """Return which of these reported checkpoints do not exist, oldest first. One that is newer
        than all that exist is left out: it may not be listed yet."""
        there = set(self._committed(self._entries()))
        return [str(name) for name in sorted(set(told) - there) if there and name < max(there)]

    def collect_orphans(self) -> builtins.list[str]:
        """Remove directories of a run that has ended that are not checkpoints. Return their names.

        Nobody who counts writes there any more. A slow writer finds its marker gone and cannot
        commit.
        """
        entries = self._entries()
        rest = entries - {str(name) for name in self._committed(entries)}
        orphans = sorted(name for name in rest if name.startswith(TRASH) or _unfinished(name))
        for name in orphans:
            self._clear(name)
        return orphans

    def _delete_unless_held(
        self, name: CheckpointName, manifest: Manifest | None, origin: Origin | None
    ) -> bool:
        """Delete a checkpoint and return True, unless a hold was taken, or a newer attempt began,
        since the listing: its reader may have found a valid manifest."""
        path = self._manifest_path(name)
        self._files.delete_file(path)
        if manifest is not None and (
            str(name) in held_checkpoints(self._run_dir, self._holds) or self._is_replaced(origin)
        ):
            # the bytes that it was read from
            self._files.write(path, manifest.to_bytes())
            return False
        self._files.delete_dir(self._directory(str(name)))
        return True

    def _is_replaced(self, origin: Origin | None) -> bool:
        return origin is not None and successor(self._run_dir, origin) is not None

    def _sweep(self, names: Iterable[str], newest: CheckpointName) -> None:
        """Remove those of these directories that never became checkpoints and never will."""
        for each in names:
            name = _unfinished(each)
            if each.startswith(TRASH) or (name and self._is_past(name, newest)):
                self._clear(each)

    def _clear(self, entry: str) -> None:
        """Remove a directory that is not a checkpoint. One that was set aside and is a checkpoint
        after all is put back: the process that set it aside died before it could."""
        path = self._run_dir.checkpoints_path(entry)
        if entry.startswith(TRASH) and put_back(
            self._run_dir, path, entry.removeprefix(TRASH).rpartition("-")[0]
        ):
            return
        self._files.delete_dir(path)

    @staticmethod
    def _is_past(name: CheckpointName, newest: CheckpointName) -> bool:
        """Return whether no writer that counts can still be writing it: the newest attempt's steps
        only rise."""
        return (name.origin, name.step) < (newest.origin, newest.step)

    def _lineage_names(
        self, told: Collection[CheckpointName] = ()
    ) -> builtins.list[CheckpointName]:
        names = {*self._committed(self._entries()), *told}
        return in_lineage(names, self._points.update())

    def _entries(self) -> set[str]:
        """Return the names in the directory of checkpoints."""
        return {entry.name for entry in self._files.list(self._run_dir.checkpoints_path())}

    def _committed(self, entries: Iterable[str]) -> builtins.list[CheckpointName]:
        """Return the names of directories with a manifest, valid or not, oldest first."""
        return [name for name in _named(entries) if self._files.exists(self._manifest_path(name))]

    def _read_committed(self, entries: Iterable[str]) -> dict[CheckpointName, Manifest | None]:
        """Return as ``_committed``, with their manifests; None for one that is not valid. Each
        manifest is read once; later calls only check that it exists."""
        found: dict[CheckpointName, Manifest | None] = {}
        for name in _named(entries):
            known = self._known.get(name)
            if known is not None and self._files.exists(self._manifest_path(name)):
                found[name] = known
                continue
            try:
                found[name] = self.manifest(str(name))
            except CorruptCheckpoint:
                found[name] = None
            except StorageNotFound:
                continue
        self._known = {name: manifest for name, manifest in found.items() if manifest}
        return found

    def _manifests(self, names: builtins.list[CheckpointName]) -> builtins.list[Manifest]:
        found: builtins.list[Manifest] = []
        for name in names:
            try:
                found.append(self.manifest(str(name)))
            except (CorruptCheckpoint, StorageNotFound):
                continue  # newest_valid() reports it; or it was deleted since it was listed
        return found

    def _verify_file(
        self, manifest: Manifest, relpath: str, on_block: Callable[[int], None]
    ) -> None:
        for block in self._blocks(manifest, relpath):
            on_block(len(block))

    def _blocks(self, manifest: Manifest, relpath: str, offset: int = 0) -> Iterator[bytes]:
        """Yield as ``file_blocks``, with a missing or unreadable file reported as damage."""
        with self._as_damage(manifest, relpath):
            yield from file_blocks(
                self._files, self._directory(manifest.name), manifest, relpath, offset
            )

    @contextmanager
    def _as_damage(self, manifest: Manifest, relpath: str) -> Iterator[None]:
        """Raise CorruptCheckpoint for a file that is missing or unreadable; StorageNotFound where
        the whole checkpoint was deleted."""
        entry = manifest.files[relpath]
        try:
            yield
        except StorageNotFound as exc:
            self.manifest(manifest.name)  # deleted while it was read: says so
            raise CorruptCheckpoint(
                manifest.name, relpath, f"{entry.size_bytes} bytes", "no file"
            ) from exc
        except (CorruptFile, StorageUnreadable) as exc:
            raise CorruptCheckpoint(
                manifest.name, relpath, f"{entry.size_bytes} bytes", str(exc)
            ) from exc

    def _manifest_path(self, name: CheckpointName) -> str:
        return f"{self._run_dir.checkpoints_path(str(name))}/{MANIFEST}"

    def _directory(self, name: str) -> str:
        if CheckpointName.parse(name) is None:
            raise InvalidStorage(
                f"{name!r} is not a checkpoint's name, such as {CheckpointName(150, 2, 3)}"
            )
        return self._run_dir.checkpoints_path(name)

    @property
    def _files(self) -> Files:
        return self._run_dir.files


def _name_of(manifest: Manifest) -> CheckpointName:
    name = CheckpointName.parse(manifest.name)
    assert name is not None
    return name


def _unfinished(entry: str) -> CheckpointName | None:
    """Return the name of the checkpoint that was begun in a directory; None where none was."""
    return CheckpointName.parse(
        entry.removeprefix(BEGUN).rpartition("-")[0] if entry.startswith(BEGUN) else entry
    )


def _named(entries: Iterable[str]) -> list[CheckpointName]:
    """Return those of these directories that are named as checkpoints, oldest first."""
    return sorted(filter(None, map(CheckpointName.parse, entries)))


def _commit_order(manifest: Manifest) -> tuple[int, int, int]:
    """Return a key that sorts checkpoints by the order of their commits.

    It uses no clock, since attempts may run on hosts with different ones. The step alone would not
    do: an attempt that fell back past a corrupt checkpoint commits sound ones below its step.
    Within an attempt steps only rise.
    """
    return manifest.submission, manifest.attempt, manifest.step
