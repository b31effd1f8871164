"""An object store, accessed with pyarrow. Objects appear whole; none can be appended, renamed or
locked.

Credentials come from the environment (AWS_ACCESS_KEY_ID and so on, or the machine's role), never
from the URI.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast
from urllib.parse import SplitResult, parse_qs

from storage.errors import InvalidStorage, StorageNotFound, mapped
from storage.files.conditional_puts import S3ConditionalPuts
from storage.files.protocol import Entry, ReadStream
from storage.files.regular_file import READ_LIMIT_BYTES, read_whole

_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 30.0
_S3_OPTIONS = {"endpoint_override", "scheme", "region"}
_GCS_OPTIONS = {"endpoint_override", "scheme"}


def open_object_files(parts: SplitResult) -> ObjectFiles:
    """Open ``s3://bucket/prefix?endpoint_override=…&scheme=…&region=…`` or ``gs://…``. Raises
    InvalidStorage."""
    from pyarrow import fs

    options = _options(parts)
    base = f"{parts.netloc}{parts.path}".strip("/")
    with mapped("open", f"{parts.scheme}://{base}"):
        if parts.scheme == "s3":
            return ObjectFiles(
                # With a delayed open, a small file is a single PUT.
                fs.S3FileSystem(
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    request_timeout=_REQUEST_TIMEOUT_S,
                    allow_delayed_open=True,
                    **options,
                ),
                base,
                S3ConditionalPuts(options, _CONNECT_TIMEOUT_S, _REQUEST_TIMEOUT_S),
            )
        return ObjectFiles(
            fs.GcsFileSystem(retry_time_limit=timedelta(seconds=_REQUEST_TIMEOUT_S), **options),
            base,
        )


def check_object_uri(parts: SplitResult) -> None:
    """Check an object store's URI without access to the store. Raises InvalidStorage."""
    _options(parts)


def _options(parts: SplitResult) -> dict[str, str]:
    if parts.username or parts.password:
        raise InvalidStorage(
            "the storage URI contains credentials; set them in the environment "
            "(AWS_ACCESS_KEY_ID, …) instead"
        )
    if not parts.netloc:
        raise InvalidStorage(
            f"the storage URI names no bucket; write {parts.scheme}://bucket/prefix"
        )
    allowed = _S3_OPTIONS if parts.scheme == "s3" else _GCS_OPTIONS
    given = parse_qs(parts.query, keep_blank_values=True)
    unknown = sorted(set(given) - allowed)
    if unknown:
        raise InvalidStorage(
            f"the storage URI has unknown options {unknown}; {parts.scheme} supports "
            f"{sorted(allowed)}"
        )
    options = {name: values[-1] for name, values in given.items()}
    endpoint = options.get("endpoint_override", "")
    if "://" in endpoint:
        options["scheme"], options["endpoint_override"] = endpoint.split("://", 1)
    return options


def make_s3_bucket(parts: SplitResult) -> None:
    """Create the bucket of an ``s3://`` URI if it does not exist. Raises StorageError."""
    from pyarrow import fs

    with mapped("make bucket", parts.netloc):
        fs.S3FileSystem(
            allow_bucket_creation=True,
            connect_timeout=_CONNECT_TIMEOUT_S,
            request_timeout=_REQUEST_TIMEOUT_S,
            **_options(parts),
        ).create_dir(parts.netloc)


class _ObjectUpload:
    """A new object. It appears when it is closed."""

    def __init__(self, stream: Any, path: str) -> None:
        self._stream = stream
        self._path = path

    def write(self, data: bytes | memoryview, /) -> int:
        with mapped("write", self._path):
            return int(self._stream.write(data))

    def close(self) -> None:
        with mapped("write", self._path):
            self._stream.close()


class ObjectFiles:
    """Objects below ``bucket/prefix``."""

    can_append = False

    def __init__(self, filesystem: Any, base: str, puts: S3ConditionalPuts | None = None) -> None:
        """``puts`` is None for Google's store, where pyarrow cannot send conditions; there an
        existence check comes before the put."""
        self._fs = filesystem
        self.base = base
        self._puts = puts

    def path(self, relpath: str) -> str:
        return f"{self.base}/{relpath}" if relpath not in ("", ".") else self.base

    def exists(self, relpath: str) -> bool:
        # Not get_file_info, which lists the prefix of a missing object to check for a directory.
        path = self.path(relpath)
        try:
            with mapped("access", path):
                self._fs.open_input_file(path).close()
        except StorageNotFound:
            return False
        return True

    def read(self, relpath: str, limit_bytes: int = READ_LIMIT_BYTES) -> bytes:
        path = self.path(relpath)
        with mapped("read", path), self._fs.open_input_file(path) as stream:
            return read_whole(stream, path, int(stream.size()), limit_bytes)

    def open_read(self, relpath: str, offset: int = 0) -> ReadStream:
        path = self.path(relpath)
        with mapped("read", path):
            stream = self._fs.open_input_file(path)
            stream.seek(offset)
            return cast(ReadStream, stream)

    def list(self, relpath: str) -> list[Entry]:
        from pyarrow import fs

        path = self.path(relpath)
        with mapped("list", path):
            found = self._fs.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(Entry(info.base_name, info.type == fs.FileType.Directory) for info in found)

    def write(self, relpath: str, data: bytes) -> None:
        stream = self.create(relpath)
        stream.write(data)
        stream.close()

    def create_new(self, relpath: str, data: bytes) -> bool:
        if self._puts is not None:
            return self._puts.put_new(self.path(relpath), data) or self.read(relpath) == data
        if self.exists(relpath):
            return self.read(relpath) == data
        self.write(relpath, data)
        return True

    def create(self, relpath: str) -> _ObjectUpload:
        path = self.path(relpath)
        with mapped("write", path):
            return _ObjectUpload(self._fs.open_output_stream(path, compression=None), path)

    def touch(self, relpath: str) -> None:
        self.create(relpath).close()

    def make_dir(self, relpath: str) -> None:
        """Do nothing: an object store has no directories."""

    def sync_dir(self, relpath: str) -> None:
        """Do nothing: a closed object is durable."""

    def set_aside(self, relpath: str, aside: str) -> bool:
        return False

    def promote(self, marker: str, relpath: str, data: bytes) -> bool:
        raise InvalidStorage(
            f"{self.path(marker)} cannot be renamed on an object store; create {relpath} instead"
        )

    def delete_file(self, relpath: str) -> None:
        path = self.path(relpath)
        try:
            with mapped("delete", path):
                self._fs.delete_file(path)
        except StorageNotFound:
            return

    def delete_dir(self, relpath: str) -> None:
        path = self.path(relpath)
        try:
            with mapped("delete", path):
                self._fs.delete_dir(path)
        except StorageNotFound:
            return
