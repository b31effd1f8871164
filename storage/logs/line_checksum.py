"""A checksum at the end of a JSON line: ``{…}`` becomes ``{…,"crc":"1a2b3c4d"}``."""

from __future__ import annotations

import re
import zlib

CHECKSUM_BYTES = 17
"""Number of bytes that it adds to a line."""
FIELD = "crc"
_SUFFIX = re.compile(rb',"crc":"([0-9a-f]{8})"}\Z')


def with_checksum(line: bytes) -> bytes:
    """Return a JSON object's line with the CRC-32 of its bytes as its last field."""
    return b'%s,"crc":"%08x"}' % (line[:-1], zlib.crc32(line))


def has_checksum(line: bytes) -> bool:
    """Return whether the line has a checksum; lines of older versions have none. Raises ValueError
    for a wrong one."""
    found = _SUFFIX.search(line, max(0, len(line) - CHECKSUM_BYTES - 1))
    if found is None:
        return False
    if zlib.crc32(b"}", zlib.crc32(line[: found.start()])) != int(found[1], 16):
        raise ValueError("its checksum does not match")
    return True
