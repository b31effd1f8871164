"""Wait until a rank of a running group has news for the controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

_FIRST_PAUSE_S = 0.01
_SHARE = 0.2
"""Pauses between polls once a rank is over: short at first, then this share of the time since."""


class RankNews:
    """Keep one pending call to each rank of a group. It returns once a poll would find
    something."""

    def __init__(self) -> None:
        self._watches: list[asyncio.Future[bool]] = []
        """The pending calls, by rank."""
        self._over_at: float | None = None
        """When the first rank was over, in monotonic seconds."""

    async def wait(self, workers: Sequence[Any], poll_s: float, quiet_s: float) -> bool:
        """Wait for news of any rank. Return False if there is none.

        Once a rank has finished training, ended or died, its call has no more to say: from then on
        there is news at short intervals, which grow to ``poll_s``, and when another rank has some.

        Args:
            workers: the group's workers, by rank.
            poll_s: longest interval in seconds once a rank is over.
            quiet_s: longest wait in seconds.
        """
        if not self._watches:
            self._watches = [_watch(worker) for worker in workers]
        pending = [watch for watch in self._watches if not _is_over(watch)]
        is_over = len(pending) < len(workers)
        if is_over:
            now = time.monotonic()
            self._over_at = self._over_at or now
            quiet_s = min(poll_s, _FIRST_PAUSE_S + _SHARE * (now - self._over_at))
        if not pending:
            await asyncio.sleep(quiet_s)
            return True
        done, _ = await asyncio.wait(pending, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED)
        self._watches = [
            _watch(worker) if watch.done() and not _is_over(watch) else watch
            for worker, watch in zip(workers, self._watches, strict=True)
        ]
        return is_over or bool(done)


def _watch(worker: Any) -> asyncio.Future[bool]:
    return asyncio.wrap_future(worker.actor.watch.remote().future())


def _is_over(watch: asyncio.Future[bool]) -> bool:
    """Return whether a rank has no more news: it has finished training or ended, or it cannot be
    called, and a poll finds out why."""
    return watch.done() and (watch.exception() is not None or watch.result())
