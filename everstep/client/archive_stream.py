"""Stream a checkpoint's archive; a broken connection is resumed at the byte where it stopped."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.client.transport import Transport
from everstep.errors import CorruptDownload, Unavailable

MAX_TRIES = 3
"""Maximum consecutive connections without new data."""


class ArchiveChanged(CorruptDownload):
    """The service now serves another archive at this URL; the bytes received so far are useless."""


class ArchiveStream:
    """The bytes of one archive; iterate once. ``digest`` is the manifest's, from the first
    response; None before.

    Raises Unavailable after MAX_TRIES connections without a new byte, ArchiveChanged, and errors of
    the service.
    """

    def __init__(self, transport: Transport, path: str) -> None:
        self._transport = transport
        self._path = path
        self._etag: str | None = None
        self._size_bytes: int | None = None
        self.num_bytes = 0
        """Bytes received so far."""
        self.digest: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        fruitless = 0
        while True:
            before = self.num_bytes
            try:
                yield from self._connection()
                return
            except Unavailable:
                fruitless = 1 if self.num_bytes > before else fruitless + 1
                if fruitless == MAX_TRIES:
                    raise
                self._transport.timing.sleep(self._transport.timing.backoff_s(fruitless))

    def _connection(self) -> Iterator[bytes]:
        """Yield the data of one connection, from where the previous one stopped."""
        headers = {"Accept": "application/x-tar, application/problem+json"}
        if self.num_bytes:
            if self.num_bytes == self._size_bytes:
                return
            headers |= {"Range": f"bytes={self.num_bytes}-"} | (
                {"If-Range": self._etag} if self._etag else {}
            )
        with self._transport.stream(self._path, headers=headers) as response:
            if self.num_bytes and response.status_code != 206:
                raise ArchiveChanged(
                    f"the archive at {self._path} changed during the download; download it again"
                )
            if not self.num_bytes:
                self._etag = response.headers.get("ETag")
                self.digest = response.headers.get("X-Everstep-Digest")
                length = response.headers.get("Content-Length", "")
                self._size_bytes = int(length) if length.isdigit() else None
            for chunk in response.iter_raw():
                self.num_bytes += len(chunk)
                yield chunk
