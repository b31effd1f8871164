"""A call over the line is answered, raises, or tells that the process at the other end is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import pytest

from train_fn.ranks.line import LineEnded, Wire

Serve = Callable[[str, tuple[Any, ...]], Any]


class Pair:
    """A rank's end that serves as told, and a host's end that serves nothing."""

    def __init__(self, serve: Serve) -> None:
        self.ended = threading.Event()
        self._sockets = socket.socketpair()
        mine, theirs = (Connection(each.detach()) for each in self._sockets)
        self.theirs = theirs
        self.host = Wire(mine, lambda name, arguments: None, self.ended.set)
        self.rank = Wire(theirs, serve)

    def cut(self) -> None:
        """End the rank's process, as far as the host can tell."""
        with socket.socket(fileno=self.theirs.fileno()) as end:
            end.shutdown(socket.SHUT_RDWR)
            end.detach()


@pytest.fixture
def pairs() -> Iterator[Callable[[Serve], Pair]]:
    made: list[Pair] = []

    def pair(serve: Serve) -> Pair:
        made.append(Pair(serve))
        return made[-1]

    yield pair
    for each in made:
        each.cut()
        assert each.ended.wait(20), "the other end is told"


class Unpicklable(Exception):
    """Its copy cannot be made from its message alone, as those of many libraries."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def test_a_call_that_waits_delays_no_other_one(pairs: Callable[[Serve], Pair]) -> None:
    opened = threading.Event()

    def serve(name: str, arguments: tuple[Any, ...]) -> Any:
        return opened.wait(20) if name == "waits" else arguments

    pair = pairs(serve)
    waiting = pair.host.ask("waits")
    assert pair.host.call("at once", 1, "two", timeout_s=20) == (1, "two")
    assert not waiting.done()
    with pytest.raises(TimeoutError):
        pair.host.call("waits", timeout_s=0.01)
    opened.set()
    assert waiting.result(20) is True


def test_an_answer_may_be_to_come(pairs: Callable[[Serve], Pair]) -> None:
    """As of what the main thread of a rank does."""
    coming: list[Future[int]] = [Future(), Future()]
    pair = pairs(lambda name, arguments: coming[arguments[0]])
    first, second = pair.host.ask("train", 0), pair.host.ask("train", 1)
    coming[1].set_exception(KeyError("later"))
    coming[0].set_result(7)
    assert first.result(20) == 7
    with pytest.raises(KeyError, match="later"):
        second.result(20)


@pytest.mark.parametrize(
    ("raised", "found"),
    [
        (ValueError("wrong"), ValueError),
        (Unpicklable("a", "b"), RuntimeError),
        (SystemExit(3), SystemExit),
    ],
)
def test_what_a_function_raises_arrives_in_words_if_not_as_it_is(
    raised: BaseException, found: type[BaseException], pairs: Callable[[Serve], Pair]
) -> None:
    def serve(name: str, arguments: tuple[Any, ...]) -> Any:
        raise raised

    pair = pairs(serve)
    with pytest.raises(found, match=str(raised)):
        pair.host.call("fails", timeout_s=20)
    with pytest.raises(found):
        pair.host.call("fails", timeout_s=20)  # and the line goes on


def test_an_answer_that_cannot_be_sent_is_an_error_of_the_call(
    pairs: Callable[[Serve], Pair],
) -> None:
    pair = pairs(lambda name, arguments: threading.Lock())
    with pytest.raises(TypeError, match="pickle"):
        pair.host.call("a lock", timeout_s=20)


def test_all_calls_end_with_the_process_at_the_other_end(pairs: Callable[[Serve], Pair]) -> None:
    reached = threading.Event()

    def serve(name: str, arguments: tuple[Any, ...]) -> Any:
        reached.set()
        threading.Event().wait(60)

    pair = pairs(serve)
    waiting = pair.host.ask("waits")
    assert reached.wait(20)
    pair.cut()
    with pytest.raises(LineEnded):
        waiting.result(20)
    assert pair.ended.wait(20)
    with pytest.raises(LineEnded, match="later: the process is gone"):
        pair.host.call("later", timeout_s=20)
