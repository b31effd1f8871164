"""``python -m benchmarks [NAME [OPTIONS]]``: one benchmark, or all of them in turn."""

from __future__ import annotations

import importlib
import sys

NAMES = ("main_job", "throughput", "recovery", "checkpoint")


def main() -> None:
    if len(sys.argv) > 1:
        if sys.argv[1] not in NAMES:
            sys.exit(f"unknown benchmark {sys.argv[1]!r}; there are: {', '.join(NAMES)}")
        chosen = [(sys.argv[1], sys.argv[2:])]
    else:
        chosen = [(name, []) for name in NAMES]
    for name, options in chosen:
        print(f"== {name}", flush=True)
        importlib.import_module(f"benchmarks.{name}").main(options)


if __name__ == "__main__":
    main()
