"""Read the checkpoints of a run: every file is verified as it is read."""

from __future__ import annotations

import builtins
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, TypeVar, cast

from storage.checkpoints.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, parse_manifest
from storage.checkpoints.tar_stream import Archive, file_blocks
from storage.checkpoints.verified_file import VerifiedFile
from storage.errors import (
    CorruptCheckpoint,
    CorruptFile,
    InvalidStorage,
    StorageNotFound,
    StorageUnreadable,
)
from storage.files.protocol import Files
from storage.run_dir import RunDir
from storage.run_names import CheckpointName

T = TypeVar("T")


class CheckpointReader:
    """Reads the checkpoints of one run by name."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def manifest(self, name: str) -> Manifest:
        """Return a checkpoint's manifest. Raises StorageNotFound if there is no such checkpoint,
        CorruptCheckpoint if its manifest is invalid."""
        path = f"{self.directory(name)}/{MANIFEST}"
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
        StorageNotFound.

        Args:
            on_block: called with the size of every block read. It may block, to limit the rate, or
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
        """Return the result of ``load`` (such as torch.load) for a file, verified. Damage raises
        CorruptCheckpoint, even if it made ``load`` fail first.

        On a local filesystem ``load`` reads straight from the file. If it does not read front to
        back, it is called again with a verified copy, as on an object store.

        Raises CorruptCheckpoint, StorageNotFound, StorageError.
        """
        manifest = self.manifest(name)
        if self._run_dir.storage.is_local and relpath in manifest.files:
            with self._as_damage(manifest, relpath):
                stream = cast(io.FileIO, self._files.open_read(f"{self.directory(name)}/{relpath}"))
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
        """Return the checkpoint's directory in the filesystem's own form."""
        return self._files.path(self.directory(name))

    def entries(self) -> set[str]:
        """Return the names in the directory of checkpoints."""
        return {entry.name for entry in self._files.list(self._run_dir.checkpoints_path())}

    def committed(self, entries: Iterable[str]) -> builtins.list[CheckpointName]:
        """Return the names of directories that have a manifest, valid or not, oldest first."""
        return [name for name in named(entries) if self._files.exists(self.manifest_path(name))]

    def _verify_file(
        self, manifest: Manifest, relpath: str, on_block: Callable[[int], None]
    ) -> None:
        for block in self._blocks(manifest, relpath):
            on_block(len(block))

    def _blocks(self, manifest: Manifest, relpath: str, offset: int = 0) -> Iterator[bytes]:
        """Yield blocks as ``file_blocks``; a missing or unreadable file raises
        CorruptCheckpoint."""
        with self._as_damage(manifest, relpath):
            yield from file_blocks(
                self._files, self.directory(manifest.name), manifest, relpath, offset
            )

    @contextmanager
    def _as_damage(self, manifest: Manifest, relpath: str) -> Iterator[None]:
        """Raise CorruptCheckpoint for a file that is missing or unreadable; StorageNotFound if the
        whole checkpoint was deleted."""
        entry = manifest.files[relpath]
        try:
            yield
        except StorageNotFound as exc:
            self.manifest(manifest.name)  # raises StorageNotFound if deleted while it was read
            raise CorruptCheckpoint(
                manifest.name, relpath, f"{entry.size_bytes} bytes", "no file"
            ) from exc
        except (CorruptFile, StorageUnreadable) as exc:
            raise CorruptCheckpoint(
                manifest.name, relpath, f"{entry.size_bytes} bytes", str(exc)
            ) from exc

    def manifest_path(self, name: CheckpointName) -> str:
        """Return the path of a checkpoint's manifest below the storage."""
        return f"{self._run_dir.checkpoints_path(str(name))}/{MANIFEST}"

    def directory(self, name: str) -> str:
        """Return a checkpoint's directory below the storage. Raises InvalidStorage."""
        if CheckpointName.parse(name) is None:
            raise InvalidStorage(
                f"{name!r} is not a checkpoint name; use a name such as {CheckpointName(150, 2, 3)}"
            )
        return self._run_dir.checkpoints_path(name)

    @property
    def _files(self) -> Files:
        return self._run_dir.files


def named(entries: Iterable[str]) -> list[CheckpointName]:
    """Return those of these directories that have a checkpoint's name, oldest first."""
    return sorted(filter(None, map(CheckpointName.parse, entries)))
