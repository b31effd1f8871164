"""Text that every part can keep and send on: no halves of a surrogate pair, which UTF-8 cannot say,
and no NUL, which neither a column of PostgreSQL nor an environment variable can hold.

Both come from outside: Python makes such halves of file names that are not UTF-8, and they end up
in messages and log lines. What users ask for is refused (``faults``); what has happened is told all
the same, with these characters written out (``written_out``). What goes to a terminal loses more
(``printable``, ``json_line``).
"""

from __future__ import annotations

import json
import re
from typing import Any

from everstep.errors import FieldError

MAX_DEPTH = 64
"""Most levels of lists and mappings in a document."""

_UNSAYABLE = re.compile("[\x00\ud800-\udfff]")
_STEERING = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL and C1, which terminals obey
    # turn the order of what follows around, or end a line
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # are not seen
    "\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return one line without characters that steer a terminal or hide what is written: names and
    log lines come from others."""
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", text.replace("\t", "    "))


def printable_lines(text: str) -> str:
    """Return the same for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def json_line(value: Any) -> str:
    """Return a value as one line of JSON that is safe on a terminal: such characters are escaped,
    and so nothing is lost."""
    return _STEERING.sub(
        lambda found: json.dumps(found[0])[1:-1], json.dumps(value, ensure_ascii=False)
    )


def is_sayable(text: str) -> bool:
    return _UNSAYABLE.search(text) is None


def written_out(value: Any) -> Any:
    """A JSON value with such characters in any text of it as escapes: NUL as ``\\x00``, halves as
    ``\\udce9``."""
    if isinstance(value, str):
        return _UNSAYABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), value)
    if isinstance(value, dict):
        return {written_out(key): written_out(item) for key, item in value.items()}
    if isinstance(value, list):
        return [written_out(item) for item in value]
    return value


def may_need_it(line: bytes) -> bool:
    """Whether ``written_out`` may change what this JSON, as Python writes it, holds. Cheap; true
    for some that need nothing."""
    return b"\\ud" in line or b"\\u0000" in line


def parse_json(data: bytes) -> Any:
    """Return what JSON holds that others wrote. Raises ValueError, also for what is nested more
    than MAX_DEPTH levels deep.

    Deeper values could be read here, and then fail whoever writes them into an answer or a
    database.
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
    """Return what a line of JSON holds, ``written_out``. Raises ValueError as ``parse_json``."""
    value = parse_json(line)
    return written_out(value) if may_need_it(line) else value


def faults(value: Any) -> tuple[FieldError, ...]:
    """One entry for each text or key of a parsed document, at any depth, that holds such a
    character."""
    found: list[FieldError] = []
    left: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    # a document may hold one part in many places, and mean more than memory could
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
                        f"holds {written_out(_UNSAYABLE.findall(item)[0])}, which is no text; "
                        "leave "
                        "it out"
                    ),
                )
            )
        elif isinstance(item, dict):
            for key in item:
                if isinstance(key, str) and not is_sayable(key):
                    found.append(
                        FieldError(
                            (*loc, written_out(key)),
                            "is no name: a character of it is no text; leave it out",
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
