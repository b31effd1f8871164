"""The API's socket, its address, and its certificate."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Final

from service.settings import CannotStart, Settings

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
