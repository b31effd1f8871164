"""Who waits for a log gets its lines at once."""

from __future__ import annotations

import asyncio
import logging
import threading

from train_fn.journal.rank_log import collect_log


async def test_who_waits_for_a_log_gets_what_any_thread_says_at_once() -> None:
    log = collect_log("collected.here")
    said = logging.getLogger("collected.here")
    assert await log.take(0.01) == []
    said.info("before anybody waits")
    assert await log.take(60.0) == [(logging.INFO, "before anybody waits")]
    waiting = asyncio.create_task(log.take(60.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    speaker = threading.Thread(target=said.warning, args=("on a thread",))
    speaker.start()
    assert await asyncio.wait_for(waiting, 20.0) == [(logging.WARNING, "on a thread")]
    speaker.join()
