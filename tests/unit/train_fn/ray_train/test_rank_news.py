"""The controller hears of a report at once, and polls often once a rank is over."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from train_fn.ray_train.group.worker_group import RankNews


class Rank:
    """A worker whose pending call the test answers."""

    def __init__(self) -> None:
        self.calls: list[Future[bool]] = []
        self.actor: Any = SimpleNamespace(watch=SimpleNamespace(remote=self._watch))

    def _watch(self) -> Any:
        call: Future[bool] = Future()
        self.calls.append(call)
        return SimpleNamespace(future=lambda: call)


def test_a_report_is_news_once_and_its_rank_is_called_again() -> None:
    async def turns() -> None:
        ranks, news = [Rank(), Rank()], RankNews()
        assert not await news.wait(ranks, poll_s=0.01, quiet_s=0.05)
        ranks[1].calls[0].set_result(False)
        assert await news.wait(ranks, poll_s=0.01, quiet_s=60.0)
        assert [len(rank.calls) for rank in ranks] == [1, 2]
        assert not await news.wait(ranks, poll_s=0.01, quiet_s=0.05)

    asyncio.run(turns())


def test_a_rank_that_is_over_is_news_again_and_again_but_ever_more_seldom() -> None:
    async def turns(*, died: bool) -> None:
        ranks, news = [Rank(), Rank()], RankNews()
        assert not await news.wait(ranks, poll_s=0.01, quiet_s=0.05)
        if died:
            ranks[0].calls[0].set_exception(ConnectionError("the actor is dead"))
        else:
            ranks[0].calls[0].set_result(True)
        began, pauses = time.monotonic(), []
        while time.monotonic() - began < 1.5:
            asked = time.monotonic()
            assert await news.wait(ranks, poll_s=0.2, quiet_s=60.0)
            pauses.append(time.monotonic() - asked)
        assert pauses[0] < 0.1, "others are over soon after the first one"
        assert pauses[-1] >= 0.19 and len(pauses) < 60, "not in a busy loop"
        assert [len(rank.calls) for rank in ranks] == [1, 1]

    asyncio.run(turns(died=False))
    asyncio.run(turns(died=True))


def test_a_rank_that_is_over_hides_no_news_of_others() -> None:
    async def turns() -> None:
        ranks, news = [Rank(), Rank()], RankNews()
        assert not await news.wait(ranks, poll_s=0.01, quiet_s=0.05)
        ranks[0].calls[0].set_result(True)
        assert await news.wait(ranks, poll_s=60.0, quiet_s=60.0)
        ranks[1].calls[0].set_result(False)
        assert await news.wait(ranks, poll_s=60.0, quiet_s=60.0)
        assert [len(rank.calls) for rank in ranks] == [1, 2]

    asyncio.run(turns())
