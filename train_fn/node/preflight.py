"""Measure a node before a run's ranks first run there: arithmetic, memory and disk."""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from train_fn.node.device import Product, compare_products, kernels
from train_fn.node.network import best_time
from train_fn.node.node_dir import own_temporary_dir

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
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    kernels: str = ""
    """What decides the last bits of its results (``kernels``)."""
    product: str | None = None
    """Digest of a product of matrices that is the same on every node; None if it failed."""


def unfit(found: Sequence[NodeFigures]) -> dict[int, list[str]]:
    """Return the problems of nodes by rank: failed checks, results that most others do not have,
    and times far above the others'."""
    problems = wrong(found)
    for name in sorted({name for figures in found for name in figures.seconds}):
        measured = {
            figures.rank: figures.seconds[name] for figures in found if name in figures.seconds
        }
        for rank, seconds in measured.items():
            others = [other for peer, other in measured.items() if peer != rank]
            if (
                others
                and seconds > NOTICEABLE_S
                and seconds > FAR_SLOWER * statistics.median(others)
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


def check_own(rank: int, use_gpu: bool) -> NodeFigures:
    """Check this node in a process that has used no device before."""
    device = torch.device("cuda" if use_gpu else "cpu")
    return check_node(rank, device, own_temporary_dir())


def check_node(rank: int, device: torch.device, directory: Path) -> NodeFigures:
    """Measure arithmetic, memory and disk. No call waits for another node."""
    figures = NodeFigures(rank)
    try:
        figures.kernels = kernels(device)
        product = Product(device)
    except Exception as exc:
        figures.problems.append(f"its device cannot be used: {exc}")
        return figures
    _enter(figures, "matmul", product.compute)
    figures.product = product.digest
    block = torch.zeros(MEMORY_BYTES // 8, dtype=torch.int64)
    _enter(figures, "memory", lambda: _require_kept(block))
    _enter(figures, "disk", lambda: _write_through(directory))
    return figures


def _enter(figures: NodeFigures, name: str, action: Callable[[], None]) -> None:
    try:
        figures.seconds[name] = best_time(action, enough_s=NOTICEABLE_S)
    except (OSError, RuntimeError, ValueError) as exc:
        figures.problems.append(f"{name}: {exc}")


def _require_kept(block: torch.Tensor) -> None:
    if int(block.fill_(3).sum()) != 3 * block.numel():
        raise ValueError("memory gives back other bytes")


def _write_through(directory: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(bytes(DISK_BYTES))
        file.flush()
        os.fsync(file.fileno())
