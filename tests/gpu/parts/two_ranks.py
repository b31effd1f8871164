"""Two ranks share one GPU, over gloo with CUDA tensors, through Ray. One is killed and one is
stopped; the final state equals that of an undisturbed run bit by bit.

NCCL refuses two ranks on one device. Everything else is the path of a run on GPUs: Ray's devices,
the loop, the rescue, the restart, the restored state.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from tests.chaos.deadly_loop import Strike
from tests.chaos.test_phases import PATIENCE, deadly_spec
from tests.gpu.gloo_on_gpus import take_gpus
from tests.gpu.verdict import Shown
from tests.integration.driven_run import DrivenRun
from tests.integration.ray_cluster import RayCluster, ray_cluster
from tests.integration.test_exactness import assert_same, final_state
from tests.support.silent_backend import autoload_plugin

STRIKES = [Strike("all_reduce", 1, 7, 1, SIGKILL), Strike("all_reduce", 1, 12, 2, SIGSTOP)]
NEVER = [Strike("start", 1, 0, 99, SIGKILL)]


def run(device: torch.device, directory: Path) -> Shown:
    on_gpu = device.type == "cuda"
    with cluster_of_two(device, directory) as cluster:
        peace = train(cluster, directory / "peace", NEVER, device)
        struck = train(cluster, directory / "struck", STRIKES, device)
    failures = [(each.data["verdict"], each.data["first_rank"]) for each in struck.of(FAILURE)]
    assert failures == [("worker_lost", 1), ("hang", 1)], f"the failures were {failures}"
    recovered = [event.data for event in struck.of(EventKind.RECOVERED)]
    lost = [data["steps_lost"] for data in recovered]
    assert lost == [0, 0], f"steps lost: {lost}"
    assert_same(final_state(struck.run_dir), final_state(peace.run_dir))
    seconds = ", ".join(f"{data['recovery_s']:.2f}" for data in recovered)
    return Shown(
        "a rank killed, then one stopped: 0 steps lost, weights, moments and statistics equal bit "
        f"by bit, recovered in {seconds} s",
        "" if on_gpu else "CUDA tensors, Ray's devices, the copy of the state from a GPU",
    )


FAILURE = EventKind.FAILURE


def cluster_of_two(device: torch.device, directory: Path) -> AbstractContextManager[RayCluster]:
    """Return a cluster of two nodes, which share the machine's GPU over gloo."""
    env = autoload_plugin(directory / "plug-in", "gloo_on_gpus", take_gpus)
    return ray_cluster(2, gpus_per_node=int(device.type == "cuda"), **env)


def train(
    cluster: RayCluster,
    directory: Path,
    strikes: list[Strike],
    device: torch.device,
    *,
    in_process: bool = False,
) -> DrivenRun:
    """Train two ranks to the end, and strike them on the way."""
    spec = _spec(strikes, device, in_process=in_process)
    run = DrivenRun(cluster, directory, spec, module="tests.chaos.deadly_driver")
    try:
        run.start(**PATIENCE)
        assert run.wait_for_end() == 0, run.describe()
        places = {
            (event.data["device"], event.data["backend"])
            for event in run.of(EventKind.TRAINING_STARTED)
        }
        assert places == {(str(device), "gloo")}, f"the ranks trained on {places}"
        return run
    finally:
        run.stop()


def _spec(strikes: list[Strike], device: torch.device, *, in_process: bool) -> RunSpec:
    spec = deadly_spec(2, strikes, in_process=in_process).model_dump(mode="json")
    scaling = {**spec["scaling"], "use_gpu": device.type == "cuda"}
    train = {**spec["train"], "deterministic": True}
    return RunSpec.model_validate({**spec, "scaling": scaling, "train": train})
