"""Measure a node before a run's ranks first run there: arithmetic, memory, storage, links."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from train_fn.node.device import Product, compare_products, kernels
from train_fn.node.network import LINK_BYTES, best_time, interface_problem
from train_fn.node.node_dir import own_temporary_dir, shared_memory_root

# ---------------------------------------------------------------- fitness

# Compare what was measured on nodes, and find those that are not fit for ranks.

FAR_SLOWER = 5.0
"""A node that is so many times slower than the median of the others is unfit."""
NOTICEABLE_S = 0.1
"""Shorter times measure the clock more than the node."""

logger = logging.getLogger(__name__)


@dataclass
class NodeFigures:
    """The measurements of one rank's node. Times are in seconds, the best of several."""

    rank: int
    host: str
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    kernels: str = ""
    """What decides the last bits of its results (``kernels``)."""
    product: str | None = None
    """Digest of a product of matrices that is the same on every node; None if it failed."""


def unfit(found: Sequence[NodeFigures], far_slower: float = FAR_SLOWER) -> dict[int, list[str]]:
    """Return the problems of nodes by rank: failed checks, results that most others do not have,
    and times far above the others'.

    An all-reduce is as slow as the slowest rank, and blames nobody.
    """
    problems = wrong(found)
    for name in sorted(
        {name for figures in found for name in figures.seconds if not name.startswith("sum_")}
    ):
        measured = {
            figures.rank: figures.seconds[name] for figures in found if name in figures.seconds
        }
        for rank, seconds in measured.items():
            others = [other for peer, other in measured.items() if peer != rank]
            if (
                others
                and seconds > NOTICEABLE_S
                and seconds > far_slower * statistics.median(others)
            ):
                problem = (
                    f"{name} takes {seconds:.3f} s, {seconds / statistics.median(others):.0f} "
                    "times what the others need"
                )
                problems.setdefault(rank, []).append(problem)
    return problems


def wrong(found: Sequence[NodeFigures]) -> dict[int, list[str]]:
    """Return the problems of nodes by rank that no time shows: failed checks, and results that most
    others do not have. Log it if results differ and nothing shows which are wrong."""
    problems = {figures.rank: list(figures.problems) for figures in found if figures.problems}
    others, undecided = compare_products(
        {each.rank: (each.kernels, each.product) for each in found if each.product is not None}
    )
    for rank, problem in others.items():
        problems.setdefault(rank, []).append(problem)
    for sentence in undecided:
        logger.warning("%s", sentence)
    return problems


# ---------------------------------------------------------------- preflight

MEMORY_BYTES = 16 << 20
DISK_BYTES = 8 << 20
SUM_BYTES = (4 << 10, 1 << 20, 16 << 20)
"""Sizes of the all-reduces, one after the other."""
KEPT_FREE_BYTES = 1 << 30
"""Least free space on the temporary disk and in shared memory, and least free memory."""


def check_own(rank: int, use_gpu: bool) -> NodeFigures:
    """Check this node in a process that has used no device before."""
    device = torch.device("cuda" if use_gpu else "cpu")
    return check_node(rank, device, own_temporary_dir())


def check_node(rank: int, device: torch.device, directory: Path) -> NodeFigures:
    """Measure arithmetic, memory and disk. No call waits for another node."""
    figures = NodeFigures(rank, os.uname().nodename)
    try:
        figures.kernels = kernels(device)
        product = Product(device)
    except Exception as exc:
        figures.problems.append(f"its device cannot be used: {exc}")
        return figures
    _enter(figures, "matmul", product.compute)
    figures.product = product.digest
    block = torch.zeros(MEMORY_BYTES // 8, dtype=torch.int64)
    _enter(
        figures,
        "memory",
        lambda: _check(
            int(block.fill_(3).sum()) == 3 * block.numel(), "memory gives back other bytes"
        ),
    )
    _enter(figures, "disk", lambda: _write_through(directory))
    return figures


def check_space(figures: NodeFigures, directory: Path) -> None:
    """Add a problem for each place with too little free space, and for too little memory."""
    for name, place in (("disk", directory), ("shared memory", shared_memory_root())):
        try:
            free_bytes = shutil.disk_usage(place).free
        except OSError as exc:
            figures.problems.append(f"{name}: {exc}")
            continue
        if free_bytes < KEPT_FREE_BYTES:
            figures.problems.append(f"{free_bytes >> 20} MiB are free of its {name} at {place}")
    available_bytes = psutil.virtual_memory().available
    if available_bytes < KEPT_FREE_BYTES:
        figures.problems.append(f"{available_bytes >> 20} MiB of memory are available")


def time_links(figures: NodeFigures, world_size: int, device: torch.device) -> None:
    """Time an exchange with each neighbour in a ring, then all-reduces. A collective."""
    block = torch.ones(LINK_BYTES // 4, device=device)
    links = []
    for first in range(world_size if world_size > 2 else world_size - 1):
        pair = (first, (first + 1) % world_size)
        if figures.rank in pair:
            other = pair[1] if figures.rank == pair[0] else pair[0]
            links.append(best_time(lambda peer=other: _exchange(block, peer, figures.rank)))  # type: ignore[misc]
    if links:
        # a node whose better link is slow is slow itself; else its neighbour is
        figures.seconds["link"] = min(links)
    for size_bytes in SUM_BYTES:
        numbers = torch.ones(size_bytes // 4, device=device)
        seconds = best_time(lambda tensor=numbers: _add_up(tensor, world_size))  # type: ignore[misc]
        figures.seconds[f"sum_{size_bytes >> 10}k"] = seconds


def _enter(figures: NodeFigures, name: str, action: Callable[[], None]) -> None:
    try:
        figures.seconds[name] = best_time(action, enough_s=NOTICEABLE_S)
    except (OSError, RuntimeError, ValueError) as exc:
        figures.problems.append(f"{name}: {exc}")


def _check(right: bool, problem: str) -> None:
    if not right:
        raise ValueError(problem)


def _write_through(directory: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(bytes(DISK_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _exchange(block: torch.Tensor, peer: int, rank: int) -> None:
    """Send the block to the peer, and receive it."""
    for sender in sorted((rank, peer)):
        if sender == rank:
            dist.send(block, peer)
        else:
            dist.recv(block, peer)
    float(block[0])


def _add_up(numbers: torch.Tensor, world_size: int) -> None:
    numbers.fill_(1)
    dist.all_reduce(numbers)
    _check(float(numbers[-1]) == world_size, "a sum over all ranks is wrong")


def report(found: Sequence[NodeFigures], problems: dict[int, list[str]]) -> str:
    """Return a line for each rank, followed by its problems."""
    lines = []
    for figures in found:
        times = ", ".join(
            f"{name} {seconds * 1000:.1f} ms" for name, seconds in figures.seconds.items()
        )
        lines.append(f"rank {figures.rank} on {figures.host}: {times}")
        lines += [f"  UNFIT: {problem}" for problem in problems.get(figures.rank, [])]
    return "\n".join(lines)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="torchrun … -m train_fn.node.preflight",
        description="Check nodes before runs use them.",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=30.0, metavar="S", help="longest wait for another node"
    )
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="disk to write to"
    )
    parser.add_argument(
        "--far-slower",
        type=float,
        default=FAR_SLOWER,
        metavar="N",
        help="times slower than the others' median",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node as one rank, and compare it with the others. Return the exit code: 0 if all
    nodes are fit, 1 if some are not, 2 if the check cannot start."""
    options = _arguments(argv)
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        print(f"error: {', '.join(missing)} not set: start this by torchrun", file=sys.stderr)
        return 2
    on_gpu = torch.cuda.is_available()
    problem = interface_problem(os.environ, nccl=on_gpu)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    figures = check_node(rank, device, options.directory)
    check_space(figures, options.directory)
    found = _figures_of_all(figures, world_size, device, options.timeout_s)
    problems = unfit(found, options.far_slower)
    if rank == 0:
        print(report(found, problems))
    dist.destroy_process_group()
    return 1 if problems else 0


def _figures_of_all(
    figures: NodeFigures, world_size: int, device: torch.device, timeout_s: float
) -> list[NodeFigures]:
    """Time the links, and return the figures of all ranks. A collective. End this process if a peer
    is lost."""
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s)
        )
        time_links(figures, world_size, device)
        found: list[NodeFigures] = [figures] * world_size
        dist.all_gather_object(found, figures)
    except (RuntimeError, ValueError) as exc:
        print(
            f"error: rank {figures.rank} on {figures.host} lost its peers: {exc}; "
            f"{'; '.join(figures.problems)}",
            file=sys.stderr,
        )
        os._exit(1)  # the group cannot be ended in order any more
    return found


if __name__ == "__main__":
    sys.exit(main())
