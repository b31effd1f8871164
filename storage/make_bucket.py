"""``python -m storage.make_bucket URI``: create the bucket of an S3 URI if it does not exist.

Exit code 0 if the bucket exists afterwards, 1 with the reason if the store refuses or does not
respond.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

from storage.errors import StorageError
from storage.filesystem import open_storage


def make_bucket(uri: str) -> None:
    """Create the bucket if it does not exist. Raises StorageError, also for a path or a store other
    than S3."""
    from storage.errors import InvalidStorage
    from storage.files.object_store import make_s3_bucket

    open_storage(uri)
    parts = urlsplit(uri)
    if parts.scheme != "s3":
        raise InvalidStorage(f"cannot create a bucket for {uri}; use an s3:// URI")
    make_s3_bucket(parts)


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    if len(argv) != 1:
        print(
            "usage: python -m storage.make_bucket s3://BUCKET/PREFIX?endpoint_override=…",
            file=sys.stderr,
        )
        return 2
    try:
        make_bucket(argv[0])
    except StorageError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
