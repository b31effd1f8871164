"""The HTTP server of this process: its socket, its connections and their limits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.settings import CannotStart, Settings

DRAIN_TIMEOUT_S: Final = 5
"""Longest wait of a stop for open requests. Followers of events reconnect by themselves."""
_SWITCH_INTERVAL_S: Final = 0.0005
"""How long a computing thread, mostly the reconciler's, keeps the interpreter from requests."""


class ApiServer(uvicorn.Server):
    """uvicorn without its signal handlers. It calls ``on_ready`` once it answers."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None], settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
                lifespan="on",
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        gc.freeze()  # no collection, for which every request waits, looks at what is there now
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


# ---------------------------------------------------------------- http connection

# One HTTP connection of the service: uvicorn's, with limits on what a client may owe.
#
# uvicorn waits without end for the rest of a request, and keeps headers of any size, before anybody
# has shown a token. A proxy has such limits; these hold where there is none.

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


# ---------------------------------------------------------------- listener

# The API's socket, its address, and its certificate.

UNREAD_S: Final = 60
"""How long a client may take in nothing of what it was sent before its connection is dropped."""


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """Bind the API's socket, before anything else starts. Raises CannotStart."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only if the protocol is named. With it each answer waits
    # 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        drop_who_reads_nothing(listener)
        try:
            listener.bind((settings.host, settings.port))
        except (OSError, OverflowError) as exc:
            raise CannotStart(
                f"cannot listen on {settings.host}:{settings.port} ({exc}); stop the process that "
                "uses it, or choose another --port (0 takes a free one) or --host"
            ) from exc
        yield listener


def drop_who_reads_nothing(listener: socket.socket, seconds: float = UNREAD_S) -> None:
    """Let the kernel end accepted connections whose peer takes in nothing for so long: one that is
    gone, and one that asked for a stream or a large answer and does not read it."""
    milliseconds = round(seconds * 1000)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def check_tls(settings: Settings) -> None:
    """Check that certificate and key can be used, before anything starts. Raises CannotStart."""
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as exc:
        raise CannotStart(
            f"TLS cannot be served with {settings.tls_cert} and {settings.tls_key} ({exc}); give "
            "two PEM files that belong together and that this user can read"
        ) from exc


def base_url(settings: Settings, listener: socket.socket) -> str:
    """Return the URL for clients on this machine.

    It is loopback for an address that means all interfaces, and with TLS the certificate's name.
    """
    if settings.tls_cert is not None:
        return settings.public_url
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
