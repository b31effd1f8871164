"""Prepare a profiler's trace for storage: name its all-reduces by bucket, pack it, and sum it up.

Run as a file, ``python -I trace_file.py RAW READY [BUCKET_BYTES …]``. It uses only the standard
library, starts beside a rank that trains, and writes the summary as JSON to standard output.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STEP = "everstep step"
"""Begins the name of the span of each step in a trace."""
MOST_BYTES = 512 * 1024 * 1024
_GLOO = "gloo:all_reduce"
_ITEM_BYTES = {
    **dict.fromkeys(("double", "int64", "long", "long int"), 8),
    **dict.fromkeys(("float", "int", "int32"), 4),
    **dict.fromkeys(("half", "c10::half", "bfloat16", "c10::bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("byte", "char", "uint8", "int8", "bool", "unsigned char", "signed char"), 1),
}

Event = dict[str, Any]


def prepare(raw: Path, ready: Path, bucket_sizes: Sequence[int]) -> dict[str, Any]:
    """Write ``ready``, gzipped, from the profiler's ``raw``.

    Args:
        raw: A trace in Chrome's format.
        ready: What to write.
        bucket_sizes: Bytes of DDP's buckets, in the order in which backward fills them; empty if
            the ranks exchange nothing.

    Returns:
        Its summary: ``steps``, ``step_s`` (their mean) and ``all_reduces``.

    Raises:
        ValueError: The trace is too large.
    """
    if raw.stat().st_size > MOST_BYTES:
        raise ValueError(
            f"the trace has {raw.stat().st_size / 1e6:.0f} MB, the limit is "
            f"{MOST_BYTES / 1e6:.0f} MB; ask for fewer steps"
        )
    trace = json.loads(raw.read_bytes())
    events: list[Event] = trace["traceEvents"]
    found = sorted(_all_reduces(events), key=lambda event: float(event["ts"]))
    by_bucket = _by_bucket(found, bucket_sizes)
    with gzip.open(ready, "wt", compresslevel=6, encoding="utf-8") as stream:
        json.dump(trace, stream, separators=(",", ":"))
    # On a GPU a step's span is there twice, also on the device's own track.
    spans = [
        event
        for event in events
        if str(event.get("name", "")).startswith(STEP) and event.get("cat") == "user_annotation"
    ]
    step_s = statistics.mean(event["dur"] for event in spans) / 1e6 if spans else None
    return {"steps": len(spans), "step_s": step_s, "all_reduces": by_bucket}


def _all_reduces(events: Sequence[Event]) -> Iterator[Event]:
    """Yield NCCL's kernels, which measure time on the device, or gloo's spans."""
    for event in events:
        if event.get("ph") != "X":
            continue
        arguments = event.get("args") or {}
        is_kernel = (
            event.get("cat") == "kernel"
            and "allreduce" in str(arguments.get("Collective name", "")).lower()
        )
        if is_kernel or event.get("name") == _GLOO:
            yield event


def _size_bytes(event: Event) -> int:
    arguments = event["args"]
    if "In msg nelems" in arguments:
        return int(arguments["In msg nelems"]) * _ITEM_BYTES.get(
            str(arguments.get("dtype", "float")).lower(), 4
        )
    kinds, shapes = arguments.get("Input type") or ["float"], arguments.get("Input Dims") or [[]]
    return int(math.prod(shapes[0])) * _ITEM_BYTES.get(str(kinds[0]).lower(), 4)


def _by_bucket(events: Sequence[Event], bucket_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return how long each bucket's all-reduces took, and name their events by it.

    Buckets are exchanged in order, once a step, and recognised by their size.
    """
    seconds: dict[int | None, list[float]] = {}
    largest: dict[int | None, int] = {}
    waited_for = list(enumerate(bucket_sizes))
    for event in events:
        size = _size_bytes(event)
        bucket = next((number for number, expected in waited_for if expected == size), None)
        if bucket is not None:
            waited_for = [each for each in waited_for if each[0] != bucket] or list(
                enumerate(bucket_sizes)
            )
            event["name"] = f"all-reduce of bucket {bucket} ({size / 1e6:.2f} MB)"
        seconds.setdefault(bucket, []).append(float(event["dur"]) / 1e6)
        largest[bucket] = max(largest.get(bucket, 0), size)
    return [
        {
            "bucket": bucket,
            "size_bytes": largest[bucket],
            "count": len(seconds[bucket]),
            "mean_s": round(statistics.mean(seconds[bucket]), 9),
            "max_s": round(max(seconds[bucket]), 9),
        }
        for bucket in sorted(seconds, key=lambda number: (number is None, number or 0))
    ]


if __name__ == "__main__":
    os.nice(10)
    print(
        json.dumps(
            prepare(Path(sys.argv[1]), Path(sys.argv[2]), [int(size) for size in sys.argv[3:]])
        )
    )
