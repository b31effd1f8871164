"""Wait until a rank of a running group has news for the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


class RankNews:
    """Keep one pending call to each rank of a group. It returns once a poll would find
    something."""

    def __init__(self) -> None:
        self._watches: list[asyncio.Future[bool]] = []
        """The pending calls, by rank."""

    async def wait(self, workers: Sequence[Any], poll_s: float, quiet_s: float) -> bool:
        """Wait for news of any rank. Return False if there is none.

        Once a rank has finished training, ended or died, its call has no more to say: from then on
        there is news every ``poll_s``.

        Args:
            workers: the group's workers, by rank.
            poll_s: interval in seconds once a rank is over.
            quiet_s: longest wait in seconds.
        """
        if not self._watches:
            self._watches = [_watch(worker) for worker in workers]
        if any(_is_over(watch) for watch in self._watches):
            await asyncio.sleep(poll_s)
            return True
        done, _ = await asyncio.wait(
            self._watches, timeout=quiet_s, return_when=asyncio.FIRST_COMPLETED
        )
        self._watches = [
            _watch(worker) if watch.done() and not _is_over(watch) else watch
            for worker, watch in zip(workers, self._watches, strict=True)
        ]
        return bool(done)


def _watch(worker: Any) -> asyncio.Future[bool]:
    return asyncio.wrap_future(worker.actor.watch.remote().future())


def _is_over(watch: asyncio.Future[bool]) -> bool:
    """Return whether a rank has no more news: it has finished training or ended, or it cannot be
    called, and a poll finds out why."""
    return watch.done() and (watch.exception() is not None or watch.result())
