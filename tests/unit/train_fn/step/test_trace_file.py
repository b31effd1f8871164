"""Traces as torch writes them: all-reduces are named by their bucket and added up, on gloo and on
NCCL."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from train_fn.step import trace_file

BUCKETS = (4000, 4000, 1200)


def span(
    name: str, ts: float, dur: float, cat: str = "user_annotation", **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": 2,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def gloo(ts: float, num_items: int, dur: float, kind: str = "float") -> dict[str, Any]:
    return span("gloo:all_reduce", ts, dur, **{"Input type": [kind], "Input Dims": [[num_items]]})


def nccl(ts: float, num_items: int, dur: float, dtype: str) -> dict[str, Any]:
    arguments = {"Collective name": "allreduce", "In msg nelems": num_items, "dtype": dtype}
    return span(
        "ncclDevKernel_AllReduce_Sum(ncclDevKernelArgsStorage<4096ul>)",
        ts,
        dur,
        "kernel",
        **arguments,
    )


def prepared(
    tmp_path: Path, events: list[dict[str, Any]], *sizes: int
) -> tuple[dict[str, Any], list[str]]:
    """What is told of a trace, and the names of its events."""
    raw, ready = tmp_path / "raw.json", tmp_path / "ready.json.gz"
    raw.write_text(json.dumps({"traceEvents": events}))
    summary = trace_file.prepare(raw, ready, sizes)
    return summary, [
        event["name"] for event in json.loads(gzip.decompress(ready.read_bytes()))["traceEvents"]
    ]


def test_gloo_s_all_reduces_are_told_from_the_small_one_beside_them(tmp_path: Path) -> None:
    events = [
        span("everstep step 7", 0, 2000),
        span("everstep step 8", 2000, 1000),
        span("aten::mm", 5, 1, "cpu_op"),
    ]
    for begin, slow in ((0.0, 1.0), (2000.0, 3.0)):
        events += [
            gloo(begin + 40, 300, 30 * slow),
            gloo(begin + 10, 1000, 100 * slow),
            gloo(begin + 20, 1000, 200),
        ]
        events += [gloo(begin + 15, 16, 5, "double")]
    summary, names = prepared(tmp_path, events, *BUCKETS)
    assert (summary["steps"], summary["step_s"]) == (2, 0.0015)
    assert summary["all_reduces"] == [
        {"bucket": 0, "size_bytes": 4000, "count": 2, "mean_s": 0.0002, "max_s": 0.0003},
        {"bucket": 1, "size_bytes": 4000, "count": 2, "mean_s": 0.0002, "max_s": 0.0002},
        {"bucket": 2, "size_bytes": 1200, "count": 2, "mean_s": 6e-05, "max_s": 9e-05},
        {"bucket": None, "size_bytes": 128, "count": 2, "mean_s": 5e-06, "max_s": 5e-06},
    ]
    assert names[2:6] == [
        "aten::mm",
        *(f"all-reduce of bucket {number} (0.00 MB)" for number in (2, 0, 1)),
    ]


def test_nccl_s_kernels_are_what_is_counted(tmp_path: Path) -> None:
    events = [
        span("nccl:all_reduce", 0, 1),
        nccl(10, 2000, 70, "BFloat16"),
        nccl(20, 2000, 50, "BFloat16"),
        nccl(30, 600, 9, "Half"),
    ]
    summary, _ = prepared(tmp_path, events, *BUCKETS)
    assert [(each["bucket"], each["count"], each["max_s"]) for each in summary["all_reduces"]] == [
        (0, 1, 7e-05),
        (1, 1, 5e-05),
        (2, 1, 9e-06),
    ]


def test_a_trace_without_peers_has_no_all_reduces(tmp_path: Path) -> None:
    summary, _ = prepared(tmp_path, [span("everstep step 1", 0, 500)])
    assert summary == {"steps": 1, "step_s": 0.0005, "all_reduces": []}


def test_a_trace_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="ask for fewer steps"):
        prepared(tmp_path, [span("everstep step 1", 0, 500)])
