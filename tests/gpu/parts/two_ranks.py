"""Two ranks share one GPU over NCCL, through Ray. One is killed at three places of a step, and one
is stopped; the final state equals that of an undisturbed run bit by bit.

On a CPU the collectives are the stand-in's, which fail as NCCL's do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from tests.chaos.deadly_loop import Strike
from tests.chaos.test_phases import PATIENCE, deadly_spec
from tests.gpu.shared_gpu import share_gpu
from tests.gpu.verdict import Shown
from tests.integration.driven_run import DrivenRun
from tests.integration.ray_cluster import RayCluster, ray_cluster
from tests.integration.test_exactness import assert_same, final_state
from tests.support.silent_backend import SilentOptions, autoload, autoload_plugin

STRIKES = [
    Strike("all_reduce", 1, 5, 1, SIGKILL),
    Strike("backward", 1, 9, 2, SIGKILL),
    Strike("commit", 1, 13, 3, SIGKILL),
    Strike("all_reduce", 1, 18, 4, SIGSTOP),
]
NEVER = [Strike("start", 1, 0, 99, SIGKILL)]


def run(device: torch.device, directory: Path) -> Shown:
    on_gpu = device.type == "cuda"
    with cluster_of(2, device, directory) as cluster:
        peace = train(cluster, directory / "peace", NEVER, device)
        struck = train(cluster, directory / "struck", STRIKES, device)
    failures = [(each.data["verdict"], each.data["first_rank"]) for each in struck.of(FAILURE)]
    assert failures == 3 * [("worker_lost", 1)] + [("hang", 1)], f"the failures were {failures}"
    seconds = recovered_without_loss(struck, len(STRIKES))
    assert_same(final_state(struck.run_dir), final_state(peace.run_dir))
    return Shown(
        "a rank killed in the exchange, in backward and in the commit, then one stopped: 0 steps "
        f"lost, weights, moments and statistics equal bit by bit, recovered in {seconds} s",
        "" if on_gpu else "NCCL, Ray's devices, the copy of the state from a GPU",
    )


def recovered_without_loss(run: DrivenRun, times: int) -> str:
    """Return the seconds of each recovery of a run, of which none lost a step."""
    recovered = [event.data for event in run.of(EventKind.RECOVERED)]
    lost = [data["steps_lost"] for data in recovered]
    assert lost == [0] * times, f"steps lost: {lost}"
    return ", ".join(f"{data['recovery_s']:.2f}" for data in recovered)


FAILURE = EventKind.FAILURE


def cluster_of(
    num_nodes: int, device: torch.device, directory: Path
) -> AbstractContextManager[RayCluster]:
    """Return a cluster whose nodes share the machine's GPU."""
    plug_in = directory / "plug-in"
    if device.type != "cuda":
        return ray_cluster(num_nodes, **autoload(plug_in, SilentOptions()))
    env = autoload_plugin(plug_in, "shared_gpu", share_gpu)
    return ray_cluster(num_nodes, gpus_per_node=1, **env)


def stand_in(device: torch.device) -> SilentOptions | None:
    """Return what stands for NCCL on a CPU."""
    return None if device.type == "cuda" else SilentOptions()


def train(
    cluster: RayCluster,
    directory: Path,
    strikes: list[Strike],
    device: torch.device,
    *,
    on_cpu: str = "silent",
    **changes: Any,
) -> DrivenRun:
    """Train two ranks to the end, and strike them on the way.

    Args:
        on_cpu: what carries collectives where there is no GPU.
        changes: other fields of ``train``.
    """
    spec = _spec(strikes, device, **changes)
    run = DrivenRun(cluster, directory, spec, module="tests.chaos.deadly_driver")
    try:
        run.start(**PATIENCE)
        assert run.wait_for_end() == 0, run.describe()
        backend = "nccl" if device.type == "cuda" else on_cpu
        places = {
            (event.data["device"], event.data["backend"])
            for event in run.of(EventKind.TRAINING_STARTED)
        }
        assert places == {(str(device), backend)}, f"the ranks trained on {places}"
        return run
    finally:
        print(run.describe(), flush=True)  # for the log
        run.stop()


def _spec(strikes: list[Strike], device: torch.device, **changes: Any) -> RunSpec:
    spec = deadly_spec(2, strikes).model_dump(mode="json")
    scaling = {**spec["scaling"], "use_gpu": device.type == "cuda"}
    train = {**spec["train"], "deterministic": True, **changes}
    return RunSpec.model_validate({**spec, "scaling": scaling, "train": train})
