"""Where the API listens: its socket, its certificate, and uvicorn as this process runs it."""

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
"""Followers of events reconnect by themselves: a stop waits for other requests only, and no longer
than this."""
_SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread that computes, mostly the reconciler's, keeps the interpreter from the one that
answers requests."""
_GC_THRESHOLDS: Final = (10_000, 20, 50)
"""Objects made and not yet gone again, before the youngest are looked through; then how many such
looks before an older one."""


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """The API's socket, bound before anything is started. Raises CannotStart."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is; left on,
    # every answer waits 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except (OSError, OverflowError) as exc:
            raise CannotStart(
                f"cannot listen on {settings.host}:{settings.port} ({exc}); stop what uses it, or "
                "choose another --port (0 takes a "
                "free one) or --host"
            ) from exc
        yield listener


def check_tls(settings: Settings) -> None:
    """See that certificate and key can be used, before anything is started. Raises CannotStart."""
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as exc:
        raise CannotStart(
            f"TLS cannot be served with {settings.tls_cert} and {settings.tls_key} ({exc}); see "
            "that both are PEM, belong "
            "together, and can be read by this user"
        ) from exc


def base_url(settings: Settings, listener: socket.socket) -> str:
    """The URL for clients on this machine; an address that means all interfaces is reached by
    loopback. With TLS it is the name that is in the certificate."""
    if settings.tls_cert is not None:
        return settings.public_url
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


class ApiServer(uvicorn.Server):
    """uvicorn without signal handlers of its own, and with a call once it answers."""

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
    """What is there by now stays: the collector, for which every request waits, need not look
    through it, nor come so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
