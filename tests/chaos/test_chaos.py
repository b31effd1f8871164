"""Seeded faults on real runs: each ends SUCCEEDED, its history holds to the invariants, and its
weights are, bit by bit, those of a run that made the same steps in peace.

``make chaos`` runs them all (``ARGS="-k seed7"`` one of them), ``make test-all`` a few seeds.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from everstep.client.runs import RunHandle
from service.annexes.nodes.care import NODE_VERDICTS
from tests.chaos.faults import plan, strike
from tests.chaos.history_checker import Expected, violations
from tests.chaos.replay import Segments, replay, segments
from tests.support.descriptors import more_than, open_descriptors
from tests.support.digits_run import SAMPLES, STEPS_PER_EPOCH
from tests.support.service_process import ServiceProcess, wait_for
from train_fn.node.node_dir import shared_memory_root

EPOCHS = {2: 60, 3: 48, 5: 36}
"""By the number of ranks: long enough that a run outlasts a service's restart."""
MODEL = {"name": "mini_resnet", "args": {"width": 8, "blocks_per_stage": 1}}
SHORT_SEEDS = (19,)
LONG_SEEDS = tuple(
    sorted((seed for seed in range(60) if seed not in SHORT_SEEDS), key=lambda seed: seed % 3)
)
ELASTIC_SEEDS = tuple(seed for seed in LONG_SEEDS if seed % 20 < 3)
"""Of each number of ranks three."""
BETWEEN_RAYLETS = "with raylet "
"""In the kinds of descriptors: a connection with another raylet, or its own."""
MOST_BETWEEN_RAYLETS = 12
"""Connections of a raylet with each other one. Ray opens those for objects one by one, as objects
travel, up to object_manager_client_connection_num (4) in each direction; so a run has more of them
than the one before. The rest manage the nodes."""
CLUSTER_AND_RUN_S = 900
"""Longest test: the first of a cluster starts it, which takes minutes on a busy machine."""
Replayed = Callable[[int, str, Segments], dict[str, torch.Tensor]]
"""Return weights for ranks at full size, ``train.exactness``, and the stretches of a history."""
FirstDescriptors = dict[tuple[int, float], Counter[str]]
WORLDS = (5, 2, 3)
"""Ranks of a seed, by its remainder; seeds of one size come together, so that they share a
cluster."""
MORE_FDS = 12
"""File descriptors that a long-lived process may have more of after a run than after an earlier
one: connections come and go."""


def world_of(seed: int) -> int:
    return WORLDS[seed % 3]


def spec(name: str, world: int, exactness: str = "world_size") -> dict[str, Any]:
    return {
        "name": name,
        "task": {"name": "image_classification", "model": MODEL, "data": {"name": "digits"}},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
        "train": {
            "epochs": EPOCHS[world],
            "global_batch_size": 128,
            "micro_batch_size": 32,
            "seed": 5,
            "exactness": exactness,
        },
        "scaling": {"min_workers": 1, "max_workers": world},
        "checkpoint": {"every_steps": 10},
        "recovery": {"hang_timeout_s": 6},
    }


@contextmanager
def clusters_with(env: dict[str, str]) -> Iterator[Callable[[int], ServiceProcess]]:
    """A service whose cluster has so many nodes: the same one for as long as the same number is
    asked for. ``env`` is added to its environment."""
    with ExitStack() as stack:
        running: dict[int, ServiceProcess] = {}

        def of(num_nodes: int) -> ServiceProcess:
            if num_nodes not in running:
                stack.close()
                running.clear()
                running[num_nodes] = stack.enter_context(ServiceProcess(nodes=num_nodes, env=env))
            return running[num_nodes]

        yield of


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[int], ServiceProcess]]:
    with clusters_with({}) as of:
        yield of


@pytest.fixture(scope="module")
def first_fds() -> FirstDescriptors:
    """What each long-lived process had open, by pid and start, after the first run that it saw."""
    return {}


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    """The weights after a history's stretches in peace; many histories have the same. Those of
    elastic runs are the weights of one rank, which was alone all the time."""
    found: dict[tuple[int, str, Segments], dict[str, torch.Tensor]] = {}

    def weights_after(world: int, exactness: str, stretches: Segments) -> dict[str, torch.Tensor]:
        if exactness == "elastic":
            stretches = ((stretches[-1][0], 1),)
        key = (world, exactness, stretches)
        if key not in found:
            directory = tmp_path_factory.mktemp("replay")
            found[key] = replay(stretches, spec("replay", world, exactness), directory)
        return found[key]

    return weights_after


def weights(run: RunHandle, directory: Path) -> dict[str, torch.Tensor]:
    path = run.download_checkpoint("latest", directory) / "model.pt"
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.timeout(CLUSTER_AND_RUN_S)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=() if seed in SHORT_SEEDS else pytest.mark.chaos, id=f"seed{seed}")
        for seed in (*SHORT_SEEDS, *LONG_SEEDS)
    ],
)
def test_seeded_faults(
    seed: int,
    clusters: Callable[[int], ServiceProcess],
    first_fds: FirstDescriptors,
    replayed: Replayed,
    tmp_path: Path,
) -> None:
    check_seed(seed, clusters(world_of(seed)), first_fds, replayed, tmp_path)


@pytest.mark.chaos
@pytest.mark.timeout(CLUSTER_AND_RUN_S)
@pytest.mark.parametrize("seed", ELASTIC_SEEDS)
def test_seeded_faults_change_no_bit_of_an_elastic_run(
    seed: int,
    clusters: Callable[[int], ServiceProcess],
    first_fds: FirstDescriptors,
    replayed: Replayed,
    tmp_path: Path,
) -> None:
    """Whatever dies, and however many ranks are left: the weights of one rank alone."""
    check_seed(seed, clusters(world_of(seed)), first_fds, replayed, tmp_path, "elastic")


def check_seed(
    seed: int,
    cluster: ServiceProcess,
    first_fds: FirstDescriptors,
    replayed: Replayed,
    directory: Path,
    exactness: str = "world_size",
) -> RunHandle:
    """Do the faults of a seed to a run on ``cluster``, and hold what must hold of it."""
    world = world_of(seed)
    cluster.mend()
    run = cluster.client().runs.create(spec(f"seed {seed}", world, exactness))
    done = [strike(fault, cluster, run) for fault in plan(seed, EPOCHS[world] * STEPS_PER_EPOCH)]
    run.wait(timeout_s=240)

    stretches = segments(run)
    print(
        json.dumps(
            {
                "seed": seed,
                "world": world,
                "rungs": [failure.rung for failure in run.failures()],
                "done": done,
                "lost": run.steps_lost,
                "at": stretches,
                "failures": _failures(run),
            }
        )
    )
    wanted = Expected(EPOCHS[world] * STEPS_PER_EPOCH, SAMPLES, EPOCHS[world])
    assert list(violations(run, wanted)) == []
    found, expected = weights(run, directory), replayed(world, exactness, stretches)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    _check_steps_lost(run)
    _check_blamed(run, done)
    _check_nothing_left(cluster, run)
    _check_file_descriptors(cluster, first_fds)
    return run


def _failures(run: RunHandle) -> list[dict[str, Any]]:
    """What the run says of its failures, for the record of a seed."""
    restored = [event for event in run.events() if event.kind == "restored"]
    failures = []
    for failure in run.failures():
        ranks = [
            (rank["state"], rank["step"], rank["snapshot_step"])
            for rank in (failure.evidence or {}).get("ranks", ())
        ]
        went_on = next((event.data for event in restored if event.attempt > failure.attempt), {})
        failures.append(
            {
                "verdict": failure.verdict,
                "step": failure.step,
                "lost": failure.steps_lost,
                "ranks": ranks,
                "from": (went_on.get("step"), went_on.get("source"), went_on.get("rejected")),
            }
        )
    return failures


def _check_steps_lost(run: RunHandle) -> None:
    """None where a rank survived, that is, where one left its step only because a peer, or the
    driver, was gone. Of several failures without a step in between, the last one has the cost."""
    nobody_survived = False
    for failure in run.failures():
        survived = any(
            rank["state"] == "collateral" for rank in (failure.evidence or {}).get("ranks", ())
        )
        nobody_survived |= not survived and failure.verdict != "control_plane"
        assert nobody_survived or not failure.steps_lost, failure
        nobody_survived &= failure.steps_lost is None


def _check_blamed(run: RunHandle, done: list[str | None]) -> None:
    """No node is counted out that nothing was done to, and no fault is called the user's."""
    struck = set(re.findall(r"node ([0-9a-f]{8})", " ".join(filter(None, done))))
    for failure in run.failures():
        assert failure.verdict not in ("user_error", "hardware"), failure
        if failure.node_id is not None and failure.verdict in NODE_VERDICTS:
            assert failure.node_id[:8] in struck, (failure, struck)


def _check_nothing_left(service: ServiceProcess, run: RunHandle) -> None:
    def clean() -> bool:
        left = _placement_groups(service, run.id) or _processes(run.id) or _actors(service)
        return not left and not (shared_memory_root() / run.id).exists()

    wait_for(clean, 120, f"the end of all that {run.id} held")


def _actors(service: ServiceProcess) -> list[str]:
    """Titles of the cluster's processes that belong to a run: its controller, journal and ranks."""
    titles = []
    for node in service.cluster()["nodes"]:
        try:
            children = psutil.Process(node["raylet_pid"]).children(recursive=True)
            titles += [" ".join(child.cmdline()) for child in children]
        except psutil.NoSuchProcess:
            continue
    return [
        title
        for title in titles
        if title.startswith("ray::") and re.search("Everstep|Journal|SynchronizationActor", title)
    ]


def _check_file_descriptors(service: ServiceProcess, first_fds: FirstDescriptors) -> None:
    """Of the processes that stay from run to run: the service, the cluster's keeper, and the nodes'
    raylets."""
    assert service.process is not None
    cluster = service.cluster()
    for pid in (
        service.process.pid,
        cluster["keeper_pid"],
        *(node["raylet_pid"] for node in cluster["nodes"]),
    ):
        try:
            process = psutil.Process(pid)
            key, found = (pid, process.create_time()), open_descriptors(process)
        except psutil.NoSuchProcess:
            continue
        between = sum(count for kind, count in found.items() if BETWEEN_RAYLETS in kind)
        first = first_fds.setdefault(key, found)
        found, first = (
            Counter({kind: count for kind, count in each.items() if BETWEEN_RAYLETS not in kind})
            for each in (found, first)
        )
        facts = (
            f"{process.cmdline()[:2]} has {found.total()} file descriptors, {first.total()} after "
            f"its first run, beside {between} connections to raylets; more are "
            f"{more_than(first, found)}"
        )
        print(facts)
        assert found.total() <= first.total() + MORE_FDS, facts
        assert between <= MOST_BETWEEN_RAYLETS * len(cluster["nodes"]), facts


def _placement_groups(service: ServiceProcess, run_id: str) -> list[str]:
    headers = {"Authorization": f"Bearer {(service.home / 'ray_token').read_text().strip()}"}
    url = f"{service.cluster()['dashboard_url']}/api/v0/placement_groups"
    answer = (
        httpx.get(url, headers=headers, params={"limit": 10_000, "detail": 0}, timeout=30)
        .raise_for_status()
        .json()
    )
    groups = answer["data"]["result"]["result"]
    return [
        group["name"]
        for group in groups
        if f"/{run_id}/" in (group["name"] or "") and group["state"] != "REMOVED"
    ]


def _processes(run_id: str) -> list[int]:
    """Processes that name the run: its driver and what the driver started."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                any(run_id in part for part in process.cmdline())
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
