"""An object store, accessed with pyarrow. Objects appear whole; none can be appended, renamed or
locked.

Credentials come from the environment (AWS_ACCESS_KEY_ID and so on, or the machine's role), never
from the URI.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import SplitResult, parse_qs

from storage.errors import (
    InvalidStorage,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageNotFound,
    StorageUnavailable,
    mapped,
)
from storage.files.protocol import READ_LIMIT_BYTES, Entry, ReadStream, read_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

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


# ---------------------------------------------------------------- conditional puts

# Create an object only if it does not exist, which pyarrow cannot do.
#
# S3 has supported ``If-None-Match: *`` since August 2024, and so do MinIO and others. A store that
# ignores the condition is refused (``storage.filesystem.require_exclusive_creates``): two writers
# would both believe that they created the object.

_EXISTS = "PreconditionFailed"
_AT_THE_SAME_TIME = "ConditionalRequestConflict"
_ATTEMPTS = 5
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "403"}
_MISSING = {"NoSuchBucket", "404"}


class S3ConditionalPuts:
    """Conditional puts with botocore, which finds the same credentials as pyarrow."""

    def __init__(
        self, options: Mapping[str, str], connect_timeout_s: float, request_timeout_s: float
    ) -> None:
        self._options = options
        self._timeouts = (connect_timeout_s, request_timeout_s)

    def put_new(self, path: str, data: bytes) -> bool:
        """Put ``bucket/key`` if it does not exist; return whether it was put. Raises
        StorageError."""
        bucket, _, key = path.partition("/")
        for _ in range(_ATTEMPTS):
            try:
                self._call("put_object", bucket, key, Body=data, IfNoneMatch="*")
            except _Conflict as exc:
                if str(exc) == _EXISTS:
                    return False
                continue  # two puts collided; neither may have succeeded
            return True
        raise StorageUnavailable(
            f"cannot create {bucket}/{key}: other processes keep writing it at the same time; try "
            "again later"
        )

    def _call(self, operation: str, bucket: str, key: str, **arguments: Any) -> None:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            getattr(self._client, operation)(Bucket=bucket, Key=key, **arguments)
        except ClientError as exc:
            raise _mapped(exc.response, f"{bucket}/{key}") from exc
        except NoCredentialsError as exc:
            raise StorageDenied(
                f"cannot write {bucket}/{key}: {exc}; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY"
            ) from exc
        except BotoCoreError as exc:
            raise StorageUnavailable(
                f"cannot write {bucket}/{key}: {exc}; check that the store is up and reachable"
            ) from exc

    @cached_property
    def _client(self) -> Any:
        from botocore.config import Config
        from botocore.session import get_session

        endpoint = self._options.get("endpoint_override")
        connect_s, request_s = self._timeouts
        session = get_session()
        return session.create_client(
            "s3",
            region_name=self._options.get("region")
            or session.get_config_variable("region")
            or "us-east-1",
            endpoint_url=f"{self._options.get('scheme', 'https')}://{endpoint}"
            if endpoint
            else None,
            config=Config(
                connect_timeout=connect_s,
                read_timeout=request_s,
                retries={"total_max_attempts": 3, "mode": "standard"},
                s3={"addressing_style": "path"} if endpoint else {},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


class _Conflict(Exception):
    """The condition was not met; the text is its code. Only used in this module."""


def _mapped(response: Mapping[str, Any], path: str) -> StorageError | _Conflict:
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    words = f"cannot write {path}: {response.get('Error', {}).get('Message') or code}"
    if code == _EXISTS or status == 412:
        return _Conflict(_EXISTS)
    if code == _AT_THE_SAME_TIME or status == 409:
        return _Conflict(_AT_THE_SAME_TIME)
    if code in _MISSING:
        return StorageNotFound(
            f"{words}; create the bucket, or name another one in the storage URI"
        )
    if code in _DENIED:
        return StorageDenied(f"{words}; check the credentials and the bucket's policy")
    if status == 501:
        return InvalidStorage(
            f"{words}; this store does not support If-None-Match: * on a put; use one that does, "
            "or a filesystem"
        )
    if status == 507:
        return StorageFull(words)
    return StorageUnavailable(f"{words}; check that the store is up and reachable")
