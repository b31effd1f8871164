"""What the ranks of a sharded model keep of each other: every rank's piece of the newest states, on
its own node and on that of its heir.

A rank copies its piece after each step. Beside the next step, a thread writes the copy to the
node's shared memory and sends it to the heir, a rank of another node. Before the next optimizer
step all ranks meet at a gate. A rank comes once its piece of the newest state, and those of which
it is the heir, are on its node. Behind the gate the state survives any one node, and its step is
reported. Older pieces are removed then, so a death always leaves one state whole.

Copies may travel every so many steps only, or never. Then a rank comes to the gate once its own
piece is on its node. The newest state that has travelled stays until a newer one has.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep.wire.events import EventKind
from train_fn.checkpoints.save_slot import BoundaryCopies, BoundaryCopy
from train_fn.checkpoints.sharded import PieceSaves, short
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, PeersGone, StepNotWhole
from train_fn.node.usage import give_way
from train_fn.recovery.evidence import RankError
from train_fn.snapshots.election import Candidate, Elected, Rejection, odd_ranks, snapshot_name
from train_fn.snapshots.keeper import (
    Adopt,
    Exchange,
    Remains,
    Restored,
    Snapshots,
    StateKeeper,
    Unusable,
)
from train_fn.snapshots.leaving import shortage
from train_fn.snapshots.links import SILENT_S, PieceLinks, take_in
from train_fn.snapshots.restore import durable_part, read_pieces
from train_fn.snapshots.store import Label, label_of, raise_apart, snapshot_store
from train_fn.snapshots.whole import broadcast
from train_fn.state.pieces import Move, heirs
from train_fn.state.run_state import RunState
from train_fn.state.tensor_tree import tree_digest
from train_fn.step.peers import Peers

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ROW_BYTES = 2048
"""What a rank says at a gate."""
_COMMON = {
    "buffers": ("model",),
    "schedulers or extras": ("task",),
    "options or step counts of the optimizer": ("optimizer", "rows"),
}
"""What all ranks have in common, by the keys of a state."""
_DIGEST_CHARS = 32

_Key = tuple[tuple[int, int], int, int]
"""Origin, step and number of a piece."""


class PieceKeeper(StateKeeper):
    """Keep this rank's piece of each state, and those of other ranks (``StateKeeper``)."""

    has_gate, committed, meets_every_s = True, 0, 0.05

    def __init__(self, ctx: WorkerContext, peers: Peers, state: RunState, every: int = 1) -> None:
        """``every``: copies of pieces travel every so many steps; never with 0."""
        assert state.piece is not None
        self._ctx, self._peers, self._state = ctx, peers, state
        self._of, self._every = state.piece.of, every
        self._store = snapshot_store(ctx)
        self._links: PieceLinks | None = None
        self._changed = threading.Condition()
        self._arrived: dict[_Key, str | None] = {}
        """Pieces that have come from other nodes, and why one could not be kept."""
        self._checked: set[_Key] = set()
        """Pieces whose last byte has come. To verify a large one takes a while."""
        self._gone: set[int] = set()
        self._moved_at = time.monotonic()
        self._jobs: queue.Queue[tuple[BoundaryCopy, bool] | None] = queue.Queue()
        self._newest: Label | None = None
        """The newest state whose piece was copied."""
        self._travels = False
        """Whether its copies go to the heirs."""
        self._sent: Label | None = None
        """The newest state of which every heir has the copies; of any, where none need travel."""
        self._written: dict[_Key, str | None] = {}
        """The same for this rank's own."""
        self._common: dict[str, str] = {}
        """Digests of what must be the same on all ranks in the state that was written last."""
        self._shards: str | None = None
        """That of the shards, if other ranks hold the same ones."""
        self._is_closed = False
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        self._saves = PieceSaves(ctx, self._of)
        self.collect = self._saves.collect

    # -- restore

    def join(self) -> None:
        """Choose who keeps whose copies, and connect the nodes. A collective. Raises BadTask if
        ranks say different numbers of steps between two copies."""
        ctx, peers, every = self._ctx, self._peers, self._every
        self._store.drop_spares()
        said: list[tuple[str, int]] = peers.gather((ctx.node_id, every))
        self._nodes = [node for node, _ in said]
        for rank, (_, theirs) in enumerate(said):
            if theirs != said[0][1]:
                raise BadTask(
                    f"heirs is {theirs} on rank {rank} and {said[0][1]} on rank 0; set it to the "
                    "same on all ranks"
                )
        by_rank, num_nodes = heirs(self._nodes, self._of), len({*self._nodes})
        self.snapshots = _kept(by_rank, every, num_nodes)
        self._heir = by_rank[peers.rank]
        self._wards = [rank for rank, heir in enumerate(by_rank) if heir == peers.rank]
        if num_nodes > 1:
            self._links = PieceLinks(ctx, peers, self._take_in, self._lose)

    def read(self, elected: Elected) -> tuple[dict[str, Any] | None, Unusable]:
        ctx, peers, state = self._ctx, self._peers, self._state
        candidates, nodes = elected.candidates, self._nodes
        found, bad = read_pieces(ctx, peers, state, nodes, self.bring, candidates)
        unusable: dict[Candidate, Rejection] = {}
        for (node, label), problem in bad.items():
            of_label = [each for each in candidates if each.label == label]
            # A file that has only moved to its node is not offered there, but where it came from.
            there = [each for each in of_label if nodes[each.rank] == node] or of_label
            rejection = Rejection(f"{snapshot_name(label)} on node {node}", problem)
            unusable |= dict.fromkeys(there, rejection)
        return found, unusable

    def read_durable(
        self, restored: Restored, found: dict[str, Any] | None, adopt: Adopt
    ) -> dict[str, Any] | None:
        return durable_part(self._ctx, self._peers, self._state, restored, found, adopt)

    def spread(self, restored: Restored, found: dict[str, Any] | None) -> dict[str, Any]:
        """Return this rank's part, which it has read by itself. Of a new run, that is its own rows
        and what rank ``restored.holder`` says of the rest."""
        if restored.source != "fresh":
            assert found is not None
            return found
        own = self._state.state_dict()
        common = {**own, "shards": None} if self._peers.rank == restored.holder else None
        return {**broadcast(self._peers, common, restored.holder), "shards": own["shards"]}

    def open(self, copies: BoundaryCopies, exchange: Exchange, restored: Restored) -> None:
        self._copies, self._exchange = copies, exchange
        # The newest step may have passed no gate: a death may yet lose it.
        is_gated, step = restored.source != "snapshot", self._state.step
        self.committed = step if is_gated else max(0, step - 1)
        self._thread = threading.Thread(target=self._run, name="piece-keeper", daemon=True)
        self._thread.start()

    # -- before an attempt's first step

    def bring(self, wanted: Mapping[Move, Label]) -> list[tuple[Move, str]]:
        """Bring pieces of an earlier state to the nodes that need them. Return those that did not
        reach this node, and why. Raises PeersGone.

        Args:
            wanted: the label of what moves.
        """
        own = [move for move in wanted if move.source == self._peers.rank]
        threads = [
            # At once: who waits for a large piece of another one would take this rank for gone.
            threading.Thread(
                target=self._send,
                args=(target, [wanted[move] for move in own if move.target == target]),
                name="piece-sender",
                daemon=True,
            )
            for target in sorted({move.target for move in own})
        ]
        for thread in threads:
            thread.start()
        came = {
            move: self._wait_for(label, move.source)
            for move, label in wanted.items()
            if move.target == self._peers.rank
        }
        for thread in threads:
            thread.join()
        return [(move, problem) for move, problem in came.items() if problem is not None]

    def _send(self, target: int, labels: Iterable[Label]) -> None:
        """Send snapshots of this node to a rank, if it is there."""
        assert self._links is not None
        for label in labels:
            try:
                self._links.send(target, label)
            except (OSError, ValueError) as exc:  # the latter if it is closed meanwhile
                self._lose(target, exc)

    # -- between two steps

    def begin(self) -> None:
        """Keep the first state under the new heirs: the next death may follow at once."""
        self.after_step()

    def after_step(self, due: bool | None = None) -> None:
        """Copy this rank's piece of the present state. A thread keeps it here and at the heir.
        Called by the training thread, when the ranks have agreed on the step."""
        copy = self._copies.take()
        self._newest = label_of(self._ctx, copy.step, self._of)
        # The pieces of an attempt's first state may lie anywhere, and copies may have failed.
        since = self._every if self._sent is None else copy.step - self._sent.step
        is_due = copy.step % (self._every or 1) == 0 or since >= self._every
        self._travels = self._every > 0 and is_due
        self._jobs.put((copy, self._travels))

    def gate(self, said: int = 0) -> list[int]:
        """Wait until all ranks hold what they should of the newest state. A collective.

        Args:
            said: what the other ranks are to hear.

        Return each rank's. Raises PeersGone if a peer has left, StepNotWhole if the ranks are at
        different steps, BadTask if what they have in common differs, RanksApart or PeerApart if
        those that hold the same piece differ.
        """
        newest = self._newest
        assert newest is not None
        problem = self._wait_for(newest, None)
        for ward in self._wards if self._travels else ():
            problem = problem or self._wait_for(replace(newest, rank=ward), ward)
        own = {"step": newest.step, "attempt": newest.attempt, "problem": short(problem)}
        kept = {"common": self._common, "shards": self._shards}
        rows = self._meet({**own, **kept, "order": said})
        for rank, row in enumerate(rows):
            if (row["step"], row["attempt"]) != (newest.step, newest.attempt):
                raise StepNotWhole(
                    newest.step,
                    f"rank {rank} has kept step {row['step']} of attempt {row['attempt']}",
                )
            if row["common"] != (first := rows[0]["common"]):
                names = [name for name in first if row["common"].get(name) != first[name]]
                raise BadTask(
                    f"{' and '.join(names)} of rank {rank} differ from those of rank 0 after step "
                    f"{newest.step}. One state of them is kept for all ranks: let them follow from "
                    "all ranks, as SyncBatchNorm does, or leave them out"
                )
        digests = [row["shards"] for row in rows]
        if digests != [digests[rank % self._of] for rank in range(len(rows))]:
            self._newest = None
            odd = odd_ranks(digests, self._of)
            raise_apart(self._ctx, newest.step, self.committed, odd, "rows of the same piece")
        problems = [f"rank {at}: {row['problem']}" for at, row in enumerate(rows) if row["problem"]]
        if not problems:
            if self._travels or self.snapshots != "every_n":
                self._sent = newest
            self._store.recycle_older(newest, but=self._sent)
        else:  # part of it only: make room for the next one, and keep what is whole
            for label in self._store.labels():
                if (label.origin, label.step) == (newest.origin, newest.step):
                    self._store.remove(label)
        self._forget(newest)
        self.committed = newest.step
        self._report(newest.step, problems[0] if problems else None)
        return [row["order"] for row in rows]

    def meet(self) -> None:
        """Exchange news of a checkpoint that is being saved. A collective."""
        self._meet({})

    def save(self) -> None:
        """Keep a copy of the present state for a checkpoint of it. Called on every rank."""
        if 0 < self._peers.rank < self._of:
            self._saves.hold(self._copies.take(), self._copies.release)

    # -- the ends

    begin_last_save = save

    def let_go(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._links is not None:
            self._links.close()
        self._saves.close()

    def leave(
        self,
        error: RankError,
        last_committed: Callable[[], dict[str, Any] | str],
        *,
        distrusted: str | None = None,
    ) -> Remains:
        self.close()
        step, newest = self._state.step, self._newest
        if self._thread is None:
            problem = "the attempt made no step; pieces of an earlier one stay where they are"
            return Remains(step, problem)
        # A step that no gate has followed is not lost if it has to be made again.
        known = self.committed if error.collateral else step
        if distrusted is not None:
            return Remains(known, distrusted)
        if newest is None or self._written.get(_key(newest), "") is not None:
            return Remains(known, "this node keeps no piece of the newest step")
        return Remains(known, None, newest.step)

    def close(self) -> None:
        """End the thread, once the newest piece is on this node."""
        self.let_go()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    # -- the thread

    def _run(self) -> None:
        give_way()
        while (job := self._jobs.get()) is not None:
            copy, travels = job
            label, problem = self._write(copy)
            self._copies.release(copy)
            with self._changed:
                self._written[_key(label)] = problem
                self._changed.notify_all()
            if travels and self._heir is not None and not self._is_closed:
                self._send(self._heir, [label])

    def _write(self, copy: BoundaryCopy) -> tuple[Label, str | None]:
        label = label_of(self._ctx, copy.step, self._of)
        try:
            self._common = {
                name: tree_digest([copy.state.get(key) for key in keys])[:_DIGEST_CHARS]
                for name, keys in _COMMON.items()
            }
            if self._peers.world_size > self._of:
                self._shards = tree_digest(copy.state["shards"])
            problem = shortage(self._store, copy.state, self._store.spare_bytes(label))
            if problem is None:
                return self._store.write(label, copy.state), None
        except Exception as exc:
            logger.warning("the piece of step %d could not be kept", copy.step, exc_info=exc)
            problem = f"the piece could not be kept: {type(exc).__name__}: {exc}"
        return replace(label, problem=problem), problem

    # -- what arrives

    def _take_in(self, label: Label, size: int, blocks: Iterable[memoryview]) -> None:
        """Keep a piece of another node on this one."""
        problem = label.problem
        if problem is None:
            problem = take_in(self._store, label, size, self._noticed(label, blocks))
        with self._changed:
            self._checked.discard(_key(label))
            self._moved_at = time.monotonic()
            self._arrived[_key(label)] = problem
            self._changed.notify_all()

    def _noticed(self, label: Label, blocks: Iterable[memoryview]) -> Iterable[memoryview]:
        for block in blocks:
            self._moved_at = time.monotonic()
            yield block
        with self._changed:
            self._checked.add(_key(label))

    def _lose(self, rank: int, exc: Exception) -> None:
        """Note that a connection to a peer has ended."""
        logger.info("the connection of pieces to rank %d ended: %s", rank, exc)
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def _wait_for(self, label: Label, source: int | None) -> str | None:
        """Wait until a piece is on this node. Return why it cannot be; None if it is.

        Args:
            source: the rank that sends it; None for this rank's own.
        """
        key = _key(label)
        there = self._written if source is None else self._arrived
        with self._changed:
            self._moved_at = time.monotonic()
            while key not in there:
                is_silent = time.monotonic() - self._moved_at > SILENT_S and source is not None
                if source in self._gone or self._is_closed or (is_silent and not self._checked):
                    raise PeersGone(
                        f"rank {source} is gone, or silent, and its piece of step {label.step} "
                        "did not arrive"
                    )
                if self._ctx.is_abandoned():
                    raise PeersGone("this attempt was given up; another one follows")
                self._changed.wait(_LOOK_S)
            return there[key]

    def _forget(self, newest: Label) -> None:
        for there in (self._written, self._arrived):
            for key in [each for each in there if each < _key(newest)[:2]]:
                del there[key]

    def _meet(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        said = json.dumps({**row, **self._saves.said()}).encode()
        rows = [json.loads(each) for each in self._exchange(said.ljust(_ROW_BYTES))]
        self._saves.heard(rows)
        return rows

    def _report(self, step: int, problem: str | None) -> None:
        """Report it when pieces begin, or cease, to be kept."""
        if (problem is None) == (self._problem is None):
            return
        self._problem = problem
        if self._peers.rank == 0:
            kept = self.snapshots if problem is None else "none"
            logger.warning("pieces of step %d: %s", step, problem or "kept again")
            self._ctx.journal.emit(
                EventKind.SNAPSHOTS, {"step": step, "snapshots": kept, "problem": problem}
            )


def _kept(by_rank: Sequence[int | None], every: int, num_nodes: int) -> Snapshots:
    """Return who keeps states while all goes well."""
    if num_nodes == 1:
        return "published"
    if every == 1 or all(heir is None for heir in by_rank):  # replicas on other nodes
        return "survivors"
    return "every_n" if every else "own_node"


def _key(label: Label) -> _Key:
    return label.origin, label.step, label.rank
