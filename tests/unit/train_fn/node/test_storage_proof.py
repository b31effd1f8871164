"""Nodes that do not share their storage are found before a step is trained; here every node is a
thread."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from everstep.wire import ReasonCode, Verdict
from storage.errors import StorageUnavailable
from storage.filesystem import open_storage
from storage.run_control import DRIVER_PROBE
from storage.run_dir import RunDir
from tests.support.saves import make_context
from train_fn import storage_proof
from train_fn.errors import StorageNotShared
from train_fn.recovery.decision import decide
from train_fn.recovery.evidence import Evidence, RankReport, describe_error
from train_fn.recovery.verdict import judge
from train_fn.step.peers import Peers
from train_fn.storage_proof import prove_storage


class Meeting:
    """Where the ranks of a group of threads exchange values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class ThreadPeers(Peers):
    meeting: Meeting

    def gather(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait(60)
        values = list(self.meeting.values)
        self.meeting.barrier.wait(60)
        return values


def prove(places: list[tuple[str, Path]], submission: int = 1) -> list[BaseException | None]:
    """What each rank raises; a rank is the name of its node and where its storage lies."""
    meeting = Meeting(len(places))

    def rank(number: int) -> BaseException | None:
        node, place = places[number]
        ctx = dataclasses.replace(
            make_context(place, number),
            node_id=node,
            world_size=len(places),
            local_rank=[name for name, _ in places[:number]].count(node),
            submission=submission,
        )
        peers = ThreadPeers(number, len(places), ctx.device)
        object.__setattr__(peers, "meeting", meeting)
        try:
            prove_storage(ctx, peers)
        except Exception as exc:
            return exc
        return None

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(rank, range(len(places))))


def write_driver_probe(place: Path, submission: int = 1) -> None:
    RunDir(open_storage(str(place)), "run_saver").write_probe(submission, DRIVER_PROBE)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_proof, "APPEAR_S", 0.05)


def test_nodes_that_share_their_storage_go_on(tmp_path: Path) -> None:
    write_driver_probe(tmp_path)
    nodes = [("a", tmp_path), ("a", tmp_path), ("b", tmp_path), ("c", tmp_path)]
    for _ in range(2):  # later attempts find their probes there
        assert prove(nodes) == [None] * 4
    probes = tmp_path / "runs/run_saver/control/s001.probes"
    assert sorted(path.name for path in probes.iterdir()) == ["a", "b", "c", "driver"]
    shutil.rmtree(probes)
    errors = prove(nodes)
    assert all(isinstance(each, StorageNotShared) for each in errors), "the driver's is gone, too"


@pytest.mark.parametrize("alone", ["a", "b", "c"])
def test_a_node_with_a_directory_of_its_own_is_found_by_all_ranks(
    alone: str, tmp_path: Path
) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    write_driver_probe(shared)
    errors = prove([(node, own if node == alone else shared) for node in ("a", "b", "c")])
    assert {type(error) for error in errors} == {StorageNotShared}
    assert len({str(error).partition(" is not ")[2] for error in errors}) == 1, (
        "all say the same, of the path that each has"
    )
    assert "is not the same on all nodes" in str(
        errors[0]
    ) and "Mount one shared filesystem" in str(errors[0])


def test_a_head_with_a_directory_of_its_own_is_found(tmp_path: Path) -> None:
    [error] = prove([("a", tmp_path)])
    assert (
        isinstance(error, StorageNotShared)
        and "node a" in str(error)
        and "does not see what the driver has written" in str(error)
    )
    write_driver_probe(tmp_path)
    assert prove([("a", tmp_path)]) == [None]
    [error] = prove([("a", tmp_path)], submission=2)
    assert isinstance(error, StorageNotShared), (
        "what was proven for an earlier submission proves nothing"
    )


def test_a_path_whose_bytes_differ_between_nodes_is_found(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for node, place, stale in (("a", one, "b"), ("b", other, "a")):
        write_driver_probe(place)
        assert prove([(node, place)]) == [None]
        (place / "runs/run_saver/control/s001.probes" / stale).write_bytes(bytes(4096))
    errors = prove([("a", one), ("b", other)])
    assert all(
        isinstance(error, StorageNotShared) and "reads other bytes than node" in str(error)
        for error in errors
    )


def test_a_node_that_cannot_write_is_told_as_trouble_of_the_storage(tmp_path: Path) -> None:
    shared, blocked = tmp_path / "shared", tmp_path / "blocked"
    write_driver_probe(shared)
    blocked.write_text("a file where a directory should be")
    errors = prove([("a", shared), ("b", blocked)])
    assert all(isinstance(error, StorageUnavailable) and "node b" in str(error) for error in errors)


def test_the_run_ends_at_once_and_says_why(tmp_path: Path) -> None:
    [error] = prove([("a", tmp_path)])
    assert error is not None
    report = RankReport(0, "a", 1, error=describe_error(error, 0))
    judgement = judge(Evidence(1, 100.0, (report,)))
    assert judgement.verdict is Verdict.STORAGE
    spec = make_context(tmp_path).spec.recovery
    decision = decide(judgement, [], spec, backoff_max_s=30)
    assert not decision.restart and decision.reason is ReasonCode.STORAGE_UNAVAILABLE
    assert decision.message is not None and "Mount one shared filesystem" in decision.message
