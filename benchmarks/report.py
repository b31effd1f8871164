"""Writing down what was measured: JSON under out/benchmarks, medians with their range, and the
machine it was measured on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
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
