"""Compare what was measured on nodes, and find those that are not fit for ranks."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from train_fn.node.arithmetic import compare_products

FAR_SLOWER = 5.0
"""A node that is so many times slower than the median of the others is unfit."""
NOTICEABLE_S = 0.1
"""Shorter times measure the clock more than the node."""

logger = logging.getLogger(__name__)


@dataclass
class Figures:
    """The measurements of one rank's node. Times are in seconds, the best of several."""

    rank: int
    host: str
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    kernels: str = ""
    """What decides the last bits of its results (``kernels``)."""
    product: str | None = None
    """Digest of a product of matrices that is the same on every node; None if it failed."""


def unfit(found: Sequence[Figures], far_slower: float = FAR_SLOWER) -> dict[int, list[str]]:
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


def wrong(found: Sequence[Figures]) -> dict[int, list[str]]:
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
