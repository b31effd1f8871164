"""Predicted time of a step and efficiency at any number of GPUs, from measured costs of one:
docs/performance.md has the formula.

    python -m benchmarks scaling --forward-s 0.033 --backward-s 0.066 --update-s 0.002 \\
        --parameters 25.6e6 --gpus-per-node 8 --intra-gb-s 450 --inter-gb-s 50

Nothing is measured here. The costs of one GPU come from `python -m benchmarks gpu`, those of a CPU
rank from `throughput`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.report import write

FIRST_BUCKET_BYTES = 1 << 20
"""DDP's first bucket is small, so that the wire has something to do early."""


@dataclass(frozen=True)
class Compute:
    """What one rank does in a step, in seconds, whatever the number of ranks."""

    forward_s: float
    """Forward passes, and all backward passes but the last."""
    backward_s: float
    """The last backward pass, the one that synchronises."""
    update_s: float
    """Clipping, optimizer, bookkeeping."""
    jitter_s: float = 0.0
    """Standard deviation of all this from step to step and from rank to rank: the slowest rank sets
    the pace."""


@dataclass(frozen=True)
class Network:
    """Links as one GPU sees them. Bandwidths in bytes/s and one direction, latencies in seconds a
    hop."""

    gpus_per_node: int
    intra_bytes_per_s: float
    intra_latency_s: float
    inter_bytes_per_s: float
    """Of a GPU's own network card, or its share of the node's."""
    inter_latency_s: float


def buckets(gradient_bytes: float, bucket_bytes: float) -> list[float]:
    """Sizes in the order in which backward fills them: a small one, whole ones, and the rest."""
    sizes = [min(gradient_bytes, FIRST_BUCKET_BYTES)]
    while (left := gradient_bytes - sum(sizes)) > 0.5:
        sizes.append(min(bucket_bytes, left))
    return sizes


def all_reduce_s(size_bytes: float, num_gpus: int, network: Network) -> float:
    """A ring within each node, and one ring over nodes for each GPU's part, as NCCL does it; 0 for
    one GPU."""
    local = min(num_gpus, network.gpus_per_node)
    nodes = -(-num_gpus // network.gpus_per_node)
    within = (
        2 * (local - 1) * (size_bytes / local / network.intra_bytes_per_s + network.intra_latency_s)
    )
    across = (
        2 * (nodes - 1) * (size_bytes / local / nodes / network.inter_bytes_per_s)
        + _hops(nodes) * network.inter_latency_s
    )
    return within + across


def _hops(nodes: int) -> float:
    """Latency counts once up and once down a tree: beyond a few nodes NCCL leaves the ring for
    small messages."""
    return 2.0 * (nodes - 1).bit_length()


def step_s(compute: Compute, sizes: list[float], num_gpus: int, network: Network) -> float:
    """Backward hands over one bucket after the other; each travels when it is full and the one
    before it has arrived."""
    total = sum(sizes)
    ends, filled, arrived = [0.0], 0.0, 0.0
    for size in sizes:
        filled += size
        full_s = compute.backward_s * filled / total
        arrived = max(full_s, arrived) + all_reduce_s(size, num_gpus, network)
        ends.append(arrived)
    assert all(before <= after for before, after in pairwise(ends))
    slowest_s = compute.jitter_s * math.sqrt(2 * math.log(num_gpus))
    return compute.forward_s + max(compute.backward_s, arrived) + compute.update_s + slowest_s


def predict(
    compute: Compute,
    gradient_bytes: float,
    bucket_bytes: float,
    counts: list[int],
    network: Network,
) -> list[dict[str, float]]:
    """For each number of GPUs the step's seconds, the wire's, what of it is not hidden, and the
    efficiency against one GPU."""
    sizes = buckets(gradient_bytes, bucket_bytes)
    alone = step_s(compute, sizes, 1, network)
    rows = []
    for count in counts:
        seconds = step_s(compute, sizes, count, network)
        wire = sum(all_reduce_s(size, count, network) for size in sizes)
        rows.append(
            {
                "gpus": count,
                "step_s": round(seconds, 6),
                "wire_s": round(wire, 6),
                "exposed_s": round(seconds - alone, 6),
                "efficiency": round(alone / seconds, 4),
            }
        )
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--forward-s", type=float, required=True)
    parser.add_argument("--backward-s", type=float, required=True)
    parser.add_argument("--update-s", type=float, default=0.0)
    parser.add_argument("--jitter-ms", type=float, default=0.0)
    parser.add_argument("--parameters", type=float, required=True)
    parser.add_argument("--gradient-bytes-each", type=float, default=4)
    parser.add_argument("--bucket-mib", type=float, default=25)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 1024])
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument(
        "--intra-gb-s", type=float, default=450, help="GB/s in one direction between GPUs of a node"
    )
    parser.add_argument("--intra-us", type=float, default=3)
    parser.add_argument(
        "--inter-gb-s",
        type=float,
        default=50,
        help="GB/s in one direction of a GPU's share of the network",
    )
    parser.add_argument("--inter-us", type=float, default=10)
    options = parser.parse_args(argv)
    network = Network(
        options.gpus_per_node,
        options.intra_gb_s * 1e9,
        options.intra_us * 1e-6,
        options.inter_gb_s * 1e9,
        options.inter_us * 1e-6,
    )
    compute = Compute(
        options.forward_s, options.backward_s, options.update_s, options.jitter_ms / 1000
    )
    gradient_bytes = options.parameters * options.gradient_bytes_each
    rows = predict(compute, gradient_bytes, options.bucket_mib * (1 << 20), options.gpus, network)
    write("scaling", {"inputs": vars(options), "predicted": rows})
