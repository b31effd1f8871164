"""How many threads torch computes with on a CPU: part of what makes two runs bitwise the same."""

from __future__ import annotations

import torch

from everstep.spec.run_spec import RunSpec


def set_threads(spec: RunSpec) -> None:
    """As many torch threads as a rank has CPUs, in every attempt the same; ``env.OMP_NUM_THREADS``
    says otherwise.

    A process that was forked, or waited in the warm pool, imported torch before it knew its rank,
    and would take every core of its node.
    """
    if "OMP_NUM_THREADS" in spec.env:
        torch.set_num_threads(int(spec.env["OMP_NUM_THREADS"]))
    else:
        torch.set_num_threads(max(1, int(spec.scaling.resources_per_worker.get("CPU", 1))))
