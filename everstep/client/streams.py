"""Follow what a run streams, across breaks of the connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from pydantic import ValidationError

from everstep.client.transport import Params, Transport
from everstep.errors import EverstepError, RateLimited, ServiceError, Unavailable, WaitTimeout
from everstep.wire import Event, LogLine

Item = TypeVar("Item", bound=Event | LogLine)
MAX_GAPS = 3


@dataclass(frozen=True)
class Patience:
    """Timeouts of a silent stream, and of a service that is unreachable."""

    silence_s: float = 30.0
    """The service sends a heartbeat every 5 s. A connection without data for this long is
    replaced."""
    away_s: float = 600.0
    """Raise Unavailable after this many seconds without a working connection."""


class Part:
    """What the parts of a client share: how requests are sent, and how long is waited."""

    def __init__(self, transport: Transport, patience: Patience) -> None:
        self._transport = transport
        self._patience = patience

    def _wait(
        self,
        done: Callable[[], bool],
        refresh: Callable[[], object],
        late: Callable[[], str],
        timeout_s: float | None,
        pause_s: float = 0.5,
        most_pause_s: float = 0.5,
    ) -> None:
        """Call ``refresh`` until ``done``, with pauses that grow by half from ``pause_s`` to
        ``most_pause_s``.

        Keep waiting while the service is unreachable for less than ``Patience.away_s``; then raise
        Unavailable. Raise WaitTimeout with the text of ``late`` after ``timeout_s`` seconds.
        """
        timing = self._transport.timing
        started = alive_at = timing.now()
        while True:
            try:
                refresh()
                alive_at = timing.now()
            except Unavailable:
                if timing.now() - alive_at > self._patience.away_s:
                    raise
            if done():
                return
            left_s = None if timeout_s is None else started + timeout_s - timing.now()
            if left_s is not None and left_s <= 0:
                raise WaitTimeout(late())
            timing.sleep(pause_s if left_s is None else min(pause_s, left_s))
            pause_s = min(most_pause_s, pause_s * 1.5)


class Follower(Generic[Item]):
    """Items of one stream in order, each exactly once.

    Args:
        path, params: the list's endpoint, which also serves the stream.
        after: ``seq`` of the last known item; it advances with every item.
        contiguous: whether a jump of ``seq`` means a lost item.
        is_last: returns whether an item is the last one.
        has_ended: asks the service whether the run has ended; called when a stream ends without its
            last item.
    """

    def __init__(
        self,
        transport: Transport,
        path: str,
        item: type[Item],
        *,
        params: Params,
        stream_params: Params,
        after: int,
        contiguous: bool,
        is_last: Callable[[Item], bool],
        has_ended: Callable[[], bool],
        patience: Patience,
    ) -> None:
        self.after = after
        self._transport = transport
        self._timing = transport.timing
        self._path = path
        self._item = item
        self._params = params
        self._stream_params = stream_params
        self._contiguous = contiguous
        self._is_last = is_last
        self._has_ended = has_ended
        self._patience = patience
        self._gaps = 0

    def __iter__(self) -> Iterator[Item]:
        failures = 0
        alive_at = self._timing.now()
        while True:
            before = self.after
            try:
                for item in self._one_stream():
                    yield item
                    if self._is_last(item):
                        return
                if self._has_ended():
                    yield from self._rest()
                    return
                error: EverstepError | None = None
            except (Unavailable, RateLimited) as exc:
                error = exc
            now = self._timing.now()
            if self.after > before or error is None:
                alive_at = now
            failures = 1 if self.after > before else failures + 1
            if error is not None and now - alive_at > self._patience.away_s:
                raise error
            self._timing.sleep(self._timing.backoff_s(failures))

    def _one_stream(self) -> Iterator[Item]:
        """Yield the new items of one connection until it ends or breaks."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self.after:
            headers["Last-Event-ID"] = str(self.after)
        params = {**self._params, **self._stream_params, "after": self.after}
        with self._transport.stream(
            self._path, params=params, headers=headers, silence_s=self._patience.silence_s
        ) as response:
            if "text/event-stream" not in response.headers.get("Content-Type", ""):
                raise ServiceError(
                    f"GET {response.request.url}: the response is not an event stream; check for "
                    "a proxy in between"
                )
            for data in messages_of(response.iter_bytes()):
                item = self._new(self._parsed(data))
                if item is not None:
                    yield item

    def _parsed(self, data: str) -> Item:
        try:
            return cast(Item, self._item.model_validate_json(data))
        except ValidationError as exc:
            raise ServiceError(
                f"GET {self._path}: the stream contains an invalid item: {data[:120]!r}"
            ) from exc

    def _new(self, item: Item) -> Item | None:
        """Return the item if it is new. Raise Unavailable if one before it is missing, so that the
        stream is requested again."""
        seq = item.seq
        if seq <= self.after:
            return None
        if self._contiguous and seq != self.after + 1:
            self._gaps += 1
            message = f"GET {self._path}: item {self.after + 1} is missing before item {seq}"
            raise (
                Unavailable(message, code="gap")
                if self._gaps < MAX_GAPS
                else ServiceError(message, code="gap")
            )
        self._gaps = 0
        self.after = seq
        return item

    def _rest(self) -> Iterator[Item]:
        """Yield the items between the end of the stream and the end of the run."""
        for item in self._transport.pages(
            self._path, self._item, {**self._params, "after": self.after}
        ):
            new = self._new(item)
            if new is not None:
                yield new


# ---------------------------------------------------------------- sse

# Parse server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).


def messages_of(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each message of a stream, whatever its chunk boundaries. An incomplete last
    message is dropped, as the standard requires.

    Works on bytes: splitting decoded text would also split at U+2028 and the like, which JSON may
    contain.
    """
    data = list[str]()
    for line in _lines(chunks):
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield complete lines without their ends. Each byte is scanned once, so the cost of a huge
    message is linear."""
    pending = list[bytes]()
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*pending, end)).decode("utf-8", errors="replace").removesuffix("\r")
            pending.clear()
        pending.append(rest)
