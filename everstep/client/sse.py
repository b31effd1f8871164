"""Parse server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Message:
    """One server-sent event."""

    id: str | None
    """The last ``id:`` of the stream so far."""
    event: str
    data: str


def parse_sse(chunks: Iterable[bytes]) -> Iterator[Message]:
    """Yield the messages of a stream, whatever its chunk boundaries. An incomplete last message is
    dropped, as the standard requires.

    Works on bytes: splitting decoded text would also split at U+2028 and the like, which JSON may
    contain.
    """
    last_id: str | None = None
    event, data = "", list[str]()
    for line in _lines(chunks):
        if not line:
            if data:
                yield Message(last_id, event or "message", "\n".join(data))
            event, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            event = value
        elif field == "id" and "\0" not in value:
            last_id = value


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield complete lines without their ends. Each byte is scanned once, so the cost of a huge
    message is linear."""
    pending = list[bytes]()
    after_cr = False
    first = True
    for chunk in chunks:
        if not chunk:
            continue
        # second half of a \r\n that was split between two chunks
        if after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        after_cr = chunk.endswith(b"\r") if chunk else False
        start = 0
        for end in _LINE_END.finditer(chunk):
            pending.append(chunk[start : end.start()])
            line = b"".join(pending).decode("utf-8", errors="replace")
            yield line.removeprefix("\ufeff") if first else line
            first = False
            pending.clear()
            start = end.end()
        pending.append(chunk[start:])
