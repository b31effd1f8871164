"""Pieces of a sharded state, here and at heirs: what a gate waits for, what goes wrong on the way,
and checkpoints that all ranks write together."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageUnavailable
from tests.support.one_rank import journal_of
from tests.support.two_ranks import (
    DEADLINE_S,
    SmallState,
    Together,
    both,
    one_of_two,
    peers_of,
)
from train_fn.checkpoints.commit import load_pieces, num_pieces
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import Saver
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, PeersGone, RanksApart, StepNotWhole
from train_fn.snapshots import links as links_module
from train_fn.snapshots import pieces as pieces_module
from train_fn.snapshots.keeper import Restored
from train_fn.snapshots.pieces import PieceKeeper
from train_fn.snapshots.store import Label, SnapshotStore, snapshot_store
from train_fn.state.pieces import Move, Piece

pytestmark = pytest.mark.own_process


@pytest.fixture(autouse=True)
def on_loopback(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


class Rank:
    """One of two ranks."""

    def __init__(
        self, rank: int, ctx: WorkerContext, together: Together, of: int, every: int
    ) -> None:
        self.rank, self.ctx, self.state = rank, ctx, SmallState(Piece(rank % of, of))
        self.copies, peers = BoundaryCopies(self.state), peers_of(rank, together)
        self.keeper = PieceKeeper(ctx, peers, self.state, every)
        self.keeper.join()
        self.keeper.open(self.copies, peers.exchange, Restored("fresh", 0, None, ()))

    def make_step(self) -> None:
        self.state.step += 1
        self.state.weight += 1
        self.keeper.after_step()

    def labels(self) -> set[tuple[int, int]]:
        return {(label.step, label.rank) for label in snapshot_store(self.ctx).labels()}


@pytest.fixture(params=[(2, 1)])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    """Ranks on two nodes. The parameter: how many pieces there are, and how often copies travel."""
    together = Together()

    def made(rank: int) -> Rank:
        return Rank(rank, one_of_two(tmp_path, rank), together, *request.param)

    ranks = both(made, [0, 1])
    yield ranks
    for rank in ranks:
        rank.keeper.close()


def no_room(store: object, label: Label, size: int, blocks: Iterable[memoryview]) -> str:
    for _ in blocks:
        pass
    return "there is no room"


def step_and_gate(rank: Rank) -> None:
    rank.make_step()
    rank.keeper.gate()


def test_who_passes_a_gate_has_both_pieces_on_each_node(pair: list[Rank]) -> None:
    for step in (1, 2, 3):
        both(step_and_gate, pair)
        assert [rank.labels() for rank in pair] == [{(step, 0), (step, 1)}] * 2
        assert [rank.keeper.committed for rank in pair] == [step, step]
    store = snapshot_store(pair[0].ctx)
    [theirs] = [label for label in store.labels() if label.rank == 1]
    assert store.read(theirs)["shards"]["model/w"].equal(pair[1].state.weight)
    assert theirs.piece == Piece(1, 2)


def test_older_pieces_stay_until_the_newest_are_everywhere(pair: list[Rank]) -> None:
    both(step_and_gate, pair)
    for rank in pair:
        rank.make_step()
    assert all({(1, 0), (1, 1)} <= rank.labels() for rank in pair)
    both(lambda rank: rank.keeper.gate(), pair)
    assert [rank.labels() for rank in pair] == [{(2, 0), (2, 1)}] * 2


@pytest.mark.parametrize("pair", [(2, 3)], indirect=True)
def test_copies_that_travel_now_and_then_stay_until_newer_ones_have(pair: list[Rank]) -> None:
    newest = {1: 1, 2: 1, 3: 3, 4: 3, 5: 3, 6: 6}
    for step, sent in newest.items():
        both(Rank.make_step, pair)
        before = {(newest.get(step - 1, 1), each) for each in (0, 1)} if step > 1 else set()
        assert all(before <= rank.labels() for rank in pair), "a death now leaves these whole"
        both(lambda rank: rank.keeper.gate(), pair)
        copies = {(sent, 0), (sent, 1)}
        assert [rank.labels() for rank in pair] == [copies | {(step, own)} for own in (0, 1)]
    assert [rank.keeper.snapshots for rank in pair] == ["every_n"] * 2


@pytest.mark.parametrize("pair", [(2, 3)], indirect=True)
def test_copies_that_were_not_kept_travel_again_with_the_next_step(
    pair: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they have, the state counts as kept by nobody."""
    kept = []
    for step in (1, 2, 3, 4, 5):
        with monkeypatch.context() as full:
            if step in (3, 4):
                full.setattr(pieces_module, "take_in", no_room)
            both(step_and_gate, pair)
        said = journal_of(pair[0].ctx).of_kind(EventKind.SNAPSHOTS)
        kept.append(said[-1]["snapshots"] if said else None)
    assert kept == [None, None, "none", "none", "every_n"]
    assert [rank.labels() for rank in pair] == [{(5, 0), (5, 1)}] * 2


@pytest.mark.parametrize("pair", [(2, 0)], indirect=True)
def test_without_heirs_each_node_keeps_its_own_pieces_alone(pair: list[Rank]) -> None:
    for step in (1, 2, 3):
        both(step_and_gate, pair)
        assert [rank.labels() for rank in pair] == [{(step, 0)}, {(step, 1)}]
    assert [rank.keeper.snapshots for rank in pair] == ["own_node"] * 2


def test_ranks_that_would_send_at_other_steps_are_refused(tmp_path: Path) -> None:
    together = Together()

    def made(rank: int) -> None:
        ctx = one_of_two(tmp_path, rank)
        with pytest.raises(BadTask, match="heirs is 3 on rank 1 and 1 on rank 0; set it to the"):
            Rank(rank, ctx, together, 2, (1, 3)[rank])

    both(made, [0, 1])


def test_a_gate_does_not_wait_for_a_rank_that_left(pair: list[Rank]) -> None:
    both(step_and_gate, pair)
    pair[0].make_step()
    pair[1].keeper.let_go()
    with pytest.raises(PeersGone, match="rank 1 is gone, or silent, and its piece of step 2"):
        pair[0].keeper.gate()
    pair[0].keeper.close()
    assert {(1, 0), (1, 1), (2, 0)} == pair[0].labels()


def test_a_gate_ends_if_the_attempt_was_given_up(pair: list[Rank]) -> None:
    pair[0].make_step()
    object.__setattr__(pair[0].ctx, "is_abandoned", lambda: True)
    with pytest.raises(PeersGone, match="given up"):
        pair[0].keeper.gate()


def test_ranks_at_different_steps_do_not_pass(pair: list[Rank]) -> None:
    def at_another(rank: Rank) -> None:
        rank.state.step += rank.rank
        rank.make_step()
        rank.keeper._wards = []
        with pytest.raises(StepNotWhole, match=r"rank \d has kept step [12] of attempt 1"):
            rank.keeper.gate()

    both(at_another, pair)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("count", "buffers"),
        ("scheduler", "schedulers or extras"),
        ("rate", "options or step counts of the optimizer"),
    ],
)
def test_what_goes_apart_between_ranks_is_refused_by_name(
    what: str, name: str, pair: list[Rank]
) -> None:
    both(step_and_gate, pair)

    def apart(rank: Rank) -> None:
        setattr(rank.state, what, getattr(rank.state, what) + rank.rank)
        with pytest.raises(
            BadTask, match=f"^{name} of rank 1 differ from those of rank 0 after step 2"
        ):
            step_and_gate(rank)

    both(apart, pair)


def test_a_gate_tells_what_each_rank_said(pair: list[Rank]) -> None:
    def passed(rank: Rank) -> list[int]:
        rank.make_step()
        return rank.keeper.gate(5 + rank.rank)

    assert both(passed, pair) == [[5, 6], [5, 6]]


@pytest.mark.parametrize("pair", [(1, 1)], indirect=True)
def test_replicas_send_nothing_and_are_compared(pair: list[Rank]) -> None:
    both(step_and_gate, pair)
    assert [rank.labels() for rank in pair] == [{(1, 0)}, {(1, 1)}]

    def apart(rank: Rank) -> None:
        rank.state.weight += rank.rank
        with pytest.raises(RanksApart, match="rows of the same piece after step 2; the next step"):
            step_and_gate(rank)

    both(apart, pair)
    assert [rank.labels() for rank in pair] == [{(1, 0)}, {(1, 1)}]
    assert {each.step for each in pair[0].ctx.run_dir.distrusted()} == {1}


def test_a_node_without_room_says_so_and_what_is_whole_stays(
    pair: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    both(step_and_gate, pair)
    free = SnapshotStore.free_bytes
    monkeypatch.setattr(
        SnapshotStore,
        "free_bytes",
        lambda store: 0 if "node1" in store.directory.name else free(store),
    )
    both(step_and_gate, pair)
    assert [rank.labels() for rank in pair] == [{(1, 0), (1, 1)}] * 2
    [said] = journal_of(pair[0].ctx).of_kind(EventKind.SNAPSHOTS)
    assert said["snapshots"] == "none" and "of shared memory left" in said["problem"]
    monkeypatch.setattr(SnapshotStore, "free_bytes", free)
    both(step_and_gate, pair)
    assert [rank.labels() for rank in pair] == [{(3, 0), (3, 1)}] * 2
    assert journal_of(pair[0].ctx).of_kind(EventKind.SNAPSHOTS)[-1]["snapshots"] == "survivors"


# ---------------------------------------------------------------- on the way


def newest(rank: Rank) -> Label:
    [label] = [each for each in snapshot_store(rank.ctx).labels() if each.rank == rank.rank]
    return label


def test_a_piece_that_is_verified_for_long_is_no_silence(
    pair: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "SILENT_S", 1.0)
    take_in = SnapshotStore.take_in

    def slowly(store: SnapshotStore, label: Label, blocks: Any) -> None:
        all_of_it = [bytes(each) for each in blocks]
        time.sleep(2.5)
        take_in(store, label, all_of_it)

    monkeypatch.setattr(SnapshotStore, "take_in", slowly)
    both(step_and_gate, pair)
    assert [rank.keeper.committed for rank in pair] == [1, 1]


def test_pieces_are_brought_to_a_node_that_lacks_them(pair: list[Rank]) -> None:
    both(step_and_gate, pair)
    label = newest(pair[0])
    snapshot_store(pair[1].ctx).remove(label)
    pair[1].keeper._arrived.clear()
    failed = both(lambda rank: rank.keeper.bring({Move(0, 1, 0): label}), pair)
    assert failed == [[], []] and (1, 0) in pair[1].labels()


def test_a_damaged_file_is_named_and_not_kept(pair: list[Rank]) -> None:
    both(step_and_gate, pair)
    label = newest(pair[0])
    snapshot_store(pair[1].ctx).remove(label)
    pair[1].keeper._arrived.clear()
    path = snapshot_store(pair[0].ctx)._state_path(label)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    failed = both(lambda rank: rank.keeper.bring({Move(0, 1, 0): label}), pair)
    assert failed[0] == []
    [(move, problem)] = failed[1]
    assert move == Move(0, 1, 0) and "it did not arrive whole" in problem
    assert (1, 0) not in pair[1].labels()


def test_a_sender_that_dies_within_a_file_leaves_nothing(pair: list[Rank]) -> None:
    both(step_and_gate, pair)
    label = dataclasses.replace(newest(pair[0]), step=9)
    links = pair[0].keeper._links
    assert links is not None
    connection = links._to(1)
    said = b'{"submission": 1, "attempt": 1, "step": 9, "rank": 0, "digest": "d", "problem": null}'
    connection.sendall(links_module._HEAD.pack(len(said), 1000) + said + bytes(10))
    connection.close()
    with pytest.raises(PeersGone, match="rank 0 is gone"):
        while True:
            pair[1].keeper._wait_for(label, 0)
            pair[1].keeper._arrived.clear()
    assert {step for step, _ in pair[1].labels()} == {1}
    assert not list(snapshot_store(pair[1].ctx).directory.glob("*.tmp"))


def test_a_stranger_is_not_heard(pair: list[Rank]) -> None:
    links = pair[0].keeper._links
    assert links is not None
    with socket.create_connection(links._places[0], timeout=DEADLINE_S) as stranger:
        stranger.sendall(links_module._HELLO.pack(bytes(32), 1))
        assert stranger.recv(1) == b""
    both(step_and_gate, pair)
    assert [rank.labels() for rank in pair] == [{(1, 0), (1, 1)}] * 2


# ---------------------------------------------------------------- checkpoints


def savers(pair: list[Rank]) -> list[Saver]:
    return [Saver(rank.ctx, rank.state, rank.copies, rank.keeper.collect) for rank in pair]


def is_busy(saver: Saver) -> bool:
    return saver._slot.current is not None or saver._slot.waiting is not None


def save_and_train(pair: list[Rank], by_rank: list[Saver], num_steps: int) -> None:
    """Save the present state beside so many steps."""

    def run(rank: Rank) -> None:
        rank.make_step()
        rank.keeper.save()
        by_rank[rank.rank].save_if_due(due=True, is_best=False)
        for _ in range(num_steps):
            rank.keeper.gate()
            rank.make_step()
        rank.keeper.gate()

    both(run, pair)


def test_ranks_write_a_checkpoint_together_beside_training(pair: list[Rank]) -> None:
    by_rank = savers(pair)
    save_and_train(pair, by_rank, 1)
    while is_busy(by_rank[0]):
        both(step_and_gate, pair)
    [manifest] = CheckpointStore(pair[0].ctx.run_dir).list()
    assert manifest.step == 1 and num_pieces(manifest) == 2
    found = load_pieces(pair[0].ctx.run_dir, manifest, [0, 1])
    assert torch.cat([found[at]["shards"]["model/w"] for at in (0, 1)]).equal(torch.ones(3, 4))


def test_nothing_is_committed_if_a_rank_cannot_write(
    pair: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StorageUnavailable("the disk is full")

    monkeypatch.setattr("train_fn.checkpoints.sharded.write_beside", full)
    by_rank = savers(pair)
    save_and_train(pair, by_rank, 1)
    while is_busy(by_rank[0]):
        both(step_and_gate, pair)
    assert CheckpointStore(pair[0].ctx.run_dir).list() == []
    [failed] = journal_of(pair[0].ctx).of_kind(EventKind.CHECKPOINT_FAILED)
    assert "rank 1 could not write its piece: StorageUnavailable: the disk is full" in str(failed)


def test_ranks_keep_the_copy_of_a_checkpoint_while_the_next_one_is_due(pair: list[Rank]) -> None:
    by_rank = savers(pair)
    save_and_train(pair, by_rank, 0)
    both(lambda rank: (rank.make_step(), rank.keeper.save()), pair)
    while is_busy(by_rank[0]):
        both(lambda rank: rank.keeper.meet(), pair)
    assert [each.step for each in CheckpointStore(pair[0].ctx.run_dir).list()] == [1]
    assert {*pair[1].keeper._saves._copies} == {1, 2}


def test_a_saver_does_not_wait_for_ranks_that_left(pair: list[Rank]) -> None:
    by_rank = savers(pair)
    save_and_train(pair, by_rank, 0)
    pair[0].keeper.let_go()
    assert by_rank[0].wait_idle(DEADLINE_S)
    assert CheckpointStore(pair[0].ctx.run_dir).list() == []
