"""The ``Range`` header for a single range of bytes (RFC 9110, section 14)."""

from __future__ import annotations

import re
from typing import Final

from service.api.problems import ProblemError

_ONE_RANGE: Final = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*", re.IGNORECASE)


def requested_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Return (first byte, byte after the last) of the requested range.

    None means everything: no header, another unit, several ranges or an invalid one, all of which a
    server may ignore. Raises 416 if the range contains no byte of the content.
    """
    match = _ONE_RANGE.fullmatch(header or "")
    if match is None or match[0].strip().endswith("=-"):
        return None
    first, last = match[1], match[2]
    if first and last and int(first) > int(last):
        return None
    begin = int(first) if first else max(0, size_bytes - int(last))
    end = min(int(last) + 1, size_bytes) if first and last else size_bytes
    if begin >= size_bytes or (not first and not int(last)):
        raise ProblemError(
            416,
            "range_not_satisfiable",
            f"Range {header!r} contains no byte of the archive, which has {size_bytes} bytes",
            headers={"Content-Range": f"bytes */{size_bytes}"},
        )
    return begin, end
