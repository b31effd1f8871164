"""The storage of all runs: a root directory on a local filesystem or an object store, named by a
URI."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.errors import InvalidStorage, StorageError, StorageUnavailable
from storage.files.local import LocalFiles
from storage.files.protocol import Files

_OBJECT_SCHEMES = ("s3", "gs")


@dataclass(frozen=True)
class Storage:
    """The root of all runs. Picklable: unpickling opens the URI again, with credentials from that
    process's environment."""

    uri: str

    @cached_property
    def files(self) -> Files:
        """Return the files below the root. pyarrow is imported only for an object store, on first
        use."""
        if self.is_local:
            return LocalFiles(Path(self.uri))
        from storage.files.object_store import open_object_files

        return open_object_files(urlsplit(self.uri))

    @property
    def is_local(self) -> bool:
        return self.uri.startswith("/")

    @property
    def can_append(self) -> bool:
        """Return whether a log is one growing file (local) or sealed segments (object stores)."""
        return self.is_local

    @property
    def creates_exclusively(self) -> bool:
        """Return whether a file can be created only if it does not exist.

        Google's store supports this condition, but pyarrow cannot send it; there an existence check
        comes before the put.
        """
        return not self.uri.startswith("gs://")

    @property
    def batch_s(self) -> float:
        """Return for how many seconds a log's writer should gather lines. On an object store every
        append is a new object."""
        return 0.25 if self.can_append else 2.0

    def child_uri(self, relpath: str) -> str:
        """Return the URI of a path below the root, with the root's own options."""
        head, mark, query = self.uri.partition("?")
        return f"{head.rstrip('/')}/{relpath}{mark}{query}"

    def probe(self) -> None:
        """Write, read back and delete a small file. Raises StorageError with what to do."""
        relpath, data = f".probe-{secrets.token_hex(6)}", secrets.token_bytes(32)
        try:
            self.files.write(relpath, data)
            try:
                found = self.files.read(relpath)
            finally:
                self.files.delete_file(relpath)
            require_exclusive_creates(self.files, "")
        except StorageError as exc:
            raise type(exc)(f"storage {self.uri} cannot be used: {exc}") from exc
        if found != data:
            raise StorageUnavailable(
                f"storage {self.uri} returned different bytes than were written; choose another "
                "storage URI"
            )

    def __reduce__(self) -> tuple[object, ...]:
        return open_storage, (self.uri,)


def require_exclusive_creates(files: Files, directory: str) -> None:
    """Raise InvalidStorage if the storage creates a file that already exists: processes would
    overwrite each other's files."""
    relpath = f"{directory}/.create-{secrets.token_hex(6)}".lstrip("/")
    try:
        honoured = files.create_new(relpath, b"1") and not files.create_new(relpath, b"2")
    finally:
        files.delete_file(relpath)
    if not honoured:
        raise InvalidStorage(
            f"{files.path(directory)} does not support exclusive creation: this object store "
            "ignores If-None-Match: * on a put, so processes would overwrite each other's "
            "journals; use a store that supports it, or a filesystem"
        )


def open_storage(uri: str) -> Storage:
    """Open ``/path``, ``file:///path``, ``s3://bucket/prefix?endpoint_override=…`` or ``gs://…``,
    without accessing it yet.

    Raises InvalidStorage for an invalid URI.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        if not uri:
            raise InvalidStorage(
                "the storage URI is empty; write a directory or s3://bucket/prefix"
            )
        return Storage(str(Path(uri).expanduser().absolute()))
    if scheme == "file":
        parts = urlsplit(uri)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise InvalidStorage(
                f"the storage URI {uri} is not a path of this machine; write file:///absolute/path"
            )
        return Storage(str(Path(unquote(parts.path)).absolute()))
    if scheme not in _OBJECT_SCHEMES:
        raise InvalidStorage(
            f"storage scheme {scheme!r} is not supported; use a path, file://, s3:// or gs://"
        )
    from storage.files.object_store import check_object_uri

    check_object_uri(urlsplit(uri))
    return Storage(uri)
