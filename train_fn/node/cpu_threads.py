"""Set how many threads torch uses on a CPU, on which bitwise equal results depend."""

from __future__ import annotations

import torch

from everstep.spec.run_spec import RunSpec


def set_threads(spec: RunSpec) -> None:
    """Use as many torch threads as a rank has CPUs, in every attempt the same;
    ``env.OMP_NUM_THREADS`` overrides it.

    A process that was forked, or waited in the warm pool, imported torch before it knew its rank,
    and would use every core of its node.
    """
    if "OMP_NUM_THREADS" in spec.env:
        torch.set_num_threads(int(spec.env["OMP_NUM_THREADS"]))
    else:
        torch.set_num_threads(max(1, int(spec.scaling.resources_per_worker.get("CPU", 1))))
