"""Copy a storage's directory for a backup: regular files alone, through no link, and nothing that
its writers plant stops it."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from storage.errors import NotRegularFile
from storage.files.protocol import open_regular

_OWN_DIRECTORIES = frozenset({"runs", "code", "cluster"})
"""What Everstep itself makes at a storage's root: without one of these a copy would be no copy."""
_BLOCK_BYTES = 16 << 20
_MAX_LISTED = 100


class LinkedRoot(Exception):
    """A directory that Everstep needs is a link, and nobody said that it may be followed."""


@dataclass
class Skipped:
    """What was left out, and why."""

    num: int = 0
    first: list[str] = field(default_factory=list)
    """One sentence for each of the first of them."""

    def add(self, path: Path, why: str) -> None:
        self.num += 1
        if len(self.first) < _MAX_LISTED:
            self.first.append(f"{path}: {why}")


def copy_tree(source: Path, target: Path, follow: Collection[str] = ()) -> Skipped:
    """Copy every file as it is when its turn comes, without those that vanish meanwhile and drafts
    of atomic writes.

    Args:
        source: The storage's root.
        target: A new directory, or an empty one.
        follow: Names at the root that are links of the operator's, to another disk for instance. No
            other link is followed: whoever runs code beside the storage may have planted it.

    Raises LinkedRoot, OSError.
    """
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    skipped = Skipped()
    for top in sorted(source.iterdir()):
        linked = top.is_symlink()
        if linked and top.name not in follow:
            if top.name in _OWN_DIRECTORIES:
                words = f"if it is yours, give --follow {top.name}; else remove it"
                raise LinkedRoot(
                    f"{top} is a link to {top.readlink()}, which may lead anywhere; {words}"
                )
            skipped.add(top, "a link")
        elif top.is_dir():
            _copy_directory(top.resolve() if linked else top, target / top.name, skipped)
        else:
            parent = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _copy_file(parent, top, target / top.name, skipped)
            finally:
                os.close(parent)
    return skipped


def _copy_directory(root: Path, target: Path, skipped: Skipped) -> None:
    def unreadable(exc: OSError) -> None:
        if exc.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM):
            raise exc
        if exc.errno != errno.ENOENT:
            skipped.add(Path(str(exc.filename)), "not readable")

    # By descriptors: a directory that is exchanged for a link meanwhile leads nowhere.
    for place, directories, names, descriptor in os.fwalk(
        root, onerror=unreadable, follow_symlinks=False
    ):
        here = Path(place)
        for name in [name for name in directories if (here / name).is_symlink()]:
            directories.remove(name)
            skipped.add(here / name, "a link")
        # Last: else journals, copied after them, would tell of newer checkpoints than the copy has.
        directories.sort(key=lambda name: name == "checkpoints")
        there = target / here.relative_to(root)
        there.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in names:
            _copy_file(descriptor, here / name, there / name, skipped)
        sync(there)


def _copy_file(directory: int, source: Path, target: Path, skipped: Skipped) -> None:
    if source.name.startswith("."):
        return
    try:
        reader = open_regular(source.name, dir_fd=directory)
    except FileNotFoundError:
        return
    except NotRegularFile:
        skipped.add(source, "a link" if source.is_symlink() else "not a regular file")
        return
    except PermissionError:
        skipped.add(source, "not readable")
        return
    try:
        found = os.fstat(reader)
        writer = os.open(
            target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, found.st_mode & 0o777
        )
        try:
            _copy_data(reader, writer, found.st_size)
            os.utime(writer, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(writer)
        finally:
            os.close(writer)
    finally:
        os.close(reader)


def _copy_data(reader: int, writer: int, size_bytes: int) -> None:
    """Copy what a file holds, and not its holes: a sparse file costs its writer nothing, and its
    copy could fill the disk."""
    offset = 0
    while offset < size_bytes:
        try:
            begin = os.lseek(reader, offset, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # a hole up to the end
                break
            raise
        offset = min(os.lseek(reader, begin, os.SEEK_HOLE), size_bytes)
        while begin < offset and (
            block := os.pread(reader, min(_BLOCK_BYTES, offset - begin), begin)
        ):
            written = os.pwrite(writer, block, begin)
            begin += written
        if begin < offset:
            break  # it was cut meanwhile
    os.ftruncate(writer, min(size_bytes, os.fstat(reader).st_size))


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
