"""Writing down what was measured: JSON under out/benchmarks, medians with their range, and the
machine it was measured on."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT = Path("out/benchmarks")


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, range and the values themselves."""
    rounded = [round(value, 4) for value in values]
    return {
        "median": round(statistics.median(values), 4),
        "min": min(rounded),
        "max": max(rounded),
        "values": rounded,
    }


def grown(
    counts: Sequence[int],
    rows: Sequence[Mapping[str, float]],
    digits: int,
    tells: Callable[[str, float, float], bool],
) -> dict[str, Any]:
    """Print a row for each part: its value at each of ``counts``, and the exponent with which it
    grows from the last but one to the last, if ``tells`` says of its name and these two values that
    one tells something."""
    results: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        grows = None
        if len(counts) > 1 and tells(name, values[-2], values[-1]):
            ratio = values[-1] / max(values[-2], 1e-9)
            grows = round(math.log(ratio) / math.log(counts[-1] / counts[-2]), 2)
        rounded = [round(value, digits) for value in values]
        results[name] = {**dict(zip(map(str, counts), rounded, strict=True)), "exponent": grows}
        print(f"{name:28}", *rounded, grows, flush=True)
    return results


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("everstep", "torch", "ray")},
    }


def write(name: str, results: dict[str, Any]) -> Path:
    """Write one benchmark's results to out/benchmarks/NAME.json and print them."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.json"
    body = {
        "benchmark": name,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "results": results,
    }
    path.write_text(json.dumps(body, indent=2) + "\n")
    print(json.dumps(results, indent=2), flush=True)
    print(f"written to {path}", flush=True)
    return path
