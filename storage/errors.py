"""Errors of storage, and the mapping of errors of the OS and of pyarrow to ours.

StorageError
├── InvalidStorage         an invalid URI, name or cursor
├── InvalidArchive         uploaded code that is not a safe archive
├── StorageNotFound        a file, run or checkpoint that does not exist
├── StorageDenied          permissions or credentials do not allow it
├── StorageFull            no space or quota left
├── StorageUnreadable      the medium failed to return its data
├── StorageUnavailable     the filesystem did not respond, or responded with something else
├── StorageMismatch        not the storage that the database knows, or it lacks known data
│   └── StorageOwned       of another database, and this one has never used it
├── LogTakenOver           another process writes the same log
├── AlreadyClaimed         another process has this submission or attempt, or a newer one exists
├── CorruptFile            complete, but not what was written
│   ├── NotRegularFile     a FIFO, a directory or a device instead of a file
│   │   └── LinkedFile     a link; also a StorageDenied
│   └── FileTooLarge       more bytes than such a file can have
├── CheckpointExists       committed checkpoints are never overwritten
├── CheckpointReplaced     another writer started the same checkpoint
└── CorruptCheckpoint      a file of a committed checkpoint is missing or differs
"""

from __future__ import annotations

import errno

from everstep.errors import KeptWhole

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MISSING = {errno.ENOENT, errno.ENOTDIR}
_UNREADABLE = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}
_DENIED_CODES = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "SIGNATURE_DOES_NOT_MATCH",
)
_NO_TOKEN = "Could not create a OAuth2 access token"
"""Message of Google's client if it finds no credentials."""


class StorageError(KeptWhole, Exception):
    """Base of every error that this package raises."""


class InvalidStorage(StorageError):
    pass


class InvalidArchive(StorageError):
    pass


class StorageNotFound(StorageError):
    pass


class StorageDenied(StorageError):
    pass


class StorageFull(StorageError):
    pass


class StorageUnreadable(StorageError):
    pass


class StorageUnavailable(StorageError):
    pass


class StorageMismatch(StorageError):
    pass


class StorageOwned(StorageMismatch):
    pass


class LogTakenOver(StorageError):
    pass


class CorruptFile(StorageError):
    pass


class NotRegularFile(CorruptFile):
    pass


class LinkedFile(NotRegularFile, StorageDenied):
    """A link. Readers that can do without the file treat it as damage, others as missing
    permission."""


class FileTooLarge(CorruptFile):
    def __init__(self, path: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{path} has at least {size_bytes} bytes, over the limit of {limit_bytes}; remove it"
        )


class AlreadyClaimed(StorageError):
    pass


class CheckpointExists(StorageError):
    """``name`` is committed and verifies. Its manifest names the writer; only that process may
    treat it as its own save."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"checkpoint {name} is already committed; committed checkpoints are never overwritten"
        )
        self.name = name


class CheckpointReplaced(StorageError):
    """A later writer of the same attempt started the same checkpoint; this one must not commit."""

    def __init__(self, name: str) -> None:
        super().__init__(f"checkpoint {name} was started again by another writer; this one is void")
        self.name = name


class CorruptCheckpoint(StorageError):
    """``path`` in checkpoint ``name`` differs from its manifest: ``expected`` and ``found``."""

    def __init__(self, name: str, path: str, expected: str, found: str) -> None:
        super().__init__(f"checkpoint {name}: {path}: expected {expected}, found {found}")
        self.name = name
        self.path = path
        self.expected = expected
        self.found = found


def from_foreign(exc: BaseException, action: str, path: str) -> StorageError | None:
    """Return our error for an error of the OS or of pyarrow; None for anything else, which is a
    bug."""
    if not isinstance(exc, OSError) and not type(exc).__module__.startswith("pyarrow"):
        return None
    number = getattr(exc, "errno", None)
    text = f"cannot {action} {path}: {exc}"
    if number in _MISSING or isinstance(exc, FileNotFoundError):
        return StorageNotFound(text)
    if "NO_SUCH_BUCKET" in str(exc):
        return StorageNotFound(f"{text}; create the bucket, or name another in the storage URI")
    if number in _DENIED or any(code in str(exc) for code in _DENIED_CODES):
        return StorageDenied(
            f"{text}; give this user (or the credentials in its environment) read and write access"
        )
    if _NO_TOKEN in str(exc):
        return StorageDenied(
            f"cannot {action} {path}: no Google credentials found; set "
            "GOOGLE_APPLICATION_CREDENTIALS to a service account's key file on every node, or give "
            f"the machines a role ({str(exc)[-200:]})"
        )
    if number in _FULL:
        return StorageFull(f"{text}; free some space, or choose another storage URI")
    if number in _UNREADABLE:
        return StorageUnreadable(f"{text}; the medium is failing: replace it")
    return StorageUnavailable(f"{text}; check that the storage is mounted and reachable")


class mapped:
    """Raise errors of the OS and of pyarrow as ours. ``action`` and ``path`` complete "cannot
    ACTION PATH".

    A class, because a generator costs several times as much, and a save enters this block forty
    times.
    """

    __slots__ = ("_action", "_path")

    def __init__(self, action: str, path: str) -> None:
        self._action, self._path = action, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        if isinstance(exc, Exception) and not isinstance(exc, StorageError):
            error = from_foreign(exc, self._action, self._path)
            if error is not None:
                raise error from exc
