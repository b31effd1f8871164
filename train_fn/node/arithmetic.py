"""Check a node's arithmetic by a product of random matrices: every bit of the result counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from train_fn.samples.randomness import MASK64
from train_fn.step.word_sums import word_sum

MATMUL_SIZE = {"cpu": 1024, "cuda": 4096}
_SEED = 6361
_BITS = 24
"""Bits of a float32's significand: each of them is drawn."""


class Product:
    """A product of fixed random matrices on one device, to be computed again and again."""

    def __init__(self, device: torch.device) -> None:
        size = MATMUL_SIZE[device.type]
        generator = torch.Generator(device).manual_seed(_SEED)
        whole = torch.randint(0, 1 << _BITS, (size, size), generator=generator, device=device)
        # Exact, so that every kernel has the same factors: numbers in [-1, 1).
        self._matrix = whole.float().mul_(2.0 ** (1 - _BITS)).sub_(1.0)
        self.digest: str | None = None
        """Digest of the whole product; None before it is computed."""

    def compute(self) -> None:
        """Multiply the matrices. Raise ValueError if the product is another one than before."""
        digest = f"{word_sum(self._matrix @ self._matrix) & MASK64:016x}"
        if self.digest not in (None, digest):
            raise ValueError("a product of matrices is another one when it is computed again")
        self.digest = digest


def compare_products(products: Mapping[int, tuple[str, str]]) -> tuple[dict[int, str], list[str]]:
    """Return the problem of each rank whose product differs from that of most ranks with the same
    kernels, and a sentence for each kind of kernels where no majority shows which rank is wrong.

    Ranks with other kernels may round differently; they are not compared.

    Args:
        products: by rank, the kernels and the digest of the product.
    """
    problems: dict[int, str] = {}
    undecided: list[str] = []
    for kind in sorted({kind for kind, _ in products.values()}):
        own = {rank: digest for rank, (name, digest) in products.items() if name == kind}
        right, count = Counter(own.values()).most_common(1)[0]
        if 2 * count > len(own):
            problems |= {
                rank: f"a product of matrices is wrong: its digest is {digest}, and {right} on "
                f"{count} of {len(own)} nodes with the same kernels ({kind})"
                for rank, digest in own.items()
                if digest != right
            }
        else:
            each = ", ".join(f"{digest} on rank {rank}" for rank, digest in own.items())
            undecided.append(
                f"products of matrices differ between nodes with the same kernels ({each}): one "
                "of them computes wrongly, and no majority shows which. Check them beside a third "
                "node"
            )
    return problems, undecided
