"""Text that can be stored and sent on: without NUL and without lone surrogates.

UTF-8 cannot represent lone surrogates; PostgreSQL columns and environment variables cannot hold
NUL. Python makes lone surrogates from file names that are not UTF-8, and they reach messages and
log lines. Requests with such text are refused (``faults``). Text of events is kept, with these
characters escaped (``written_out``). Terminal output is filtered further (``printable``,
``json_line``).
"""

from __future__ import annotations

import json
import re
from typing import Any

from everstep.errors import FieldError
from everstep.text.words import without_colours

MAX_DEPTH = 64
"""Maximum nesting of lists and mappings in a document."""

_UNSAYABLE = re.compile("[\x00\ud800-\udfff]")
_STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL and C1: terminals act on them
    # reverse the text direction, or end a line
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible
    "\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return one line without characters that control a terminal or hide text. Names and log lines
    come from other users."""
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", without_colours(text).replace("\t", "    "))


def printable_lines(text: str) -> str:
    """Return ``printable`` of each line of a text."""
    return "\n".join(map(printable, text.split("\n")))


def json_line(value: Any) -> str:
    """Return a value as one line of JSON that is safe on a terminal. Such characters are escaped,
    so nothing is lost."""
    return _STEERING.sub(
        lambda found: json.dumps(found[0])[1:-1], json.dumps(value, ensure_ascii=False)
    )


def is_sayable(text: str) -> bool:
    """Return whether a text has neither NUL nor lone surrogates."""
    return _UNSAYABLE.search(text) is None


def written_out(value: Any) -> Any:
    """Return a JSON value with such characters escaped in all its text: NUL as ``\\x00``,
    surrogates as ``\\udce9``."""
    if isinstance(value, str):
        return _UNSAYABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), value)
    if isinstance(value, dict):
        return {written_out(key): written_out(item) for key, item in value.items()}
    if isinstance(value, list):
        return [written_out(item) for item in value]
    return value


def may_need_it(line: bytes) -> bool:
    """Return whether ``written_out`` may change a line of JSON that Python wrote. A cheap check,
    with false positives."""
    return b"\\ud" in line or b"\\u0000" in line


def parse_json(data: bytes) -> Any:
    """Parse JSON from another process. Raise ValueError, also if it is nested more than MAX_DEPTH
    levels deep.

    Deeper values could be read here, but writing them to a response or a database would fail.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        value = None
        too_deep = True
    else:
        too_deep = data.count(b"[") + data.count(b"{") > MAX_DEPTH and not is_shallow(value)
    if too_deep:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
    return value


def is_shallow(value: Any) -> bool:
    """Return whether a JSON value is nested at most MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            if isinstance(node, dict | list)
            for item in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return True
    return False


def loads(line: bytes) -> Any:
    """Parse a line of JSON and apply ``written_out``. Raise ValueError as ``parse_json``."""
    value = parse_json(line)
    return written_out(value) if may_need_it(line) else value


def faults(value: Any) -> tuple[FieldError, ...]:
    """Return one entry for each text or key of a parsed document, at any depth, with such a
    character."""
    found: list[FieldError] = []
    left: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    # YAML aliases share parts: expanded, a document may be larger than memory
    seen: set[int] = set()
    while left:
        loc, item = left.pop()
        if isinstance(item, dict | list):
            if id(item) in seen:
                continue
            seen.add(id(item))
        if isinstance(item, str) and not is_sayable(item):
            found.append(
                FieldError(
                    loc,
                    (
                        f"contains {written_out(_UNSAYABLE.findall(item)[0])}, which cannot be "
                        "stored; remove it"
                    ),
                )
            )
        elif isinstance(item, dict):
            for key in item:
                if isinstance(key, str) and not is_sayable(key):
                    found.append(
                        FieldError(
                            (*loc, written_out(key)),
                            "contains a character that cannot be stored; remove it",
                        )
                    )
            left += [
                ((*loc, key), each)
                for key, each in reversed(item.items())
                if not isinstance(key, str) or is_sayable(key)
            ]
        elif isinstance(item, list):
            left += [((*loc, position), each) for position, each in reversed(list(enumerate(item)))]
    return tuple(found)
