"""Every figure that the simulation of large clusters rests on, in one place, each with where it is
from.

Seconds, bytes, bytes/s. MEASURED: docs/recovery.md on two cores. PUBLIC: published by others.
ASSUMED: ours, to be replaced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GPUS_PER_NODE = 8

# PUBLIC: Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research
# Clusters", HPCA 2025 (arXiv 2410.21680): a job on 16,384 GPUs is interrupted every 1.8 h, taken to
# be inversely proportional to the number of GPUs.
MTTF_AT_16384_S = 1.8 * 3600

# PUBLIC: for Llama 3 (arXiv 2407.21783, table 5) about three of five interruptions are faults of
# GPU or host hardware. The others end a process and leave its node.
NODE_SHARE = 0.6

# ASSUMED: until a node that failed, or another one in its place, is there.
REPLACED_S = 2 * 3600.0

# PUBLIC: Ray's own release benchmarks (release/perf_metrics: many_actors, many_pgs): what one GCS
# makes.
ACTORS_PER_S = 550.0
PLACEMENT_GROUPS_PER_S = 19.0

# PUBLIC: Si et al., "Collective Communication for 100k+ GPUs" (arXiv 2510.20171): NCCL's own start
# at 96,000 GPUs; taken as linear.
NCCL_INIT_S_PER_GPU = 265 / 96_000

# ASSUMED: a model of 1.5 billion parameters with AdamW, and the links of docs/performance.md.
STATE_BYTES = 1.5e9 * 16
DEVICE_TO_HOST_BYTES_PER_S = 20e9
WRITE_BYTES_PER_S = 2.5e9  # MEASURED: a state into fresh shared memory, 2.2 to 2.9
DIGEST_BYTES_PER_S = 11e9  # MEASURED: over a file that was just mapped
LOAD_BYTES_PER_S = 9e9  # MEASURED: from there into memory that is in use
NETWORK_BYTES_PER_S = 25e9
STORAGE_BYTES_PER_S = 2e9
"""Of one client that reads or writes one checkpoint."""


@dataclass(frozen=True)
class Costs:
    """What a failure, a growth and a save cost one policy, at any number of GPUs."""

    name: str
    recovery_s: float
    """From the failure to the next step, on two ranks: detection, decision, processes, restore of a
    small model."""
    grow_s: float | None
    """Without a step while a node is taken in, on two ranks; None where the group never grows."""
    again_s: float
    """How long a recovery takes that follows within ``warm_after_s`` of another one."""
    warm_after_s: float
    loses_steps: bool
    """Whether a failure costs the steps since the last checkpoint, even where ranks survive."""
    grow_loses_steps: bool
    stall_s: float
    """Training stands still so long for a save."""
    write_s: float
    """From the stall to the commit: what fails in between does not count as saved."""
    most_interval_s: float = math.inf
    """Longest time between two saves."""
    spare_share: float = 0.0
    """Share of all nodes that is kept idle to take the place of failed ones. 0: the group shrinks,
    where it can."""
    weighs_growth: bool = False
    """Whether the group grows only once that is worth its pause (``is_worth_growing``)."""
    per_gpu_s: float = 1 / ACTORS_PER_S + NCCL_INIT_S_PER_GPU
    """What each further GPU adds to a restart: its process, its part of the communicator."""
    state_s: float = 0.0
    """What the state adds to a restart: kept by survivors, sent to all."""

    def restart_s(self, num_gpus: int, recovery_s: float) -> float:
        return recovery_s + num_gpus * self.per_gpu_s + self.state_s


_SYNC_SAVE_S = STATE_BYTES / STORAGE_BYTES_PER_S
_READ_S = STATE_BYTES / STORAGE_BYTES_PER_S + STATE_BYTES / NETWORK_BYTES_PER_S
"""One node reads the checkpoint and sends it to all: better than most scripts, in which every rank
reads it."""

FRESH = Costs(
    name="Everstep, if all processes were new and it grew at once",
    recovery_s=0.58,  # MEASURED: median of 0.59, 0.57 (node), 0.65, 0.51 (rank)
    again_s=4.5,  # MEASURED: "within about 20 s of another recovery 3 to 6 s"
    warm_after_s=20.0,
    grow_s=3.8,  # MEASURED: without a step while a node is added
    loses_steps=False,
    grow_loses_steps=False,
    stall_s=STATE_BYTES / DEVICE_TO_HOST_BYTES_PER_S,
    write_s=STATE_BYTES / STORAGE_BYTES_PER_S,
    most_interval_s=1800.0,  # the default of checkpoint.max_interval_s
    state_s=STATE_BYTES * (1 / WRITE_BYTES_PER_S + 1 / DIGEST_BYTES_PER_S + 1 / LOAD_BYTES_PER_S)
    + STATE_BYTES / NETWORK_BYTES_PER_S,
)
KEPT = replace(
    FRESH,
    name="Everstep, if it grew at once",
    recovery_s=0.53,  # MEASURED: median of 0.51, 0.54, 0.53 (node)
    grow_s=0.51,  # MEASURED: a newcomer's pause, median of 0.47, 0.58, 0.51
    per_gpu_s=NCCL_INIT_S_PER_GPU,  # only what joins gets a process, before the others leave
    state_s=STATE_BYTES / NETWORK_BYTES_PER_S,  # to who joins: survivors hold theirs
)
EVERSTEP = replace(KEPT, name="Everstep", weighs_growth=True)
TORCHRUN = Costs(
    name="torchrun elastic",
    recovery_s=45.9,  # MEASURED: 45.9, 42.0; 47.0 before
    again_s=45.9,
    warm_after_s=0.0,
    grow_s=45.9,  # ASSUMED: a joining node restarts all, as a leaving one does
    loses_steps=True,
    grow_loses_steps=True,
    stall_s=_SYNC_SAVE_S,
    write_s=0.0,
    per_gpu_s=NCCL_INIT_S_PER_GPU,
    state_s=_READ_S,
)
RAY_TRAIN = replace(
    TORCHRUN,
    name="plain Ray Train",
    recovery_s=72.9,  # MEASURED: 72.8, 73.0; 70.3 before
    again_s=72.9,
    grow_s=6.8,  # MEASURED: a growth restarts the group, without a checkpoint first
    per_gpu_s=1 / ACTORS_PER_S + 1 / PLACEMENT_GROUPS_PER_S / GPUS_PER_NODE + NCCL_INIT_S_PER_GPU,
)
HOT_SPARE = replace(TORCHRUN, name="torchrun, 2 % hot spares", grow_s=None, spare_share=0.02)
POLICIES = (EVERSTEP, TORCHRUN, RAY_TRAIN, HOT_SPARE)

SHRUNK = replace(EVERSTEP, name="Everstep, if communicators stayed", per_gpu_s=0.0)
PROPOSALS = (FRESH, KEPT, SHRUNK)
"""What was changed, and what could be."""
