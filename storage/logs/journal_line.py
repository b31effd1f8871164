"""A line of a journal: an event or a mark, with its encoding and decoding."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from everstep.spec import plain_text
from everstep.wire.events import EventKind
from storage.logs.line_checksum import CHECKSUM_BYTES, FIELD, with_checksum
from storage.logs.log_lines import MAX_LINE_BYTES, LogLine

_MARK_PREFIX = b'{"mark":'
KIND_BYTES = 120
"""The kind is within this many bytes of the start of a line."""
_MOST, _MOST_SECONDS = 2**31 - 1, 1e11
"""Largest number that a database column can hold, and a time some thousand years from now."""
_LONG_TEXT_CHARS = 10_000


@dataclass(frozen=True, kw_only=True)
class JournalEvent:
    """An event of a submission."""

    kind: EventKind
    at: float
    """Unix seconds, by the clock of the reporting host."""
    submission: int
    attempt: int = 0
    """Attempt that it belongs to; 0 for none."""
    data: dict[str, Any] = field(default_factory=dict)
    """JSON; everstep/wire/events.py describes it for each kind. Floats that are not finite are
    written as null."""
    source: str
    """Process that reports it: "driver.5f0c93ab", "rank-0.a003.9d1e44c0". The random part gives a
    restarted process a new name, since its ``source_n`` starts again."""
    source_n: int
    """Position among that source's events, increasing from 1."""
    n: int = 0
    """Position in the journal, from 1, without gaps. Assigned by JournalWriter; 0 before."""


def is_rank(source: str) -> bool:
    """Return whether a source is a rank of an attempt, not the driver or the controller."""
    return source.startswith("rank-")


def _check_types(event: JournalEvent) -> None:
    """Raise ValueError for a field that no writer writes: user code can write lines, too."""
    numbers = (event.submission, event.attempt, event.source_n, event.n)
    if not all(type(number) is int and 0 <= number <= _MOST for number in numbers):
        raise ValueError("submission, attempt, source_n and n must be whole numbers from 0")
    if type(event.at) not in (int, float) or not 0 <= event.at <= _MOST_SECONDS:
        raise ValueError("at must be unix seconds")
    if not isinstance(event.source, str) or not isinstance(event.data, dict):
        raise ValueError("source must be text, and data a mapping")


def is_mark(line: bytes) -> bool:
    return line.startswith(_MARK_PREFIX)


def encode(event: JournalEvent) -> bytes:
    """Return the event's line. Long texts are cut if the line would be too long for readers."""
    fields = {
        "n": event.n,
        "at": event.at,
        "kind": event.kind.value,
        "submission": event.submission,
        "attempt": event.attempt,
        "source": event.source,
        "source_n": event.source_n,
        "data": event.data,
    }
    line = dump(fields)
    if len(line) > MAX_LINE_BYTES - CHECKSUM_BYTES:
        line = dump({**fields, "data": _cut(event.data)})
    if len(line) > MAX_LINE_BYTES - CHECKSUM_BYTES:
        line = dump({**fields, "data": {"left_out_bytes": len(line)}})
    return with_checksum(line)


def _cut(value: Any) -> Any:
    """Return the value with every text cut to what a person would read."""
    if isinstance(value, str):
        return (
            value
            if len(value) <= _LONG_TEXT_CHARS
            else f"{value[:_LONG_TEXT_CHARS]}… ({len(value)} characters)"
        )
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(item) for item in value]
    return value


def dump(value: dict[str, Any]) -> bytes:
    try:
        return _to_json(value)
    except ValueError:
        return _to_json(_finite(value))


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Return a scalar of an array library as a number, anything else as text. An event that cannot
    be encoded would be resent for ever."""
    return (
        value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else str(value)
    )


def _finite(value: Any) -> Any:
    """Return the value with null for every float that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def decode(line: LogLine, is_whole: bool) -> JournalEvent | None:
    """Return the event in a line; None for a mark. Raises ValueError for anything else.

    Text that cannot be stored or sent on (lone surrogates, as in some error messages) is escaped.

    Args:
        is_whole: whether it has a matching checksum; lines of older versions have none.
    """
    if is_mark(line.data):
        if not is_whole:
            plain_text.parse_json(line.data)  # two lines that ran together start like a mark
        return None
    try:
        raw = plain_text.loads(line.data)
        if (raw.pop(FIELD, None) is not None) != is_whole:
            raise ValueError("its checksum is damaged")
        event = JournalEvent(**{**raw, "kind": EventKind(raw["kind"])})
        _check_types(event)
        return event
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"it is not an event: {exc!r}") from exc
