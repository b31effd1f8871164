"""Stream a checkpoint as an uncompressed tar file, in constant memory, verified as it passes.

Its bytes depend only on the manifest, so an interrupted download resumes at the byte where it
stopped.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from storage.checkpoints.manifest import MANIFEST, Manifest, new_hash
from storage.errors import CorruptCheckpoint, mapped
from storage.files.protocol import Files

_BLOCK_BYTES = 1 << 20

Blocks = Callable[[str, int], Iterator[bytes]]
"""(relative path of a file, offset) -> its bytes from there."""


@dataclass(frozen=True)
class _Part:
    """A part of the archive; ``read`` returns its bytes from an offset within it."""

    size_bytes: int
    read: Callable[[int], Iterator[bytes]]


class Archive:
    """``manifest.json``, then every file, at the archive's root.

    Args:
        blocks: returns a file's bytes from an offset, verified if that is 0. If it raises, the
            stream ends.
    """

    def __init__(self, manifest: Manifest, blocks: Blocks) -> None:
        self.manifest = manifest
        self._parts = list(_parts(manifest, blocks))
        self.size_bytes = sum(part.size_bytes for part in self._parts)

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the bytes from ``start`` to ``stop`` (exclusive; None is the end).

        A file that is only partly in that range is not compared with its digest; the client that
        joins the parts does that.
        """
        stop = self.size_bytes if stop is None else max(start, min(stop, self.size_bytes))
        begin = 0
        for part in self._parts:
            end = begin + part.size_bytes
            if end > start and begin < stop:
                place = max(begin, start)
                for block in filter(None, part.read(place - begin)):
                    yield block[: stop - place]
                    place += len(block)
                    if place >= stop and stop < end:
                        # a whole file is read to its end, where its digest is compared
                        break
            begin = end


def _parts(manifest: Manifest, blocks: Blocks) -> Iterator[_Part]:
    data = manifest.to_bytes()
    yield _literal(_header(manifest, MANIFEST, len(data)) + data + _padding(len(data)))
    for relpath, entry in sorted(manifest.files.items()):
        yield _literal(_header(manifest, relpath, entry.size_bytes))
        yield _file(relpath, entry.size_bytes, blocks)
        yield _literal(_padding(entry.size_bytes))
    yield _literal(bytes(2 * tarfile.BLOCKSIZE))


def _literal(data: bytes) -> _Part:
    return _Part(len(data), lambda offset: iter((data[offset:],)))


def _file(relpath: str, size_bytes: int, blocks: Blocks) -> _Part:
    return _Part(size_bytes, lambda offset: blocks(relpath, offset))


def file_blocks(
    files: Files, directory: str, manifest: Manifest, relpath: str, offset: int = 0
) -> Iterator[bytes]:
    """Yield a file's bytes from ``offset`` in blocks, never more than the manifest states.

    Raises CorruptCheckpoint, at the latest after the last block, if the size differs or, with
    ``offset`` 0, the digest.
    """
    entry = manifest.files[relpath]
    path = f"{directory}/{relpath}"
    hashed, size_bytes = new_hash(), offset
    with files.open_read(path, offset) as stream:
        while True:
            with mapped("read", files.path(path)):
                block = stream.read(_BLOCK_BYTES)
            if not block:
                break
            if not offset:
                hashed.update(block)
            size_bytes += len(block)
            if size_bytes > entry.size_bytes:
                raise CorruptCheckpoint(manifest.name, relpath, f"{entry.size_bytes} bytes", "more")
            yield block
    if size_bytes != entry.size_bytes:
        found = "fewer" if offset else f"{size_bytes} bytes"
        raise CorruptCheckpoint(manifest.name, relpath, f"{entry.size_bytes} bytes", found)
    if not offset and (found := hashed.hexdigest()) != entry.blake3:
        raise CorruptCheckpoint(manifest.name, relpath, f"blake3 {entry.blake3}", f"blake3 {found}")


def _header(manifest: Manifest, name: str, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size_bytes
    info.mode = 0o644
    info.mtime = int(manifest.created_at.timestamp())
    return info.tobuf(tarfile.PAX_FORMAT)


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % tarfile.BLOCKSIZE)
