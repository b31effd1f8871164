"""Read a .wandb file: LevelDB's log format around W&B's own protocol buffers."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_HEADER_BYTES = 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Yield every record, as W&B's message ``Record``; fails for a wrong checksum."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B", "no .wandb file"
    at, parts = _HEADER_BYTES, b""
    while at + _HEADER_BYTES <= len(data):
        if _BLOCK_BYTES - at % _BLOCK_BYTES < _HEADER_BYTES:
            at += _BLOCK_BYTES - at % _BLOCK_BYTES
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + _HEADER_BYTES])
        body = data[at + _HEADER_BYTES : at + _HEADER_BYTES + length]
        if len(body) < length:
            return  # it is being written
        assert zlib.crc32(bytes([kind]) + body) == checksum, f"damaged at byte {at}"
        at += _HEADER_BYTES + length
        parts = body if kind in (_FULL, _FIRST) else parts + body
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the run's history."""
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row}
        for row in (each.history.item for each in records(path) if each.HasField("history"))
    ]
