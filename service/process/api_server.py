"""The uvicorn server of this process."""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn
from fastapi import FastAPI

from service.process.http_connection import HttpConnection
from service.settings import Settings

DRAIN_TIMEOUT_S: Final = 5
"""Longest wait of a stop for open requests. Followers of events reconnect by themselves."""
_SWITCH_INTERVAL_S: Final = 0.0005
"""How long a computing thread, mostly the reconciler's, keeps the interpreter from requests."""
_GC_THRESHOLDS: Final = (10_000, 20, 50)
"""Thresholds of gc.set_threshold: new objects before the youngest generation is collected, then
collections before the next older generation is."""


class ApiServer(uvicorn.Server):
    """uvicorn without its signal handlers. It calls ``on_ready`` once it answers."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None], settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
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
