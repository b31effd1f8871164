"""The API's socket, its certificate, and the uvicorn server of this process."""

from __future__ import annotations

import contextlib
import gc
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn
from fastapi import FastAPI

from service.settings import CannotStart, Settings

DRAIN_TIMEOUT_S: Final = 5
"""Longest wait of a stop for open requests. Followers of events reconnect by themselves."""
_SWITCH_INTERVAL_S: Final = 0.0005
"""How long a computing thread, mostly the reconciler's, keeps the interpreter from requests."""
_GC_THRESHOLDS: Final = (10_000, 20, 50)
"""Thresholds of gc.set_threshold: new objects before the youngest generation is collected, then
collections before the next older generation is."""


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """Bind the API's socket, before anything else starts. Raises CannotStart."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only if the protocol is named. With it each answer waits
    # 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except (OSError, OverflowError) as exc:
            raise CannotStart(
                f"cannot listen on {settings.host}:{settings.port} ({exc}); stop the process that "
                "uses it, or choose another --port (0 takes a free one) or --host"
            ) from exc
        yield listener


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


class ApiServer(uvicorn.Server):
    """uvicorn without its signal handlers. It calls ``on_ready`` once it answers."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None], settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
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
        settle_garbage_collection()
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def settle_garbage_collection() -> None:
    """Exempt the objects of the start from garbage collection, and collect less often.

    Every request waits for a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
