"""A checkpoint's archive over connections that may break: each goes on at the byte where the one
before stopped."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.client.transport import Transport
from everstep.errors import CorruptDownload, Unavailable

MAX_TRIES = 3
"""Connections in a row that brought nothing new."""


class ArchiveChanged(CorruptDownload):
    """The service now has another archive at this address; what arrived of the first is
    worthless."""


class ArchiveStream:
    """The bytes of one archive, once through. ``digest`` is the manifest's, as the first answer
    promised it; None before that.

    Raises Unavailable after MAX_TRIES connections without a new byte, ArchiveChanged, and what the
    service answers.
    """

    def __init__(self, transport: Transport, path: str) -> None:
        self._transport = transport
        self._path = path
        self._etag: str | None = None
        self._size_bytes: int | None = None
        self.num_bytes = 0
        """Received so far."""
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
        """What one connection brings, from where the one before stopped."""
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
                    f"the archive at {self._path} changed while it was fetched; fetch it again"
                )
            if not self.num_bytes:
                self._etag = response.headers.get("ETag")
                self.digest = response.headers.get("X-Everstep-Digest")
                length = response.headers.get("Content-Length", "")
                self._size_bytes = int(length) if length.isdigit() else None
            for chunk in response.iter_raw():
                self.num_bytes += len(chunk)
                yield chunk
