"""A checkpoint as an uncompressed tar stream, made block by block in constant memory and verified as it passes."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator

from storage.errors import CorruptCheckpoint, mapped
from storage.files import Files
from storage.manifest import MANIFEST, Manifest

_BLOCK_BYTES = 1 << 20


def tar_stream(manifest: Manifest, blocks: Callable[[str], Iterator[bytes]]) -> Iterator[bytes]:
    """``manifest.json``, then every file, at the archive's root.

    Args:
        blocks: a file's verified bytes, by its relative path. Where it raises, the stream ends before the archive does.
    """
    yield from _member(manifest, MANIFEST, manifest.to_bytes())
    for relpath, entry in sorted(manifest.files.items()):
        yield _header(manifest, relpath, entry.size_bytes)
        yield from blocks(relpath)
        yield _padding(entry.size_bytes)
    yield bytes(2 * tarfile.BLOCKSIZE)


def verified_blocks(files: Files, directory: str, manifest: Manifest, relpath: str) -> Iterator[bytes]:
    """A file's bytes in blocks, never more than the manifest says. Raises CorruptCheckpoint, at the latest after the last."""
    entry = manifest.files[relpath]
    path = f"{directory}/{relpath}"
    digest, size_bytes = hashlib.sha256(), 0
    with files.open_read(path) as stream:
        while True:
            with mapped("read", files.path(path)):
                block = stream.read(_BLOCK_BYTES)
            if not block:
                break
            digest.update(block)
            size_bytes += len(block)
            if size_bytes > entry.size_bytes:
                raise CorruptCheckpoint(manifest.name, relpath, f"{entry.size_bytes} bytes", "more")
            yield block
    if size_bytes != entry.size_bytes:
        raise CorruptCheckpoint(manifest.name, relpath, f"{entry.size_bytes} bytes", f"{size_bytes} bytes")
    if digest.hexdigest() != entry.sha256:
        raise CorruptCheckpoint(manifest.name, relpath, f"sha256 {entry.sha256}", f"sha256 {digest.hexdigest()}")


def _member(manifest: Manifest, name: str, data: bytes) -> Iterator[bytes]:
    yield _header(manifest, name, len(data))
    yield data
    yield _padding(len(data))


def _header(manifest: Manifest, name: str, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size_bytes
    info.mode = 0o644
    info.mtime = int(manifest.created_at.timestamp())
    return info.tobuf(tarfile.PAX_FORMAT)


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % tarfile.BLOCKSIZE)
