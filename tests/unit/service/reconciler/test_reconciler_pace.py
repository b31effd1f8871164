"""Much work in pieces: all of it, in order, and with pauses in which others have the
interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

from service.reconciler.execute import PIECE, in_pieces


@pytest.mark.parametrize("number", [0, 1, PIECE, PIECE + 1, 5 * PIECE])
async def test_every_item_is_done_once_and_in_order(number: int) -> None:
    threads: set[threading.Thread] = set()

    def do(piece: Sequence[int]) -> list[int]:
        threads.add(threading.current_thread())
        return list(piece)

    done = await in_pieces(do, list(range(number)))
    assert [item for piece in done for item in piece] == list(range(number))
    assert all(len(piece) == PIECE for piece in done[:-1]) and all(done)
    assert threading.main_thread() not in threads


async def test_a_pause_is_twice_as_long_as_the_piece_before_it() -> None:
    times: list[tuple[float, float]] = []

    def do(piece: Sequence[int]) -> None:
        began = time.monotonic()
        while time.monotonic() < began + 0.02:
            pass
        times.append((began, time.monotonic()))

    await in_pieces(do, list(range(4 * PIECE)))
    pauses = [(begun - ended, ended - began) for (began, ended), (begun, _) in pairwise(times)]
    assert len(pauses) == 3 and all(pause > 1.9 * took for pause, took in pauses)
