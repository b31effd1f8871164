"""Store uploaded code: archives named by their digest, so that each is stored once and every node
can fetch it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from everstep.code.rules import DIGEST_PATTERN, MAX_ARCHIVE_BYTES, collisions, modules
from storage.code.archive import read_members
from storage.errors import CorruptFile, InvalidArchive, InvalidStorage, StorageNotFound
from storage.filesystem import Storage


@dataclass(frozen=True)
class StoredCode:
    """Digest, size and modules of an archive."""

    digest: str
    """``sha256:`` and 64 hex digits, over the archive's bytes."""
    size_bytes: int
    modules: tuple[str, ...]
    """Dotted names that can be imported from it."""


class CodeStore:
    """Archives in ``STORAGE/code/sha256-…``. A file is written whole or not at all, and never
    changes."""

    def __init__(self, storage: Storage) -> None:
        self._files = storage.files

    def put(self, data: bytes) -> StoredCode:
        """Store an archive, unless it exists. Raises InvalidArchive if it is unsafe or has no
        module."""
        looked_at = look_at(data)
        self.keep(looked_at, data)
        return looked_at

    def keep(self, looked_at: StoredCode, data: bytes) -> None:
        """Store the bytes of an archive that ``look_at`` has checked."""
        if not self._holds(looked_at.digest):
            self._files.write(_path(looked_at.digest), data)

    def read(self, digest: str) -> bytes:
        """Return the archive's bytes, verified. Raises StorageNotFound; CorruptFile if the digest
        differs."""
        path = _path(digest)
        data = self._files.read(path, MAX_ARCHIVE_BYTES)
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if found != digest:
            raise CorruptFile(
                f"{self._files.path(path)} has the digest {found}; upload the code again to "
                "replace it"
            )
        return data

    def _holds(self, digest: str) -> bool:
        try:
            self.read(digest)
        except (StorageNotFound, CorruptFile):
            return False
        return True


def look_at(data: bytes) -> StoredCode:
    """Return digest, size and modules of an archive, without storing it. Raises InvalidArchive if
    it is unsafe or has no module."""
    paths = {member.path for member in read_members(data)}
    if problems := collisions(paths):
        raise InvalidArchive("; ".join(problems))
    names = modules(paths)
    if not any(path.endswith(".py") for path in paths):
        raise InvalidArchive(
            "the archive contains no Python module; pack the directory that contains yours"
        )
    return StoredCode(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data), names)


def _path(digest: str) -> str:
    if not re.fullmatch(DIGEST_PATTERN, digest):
        raise InvalidStorage(f"{digest!r} is not a digest of code; write sha256: and 64 hex digits")
    return f"code/{digest.replace(':', '-')}"
