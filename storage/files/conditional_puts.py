"""Create an object only if it does not exist, which pyarrow cannot do.

S3 has supported ``If-None-Match: *`` since August 2024, and so do MinIO and others. A store that
ignores the condition is refused (``storage.filesystem.require_exclusive_creates``): two writers
would both believe that they created the object.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from storage.errors import (
    InvalidStorage,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageNotFound,
    StorageUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

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
