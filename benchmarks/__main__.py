"""``python -m benchmarks [NAME [OPTIONS]]``: one benchmark, or all of them in turn."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "main_job",
    "start",
    "throughput",
    "recovery",
    "faults",
    "goodput",
    "steady",
    "protect",
    "checkpoint",
    "observe",
)
"""Run when none is named."""
ON_REQUEST = {
    "api": "api",
    "control_plane": "scale.control_plane",
    "elastic": "exactness",
    "gpu": "gpu.step_costs",
    "kills": "kills",
    "large_state": "large_state",
    "loader": "loader",
    "reconciler": "reconciler",
    "scale": "scale.sweep",
    "scaling": "scaling",
    "sharded": "sharded",
}
"""Take long, or need a GPU, cores, PostgreSQL, or figures to start from; the module of each."""


def main() -> None:
    if len(sys.argv) > 1:
        if sys.argv[1] not in (*NAMES, *ON_REQUEST):
            sys.exit(
                f"unknown benchmark {sys.argv[1]!r}; there are: {', '.join((*NAMES, *ON_REQUEST))}"
            )
        chosen = [(sys.argv[1], sys.argv[2:])]
    else:
        chosen = [(name, []) for name in NAMES]
    for name, options in chosen:
        print(f"== {name}", flush=True)
        importlib.import_module(f"benchmarks.{ON_REQUEST.get(name, name)}").main(options)


if __name__ == "__main__":
    main()
