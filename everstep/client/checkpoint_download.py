"""Write a checkpoint's tar stream to disk: only verified files, only in the target, all or
nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from blake3 import blake3

from everstep.errors import CorruptDownload, UsageError
from everstep.wire.relative_names import fault_of

MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 256 << 20


class _ChunkReader:
    """A file object over an iterator of bytes, for tarfile's stream mode."""

    def __init__(self, chunks: Iterator[bytes], on_bytes: Callable[[int], None]) -> None:
        self._chunks = chunks
        self._on_bytes = on_bytes
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        parts = list[bytes]()
        missing = size
        while missing > 0:
            if not self._rest:
                chunk = next(self._chunks, None)
                if chunk is None:
                    break
                self._on_bytes(len(chunk))
                self._rest = memoryview(chunk)
            parts.append(bytes(self._rest[:missing]))
            self._rest = self._rest[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)


def receive_checkpoint(
    chunks: Iterator[bytes], target: Path, digest: str | None, on_bytes: Callable[[int], None]
) -> None:
    """Write a checkpoint's archive to ``target``. Verify that it contains exactly the manifest's
    files, with their sizes and digests.

    Files appear in ``target`` only after all are verified. A new directory is moved into place at
    once. In an existing directory, files of the same names are replaced, ``manifest.json`` last.
    Temporary files go inside an existing target: it may be a volume, and the only writable place.

    Args:
        chunks: an uncompressed tar stream.
        digest: SHA-256 of the manifest as the service stated it; None trusts the manifest.
        on_bytes: called with the size of every chunk.

    Raises CorruptDownload, UsageError if the target is not a directory, and OSError if it cannot be
    written.
    """
    target = target.expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; name a directory for the checkpoint")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target if target.exists() else target.parent
    with tempfile.TemporaryDirectory(prefix=f".{target.name[:64]}.partial-", dir=beside) as scratch:
        staged = Path(scratch) / "checkpoint"
        staged.mkdir()
        found = _extract(chunks, staged, on_bytes)
        _verify(staged, found, digest)
        _put_in_place(staged, target)


def _extract(
    chunks: Iterator[bytes], staged: Path, on_bytes: Callable[[int], None]
) -> dict[str, tuple[int, str]]:
    """Return size and BLAKE3 of every file, hashed while it is written."""
    found: dict[str, tuple[int, str]] = {}
    reader = _ChunkReader(chunks, on_bytes)
    with _tar_errors(), tarfile.open(fileobj=cast(IO[bytes], reader), mode="r|") as archive:
        for member in archive:
            if member.isdir():
                continue
            name = _safe_name(member)
            if name in found:
                raise CorruptDownload(f"the archive contains {name} twice; download it again")
            content = archive.extractfile(member)
            assert content is not None  # _safe_name let only regular files pass
            path = staged / name
            path.parent.mkdir(parents=True, exist_ok=True)
            hashed, size_bytes = blake3(), 0
            with path.open("xb") as file:
                while block := content.read(_BLOCK_BYTES):
                    hashed.update(block)
                    size_bytes += len(block)
                    file.write(block)
            found[name] = (size_bytes, hashed.hexdigest())
        for _ in iter(lambda: reader.read(_BLOCK_BYTES), b""):
            pass  # read to the end: the connection may still break in the padding
    return found


def _safe_name(member: tarfile.TarInfo) -> str:
    """Return the member's path if it is a regular file below the archive's root. Raise
    CorruptDownload."""
    if not member.isreg():
        raise CorruptDownload(
            f"the archive contains {member.name!r}, which is not a regular file; nothing was "
            "written"
        )
    if fault := fault_of(member.name):
        raise CorruptDownload(
            f"the archive contains {member.name!r}, which {fault}; nothing was written"
        )
    return member.name


def _verify(staged: Path, found: dict[str, tuple[int, str]], digest: str | None) -> None:
    if MANIFEST not in found:
        raise CorruptDownload(
            f"the archive contains no {MANIFEST}: it is not a complete checkpoint"
        )
    promised = _promised_files(staged / MANIFEST, found[MANIFEST][0], digest)
    for name, (size_bytes, digest_of, promised_digest) in promised.items():
        if name not in found:
            raise CorruptDownload(f"{name} is missing from the archive")
        found_bytes, found_digest = found[name]
        if found_bytes != size_bytes:
            raise CorruptDownload(
                f"{name} has {found_bytes} bytes, but the manifest states {size_bytes}"
            )
        if digest_of == "sha256":
            with (staged / name).open("rb") as file:
                found_digest = hashlib.file_digest(file, "sha256").hexdigest()
        if found_digest != promised_digest:
            raise CorruptDownload(
                f"{name} has {digest_of} {found_digest}, but the manifest states {promised_digest}"
            )
    unexpected = sorted(found.keys() - promised.keys() - {MANIFEST})
    if unexpected:
        raise CorruptDownload(f"the archive contains {unexpected[0]}, which is not in the manifest")


def _promised_files(
    manifest: Path, size_bytes: int, digest: str | None
) -> dict[str, tuple[int, str, str]]:
    """Return size, kind of digest (``sha256`` in old manifests) and digest of each file in the
    manifest.

    The manifest's own digest, over its canonical JSON without ``digest``, is verified.
    """
    if size_bytes > _MAX_MANIFEST_BYTES:
        raise CorruptDownload(
            f"{MANIFEST} is {size_bytes} bytes, over the limit of {_MAX_MANIFEST_BYTES}: the "
            "download is not a checkpoint"
        )
    try:
        raw: dict[str, Any] = json.loads(manifest.read_bytes())
        stated = raw.pop("digest", None)
        promised = {}
        for name, entry in raw["files"].items():
            kind = "blake3" if "blake3" in entry else "sha256"
            promised[str(name)] = (int(entry["size_bytes"]), kind, str(entry[kind]))
        canonical = json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CorruptDownload(f"{MANIFEST} is not a manifest: {exc!r}") from exc
    actual = hashlib.sha256(canonical).hexdigest()
    for source, expected in (
        ("states", stated),
        ("should have, according to the service,", digest),
    ):
        if expected is not None and expected.removeprefix("sha256:") != actual:
            raise CorruptDownload(
                f"{MANIFEST} {source} digest {expected}, but its content has {actual}"
            )
    return promised


def _put_in_place(staged: Path, target: Path) -> None:
    if not target.exists():
        staged.replace(target)
        return
    # Without a manifest the directory is not a checkpoint while its files change.
    (target / MANIFEST).unlink(missing_ok=True)
    files = [path for path in staged.rglob("*") if path.is_file() and path != staged / MANIFEST]
    for path in [*sorted(files), staged / MANIFEST]:
        place = target / path.relative_to(staged)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir():
            shutil.rmtree(place)
        path.replace(place)


@contextmanager
def _tar_errors() -> Iterator[None]:
    try:
        yield
    except (
        tarfile.TarError,
        EOFError,
        FileExistsError,
        NotADirectoryError,
        UnicodeDecodeError,
    ) as exc:
        raise CorruptDownload(f"the archive is damaged or truncated: {exc}") from exc


def leaves_out_frozen(directory: Path) -> bool:
    """Return whether a downloaded checkpoint leaves out the model's frozen parameters."""
    manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
    return manifest.get("parameters") == "trainable"
