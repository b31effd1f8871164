"""One HTTP connection of the service: uvicorn's, with limits on what a client may owe.

uvicorn waits without end for the rest of a request, and keeps headers of any size, before anybody
has shown a token. A proxy has such limits; these hold where there is none.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_S: Final = 10.0
"""Longest wait for a request's headers, from the connection or from their first byte on."""
BODY_S: Final = 60.0
"""Longest wait for the next byte of a body."""
HEADERS_BYTES: Final = 64 << 10
"""Size of a request's first line and headers, from which it is refused."""
_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)


class HttpConnection(HttpToolsProtocol):
    """A connection that ends if its client does not send what it began to send."""

    _due: asyncio.TimerHandle | None = None
    _awaits_headers = True
    _headers_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(HEADERS_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._awaits_headers:
            self._headers_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._awaits_headers:
            self._expect(BODY_S)
        elif self._headers_bytes > HEADERS_BYTES:
            self._end(_LARGE)
        elif self._headers_bytes and self._due is None:
            self._expect(HEADERS_S)

    def on_headers_complete(self) -> None:
        self._awaits_headers, self._headers_bytes = False, 0
        self._cancel()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._awaits_headers = True
        self._cancel()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._cancel()
        super().handle_websocket_upgrade()

    def _expect(self, seconds: float) -> None:
        """End the connection if the client sends nothing more for so long."""
        self._cancel()
        self._due = self.loop.call_later(seconds, self._end, _SLOW)

    def _cancel(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _end(self, answer: bytes) -> None:
        self._cancel()
        if self.flow.read_paused:  # this side does not read: the client owes nothing
            self._expect(BODY_S)
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(answer)
        self.transport.close()
