"""Hosts that are cut off from one role of the deployment and reach all others: who owns a run then,
and what goes on meanwhile."""

from __future__ import annotations

import time

import pytest

from everstep.wire.events import Event, EventKind
from storage.run_dir import CheckpointName
from tests.hosts.compose_file import is_possible
from tests.hosts.deployment import Deployment
from tests.hosts.network import apart, deaf
from tests.hosts.trial import NUM_WORKERS, Trial, host_of
from tests.support.service_process import ASK_S, wait_for

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root on Linux"),
]

CHECKPOINT_S = 40.0
"""A replaced rank that does not hear the journal lives on until its next checkpoint, when it asks
the storage who owns the run."""
LONELY = {
    "checkpoint": {"every_steps": None, "every_s": CHECKPOINT_S, "keep_latest": 100},
    "recovery": {"hang_timeout_s": 10},
}
CUT_S = 20.0
SERVICES = ("service-a", "service-b")
PAIRS = {
    "a worker and the head": (("worker",), ("head",)),
    "a worker and the storage": (("worker",), ("object-store",)),
    "the head and the storage": (("head",), ("object-store",)),
    "the service and the head": (SERVICES, ("head",)),
    "the service and the storage": (SERVICES, ("object-store",)),
    "the service and the database": (SERVICES, ("database",)),
}


class Owners:
    """A run whose first attempt's rank 0 no longer hears the head, and the attempt that the head
    began in its place."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.first = trial.run.attempts()[-1]
        self.old = trial.hosts.hosts[host_of(trial, 0)]
        self._pid = next(worker.pid for worker in self.first.workers if worker.rank == 0)
        self.begun: Event | None = None
        self.restored: Event | None = None

    def old_lives(self) -> bool:
        return self.old.has_process(self._pid)

    def wait_for_the_second(self) -> int:
        """Wait until the next attempt trains; the steps that it began with."""
        self.restored = wait_for(self._restored, 300, "the next attempt", every_s=ASK_S)
        [self.begun] = [
            event
            for event in self.trial.run.events()
            if event.kind == EventKind.ATTEMPT_STARTED and event.attempt == self.restored.attempt
        ]
        step = int(self.restored.data["step"])
        self.trial.reach(step + 1)
        return step

    def _restored(self) -> Event | None:
        return next(
            (
                event
                for event in self.trial.run.events()
                if event.kind == EventKind.RESTORED and event.attempt > self.first.attempt
            ),
            None,
        )

    def stored_checkpoints(self) -> list[str]:
        """Names of all that is committed in the storage, whether or not anybody was told of it."""
        code = (
            "import sys; from storage.checkpoints.store import CheckpointStore; "
            "from storage.filesystem import open_storage; from storage.run_dir import RunDir; "
            "store = CheckpointStore(RunDir(open_storage(sys.argv[1]), sys.argv[2])); "
            "print(*(manifest.name for manifest in store.list()))"
        )
        service = self.trial.hosts.hosts["service-a"]
        done = service.run(
            ["python", "-c", code, self.trial.hosts.storage, self.trial.run.id], timeout_s=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def late_checkpoints(self) -> list[str]:
        """What the first attempt has committed beyond the step from which the next one went on."""
        assert self.restored is not None
        found = []
        for text in self.stored_checkpoints():
            name = CheckpointName.parse(text)
            assert name is not None
            if name.attempt == self.first.attempt and name.step > self.restored.data["step"]:
                found.append(text)
        return found

    def check(self) -> None:
        """Wait for the end, and hold that all since the next attempt's beginning is the newer
        attempts' alone."""
        assert self.begun is not None
        record = self.trial.finish()
        assert record["submissions"] == 1
        run = self.trial.run
        last = run.attempts()[-1]
        newest = run.checkpoint("latest")
        assert newest.name == str(CheckpointName(run.step, run.submission, last.attempt))
        assert newest.name in self.stored_checkpoints() and self.late_checkpoints() == []
        tellers = {event.attempt for event in run.events() if event.seq > self.begun.seq}
        assert tellers - {0} == set(range(self.begun.attempt, last.attempt + 1))


def test_rank_0_is_cut_off_from_the_head_until_it_ends(whole: Deployment) -> None:
    """It trains on, beside the next attempt, until it is to commit a checkpoint: then it finds in
    the storage that the run is not its own any more."""
    owners = Owners(Trial.begun(whole, "headless", 200, 1, LONELY))
    head, store = (whole.hosts[name].cable for name in ("head", "object-store"))
    with apart([owners.old.cable], [head]):
        assert not owners.old.reaches(head.ip) and owners.old.reaches(store.ip)
        owners.wait_for_the_second()
        assert owners.old_lives(), "there was nobody to be fenced"
        wait_for(lambda: not owners.old_lives(), 2 * CHECKPOINT_S, "its end", every_s=1)
        assert owners.late_checkpoints() == []
    owners.check()


def test_rank_0_hears_the_head_again_long_after_the_next_attempt_trains(whole: Deployment) -> None:
    """What it has done since is on its way to the journal then. Nothing of it is taken, and it
    ends."""
    never = {**LONELY, "checkpoint": {"every_steps": None, "every_s": 900}}
    owners = Owners(Trial.begun(whole, "headless for a while", 200, 1, never))
    head = whole.hosts["head"].cable
    with apart([owners.old.cable], [head]):
        began_at = owners.wait_for_the_second()
        owners.trial.reach(began_at + 200)
        assert owners.old_lives(), "there was nobody to be fenced"
    wait_for(lambda: not owners.old_lives(), 120, "its end", every_s=1)
    owners.check()


@pytest.mark.parametrize("hang_timeout_s", [None, 10])
def test_rank_0_of_three_is_cut_off_from_the_head(
    hang_timeout_s: float | None, whole: Deployment
) -> None:
    """It hears its peers, which go on without it and lose nothing: also where the time after which
    a rank hangs is shorter than it takes to give a host up."""
    changes = {
        "checkpoint": {"every_steps": None, "every_s": 900},
        "recovery": {"hang_timeout_s": hang_timeout_s},
    }
    owners = Owners(Trial.begun(whole, "headless among three", 130, changes=changes))
    head, peer = whole.hosts["head"].cable, whole.hosts[host_of(owners.trial, 1)].cable
    with apart([owners.old.cable], [head]):
        assert not owners.old.reaches(head.ip) and owners.old.reaches(peer.ip)
        owners.trial.reach(owners.wait_for_the_second() + 40)
        assert owners.trial.run.world_size == NUM_WORKERS - 1
        assert owners.late_checkpoints() == []
    assert owners.restored is not None
    assert owners.restored.data["source"] == "snapshot"
    owners.check()
    assert owners.trial.run.steps_lost == 0
    first = owners.trial.run.failures()[0]
    assert (first.verdict, first.first_rank) == ("node_lost", 0)


def test_a_path_between_two_workers_that_loses_large_packets(whole: Deployment) -> None:
    """Nobody dies, the head hears both, and both connect to each other: the two are named, the path
    is tried before the next attempt, and the run goes on without one of them."""
    changes = {"checkpoint": {"every_steps": None, "every_s": 900}}
    trial = Trial.begun(whole, "large packets lost", 130, changes=changes)
    one, other = (whole.hosts[host_of(trial, rank)].cable for rank in (1, 2))
    names = {worker.node_ip: worker.node_id for worker in trial.run.attempts()[-1].workers}
    pair = sorted(names[cable.ip] for cable in (one, other))
    with one.loses_large_packets_to(other), other.loses_large_packets_to(one):
        assert whole.hosts[host_of(trial, 1)].reaches(other.ip)
        wait_for(lambda: trial.run.failures(), 120, "the failure", every_s=ASK_S)
        wait_for(
            lambda: (
                trial.run.refresh().world_size == NUM_WORKERS - 1 and trial.run.status == "RUNNING"
            ),
            180,
            "two ranks that train",
            every_s=ASK_S,
        )
        trial.reach(trial.run.refresh().step + 20)
    failures = trial.run.failures()
    first = failures[0]
    assert (first.verdict, first.first_rank, first.node_id) == ("unknown", None, None)
    assert first.evidence["pairs"] == [pair]
    assert first.exception == f"nodes {pair[0][:8]} and {pair[1][:8]} do not hear each other"
    assert any("no bytes pass" in (failure.exception or "") for failure in failures[1:])
    states = {node["state"] for node in whole.api("GET", "/v1/cluster")["nodes"]}
    assert states == {"ALIVE"}, "nobody is cordoned"
    record = trial.finish()
    assert (record["steps_lost"], record["submissions"]) == (0, 1)


@pytest.mark.parametrize("pair", PAIRS)
def test_two_roles_do_not_hear_each_other(pair: str, whole: Deployment) -> None:
    """First the one does not hear the other, then the other the one. Nothing fails for it where
    ranks and head hear each other, and no step is lost anywhere.

    What rank 0 could not tell the head of before the next attempt began is refused once it can: the
    survivors tell it."""
    trial = Trial.begun(whole, f"{pair} apart", 130)
    one, other = (
        [whole.hosts[host_of(trial, 0) if name == "worker" else name] for name in role]
        for role in PAIRS[pair]
    )
    for deafs, speakers in ((one, other), (other, one)):
        with deaf([host.cable for host in deafs], [host.cable for host in speakers]):
            assert not deafs[0].reaches(speakers[0].cable.ip)
            time.sleep(CUT_S)
        assert deafs[0].reaches(speakers[0].cable.ip)
        trial.reach(trial.run.refresh().step + 20)
    record = trial.finish()
    assert (record["steps_lost"], record["submissions"]) == (0, 1)
    assert record["failures"] == [] or pair == "a worker and the head"
