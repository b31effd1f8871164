"""Let several ranks over NCCL share one GPU. For tests alone: it is slow.

NCCL refuses two ranks on a device of one host, and takes ``NCCL_HOSTID`` for the name of a host
(NCCL 2.28: ``getHostHash`` in ``src/misc/utils.cc``). With a name for each process, peer access and
shared memory are ruled out, and NCCL's sockets carry what ranks exchange. Its kernels, aborts,
time-outs and records are those of any other run. The contexts of the processes take turns on the
device, so a kernel that spins while it waits for a peer is pre-empted.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist

SOCKETS_ALONE = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    # few blocks that wait, one order of summation
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
_makes_hosts = False


def share_gpu() -> None:
    """Make every process group of this process one of a host of its own. Also a plug-in of
    torch's."""
    global _makes_hosts
    if _makes_hosts:
        return
    _makes_hosts, make_group = True, dist.init_process_group

    @functools.wraps(make_group)
    def make_as_a_host(*args: Any, **kwargs: Any) -> None:
        # here, since a forked worker is given its environment after the fork
        os.environ.update(SOCKETS_ALONE, NCCL_HOSTID=f"everstep-{os.getpid()}")
        make_group(*args, **kwargs)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = make_as_a_host  # type: ignore[attr-defined]
