"""The keeper's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; ``argv`` None reads those of this process."""
    parser = argparse.ArgumentParser(
        prog="python -m service.embedded.keeper",
        description="Start the nodes of a Ray cluster, watch them, and end them on SIGTERM.",
    )
    parser.add_argument("home", type=Path, help="the service's home directory")
    parser.add_argument(
        "--temp-dir", required=True, help="the cluster's own directory, which exists"
    )
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--cpus-per-node", type=int, required=True)
    parser.add_argument("--node-return-s", type=float, default=0.0)
    parser.add_argument(
        "--adopt", action="store_true", help="take over the running cluster of cluster.json"
    )
    return parser.parse_args(argv)
