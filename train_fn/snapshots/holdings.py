"""What the ranks of a sharded model keep of each other: every rank's piece of the newest states, on
its own node and on that of its heir.

A rank copies its piece after each step. Beside the next step, a thread writes the copy to the
node's shared memory and sends it to the heir, a rank of another node. Before the next optimizer
step all ranks meet at a gate. To come there says: my piece of the newest state is on my node, and
so are those of which I am the heir. Who passes knows that the state survives any one node, and only
then is its step reported. Older pieces are removed then, so a death always leaves one state whole.

Copies may travel every so many steps only, or never. Then who comes to a gate says that its own
piece is on its node, and the newest state that did travel stays until another one has.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import Any

from everstep.wire.events import EventKind
from train_fn.checkpoints.save_slot import BoundaryCopies, BoundaryCopy
from train_fn.checkpoints.sharded import PieceSaves, short
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, PeersGone, StepNotWhole
from train_fn.node.network import listen_at, own_address
from train_fn.node.usage import give_way
from train_fn.snapshots.election import odd_ranks, raise_apart
from train_fn.snapshots.publisher import Snapshots, shortage
from train_fn.snapshots.store import Label, SnapshotStore, snapshot_store
from train_fn.state.pieces import Move, heirs
from train_fn.state.tensor_tree import tree_digest
from train_fn.step.peers import Peers

logger = logging.getLogger(__name__)

SILENT_S = 60.0
"""A peer whose piece is awaited and that sends no byte for so long counts as gone."""
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
Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank's bytes, of one size, to all, by rank. A collective."""


class Holdings:
    """One rank's part in keeping the pieces of an attempt.

    A collective: all ranks make it at once, before they restore.
    """

    def __init__(self, ctx: WorkerContext, peers: Peers, of: int, every: int = 1) -> None:
        """``of``: how many pieces there are. ``every``: their copies travel every so many steps;
        never with 0. Raises BadTask if ranks say different numbers."""
        self._ctx, self._peers, self._of, self._every = ctx, peers, of, every
        self._store = snapshot_store(ctx)
        self._store.drop_spares()
        said: list[tuple[str, int]] = peers.gather((ctx.node_id, every))
        self.nodes = [node for node, _ in said]
        for rank, (_, theirs) in enumerate(said):
            if theirs != said[0][1]:
                raise BadTask(
                    f"heirs is {theirs} on rank {rank} and {said[0][1]} on rank 0; set it to the "
                    "same on all ranks"
                )
        by_rank = heirs(self.nodes, of)
        self.kept = _kept(by_rank, every, len({*self.nodes}))
        self._heir = by_rank[peers.rank]
        self._wards = [rank for rank, heir in enumerate(by_rank) if heir == peers.rank]
        self._changed = threading.Condition()
        self._arrived: dict[_Key, str | None] = {}
        """Pieces that have come from other nodes, and why one could not be kept."""
        self._checked: set[_Key] = set()
        """Pieces whose last byte has come. To verify a large one takes a while."""
        self._gone: set[int] = set()
        self._moved_at = time.monotonic()
        self._links = (
            PieceLinks(ctx, peers, self._take_in, self._lose) if len({*self.nodes}) > 1 else None
        )
        self._jobs: queue.Queue[tuple[BoundaryCopy, bool] | None] = queue.Queue()
        self._newest: Label | None = None
        """The newest state whose piece was copied."""
        self._travels = False
        """Whether its copies go to the heirs."""
        self._sent: Label | None = None
        """The newest state of which every heir has the copies; of any, where none need travel."""
        self.committed: int | None = None
        """Steps done in the newest state that all ranks are known to hold."""
        self._written: dict[_Key, str | None] = {}
        """The same for this rank's own."""
        self._common: dict[str, str] = {}
        """Digests of what must be the same on all ranks in the state that was written last."""
        self._shards: str | None = None
        """That of the shards, if other ranks hold the same ones."""
        self._is_closed = False
        self._problem: str | None = None
        self._thread: threading.Thread | None = None
        self.saves = PieceSaves(ctx, of)

    def open(self, copies: BoundaryCopies, exchange: Exchange, begins_at: int) -> None:
        """Begin to keep states, after so many steps. What may fail has come before."""
        self._copies, self._exchange, self.committed = copies, exchange, begins_at
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
        failed = []
        for move, label in wanted.items():
            if move.target == self._peers.rank:
                problem = self._wait_for(label, move.source)
                if problem is not None:
                    failed.append((move, problem))
        for thread in threads:
            thread.join()
        return failed

    def _send(self, target: int, labels: Iterable[Label]) -> None:
        """Send snapshots of this node to a rank, if it is there."""
        assert self._links is not None
        for label in labels:
            try:
                self._links.send(target, label)
            except (OSError, ValueError) as exc:  # the latter if it is closed meanwhile
                self._lose(target, exc)

    # -- between two steps

    def publish(self) -> None:
        """Copy this rank's piece of the present state. A thread keeps it here and at the heir.
        Called by the training thread, when the ranks have agreed on the step."""
        copy = self._copies.take()
        self._newest = self._label(copy.step)
        # The pieces of an attempt's first state may lie anywhere, and copies may have failed.
        since = self._every if self._sent is None else copy.step - self._sent.step
        is_due = copy.step % (self._every or 1) == 0 or since >= self._every
        self._travels = self._every > 0 and is_due
        self._jobs.put((copy, self._travels))

    def pass_gate(self, order: int = 0) -> list[int]:
        """Wait until all ranks hold what they should of the newest state. A collective.

        Args:
            order: what the other ranks are to hear.

        Return each rank's. Raises PeersGone if a peer has left, StepNotWhole if the ranks are at
        different steps, BadTask if what they have in common differs, RanksApart or PeerApart if
        those that hold the same piece differ.
        """
        newest = self._newest
        assert newest is not None
        problem = self._wait_for(newest, None)
        for ward in self._wards if self._travels else ():
            problem = problem or self._wait_for(replace(newest, rank=ward), ward)
        said = {"step": newest.step, "attempt": newest.attempt, "problem": short(problem)}
        kept = {"common": self._common, "shards": self._shards}
        rows = self._meet({**said, **kept, "order": order})
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
            raise_apart(self._ctx, newest.step, self.committed or 0, odd, "rows of the same piece")
        problems = [f"rank {at}: {row['problem']}" for at, row in enumerate(rows) if row["problem"]]
        if not problems:
            if self._travels or self.kept != "every_n":
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

    def hold(self) -> None:
        """Keep a copy of the present state for a checkpoint of it. Called on every rank."""
        if 0 < self._peers.rank < self._of:
            self.saves.hold(self._copies.take(), self._copies.release)

    # -- the end

    def let_go(self) -> None:
        """Free the peers that wait for this rank."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._links is not None:
            self._links.close()
        self.saves.close()

    def close(self) -> int | None:
        """End the thread, once the newest piece is on this node. Return that state's step, if it
        is."""
        self.let_go()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        newest = self._newest
        kept = newest is not None and self._written.get(_key(newest), "") is None
        return newest.step if newest is not None and kept else None

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
        label = self._label(copy.step)
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

    def _label(self, step: int) -> Label:
        ctx = self._ctx
        return Label(
            ctx.submission,
            ctx.attempt,
            step,
            ctx.world_rank,
            digest=None,
            problem=None,
            storage=ctx.run_dir.storage.uri,
            pieces=self._of,
        )

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
        said = json.dumps({**row, **self.saves.said()}).encode()
        rows = [json.loads(each) for each in self._exchange(said.ljust(_ROW_BYTES))]
        self.saves.heard(rows)
        return rows

    def _report(self, step: int, problem: str | None) -> None:
        """Report it when pieces begin, or cease, to be kept."""
        if (problem is None) == (self._problem is None):
            return
        self._problem = problem
        if self._peers.rank == 0:
            kept = self.kept if problem is None else "none"
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


def take_in(
    store: SnapshotStore, label: Label, size: int, blocks: Iterable[memoryview]
) -> str | None:
    """Keep the file of a snapshot that comes from another node. Return why that cannot be done, or
    None. All blocks are read in any case."""
    free_bytes = max(0, store.free_bytes() + store.spare_bytes(label))
    if size > free_bytes:
        for _ in blocks:
            pass
        return f"{size} bytes do not fit the {free_bytes} of shared memory left"
    try:
        store.take_in(label, blocks)
    except Exception as exc:
        for _ in blocks:
            pass
        return f"it did not arrive whole: {exc}"
    return None


# ---------------------------------------------------------------- links

# Files of snapshots, from rank to rank.
#
# Not by gloo's messages: if a peer dies in the middle of one, its receiver waits for the whole
# timeout. A socket ends at once, and closing it frees whoever waits.

_WORD_BYTES = 32
_HELLO = struct.Struct(f"<{_WORD_BYTES}sI")
"""The word that only the ranks of an attempt know, and the sender's rank."""
_HEAD = struct.Struct("<IQ")
"""Bytes of the label that follows, and of the file after it."""
_MOST_LABEL_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20


class PieceLinks:
    """Send files of this node's snapshots to other ranks, and take in theirs. A collective to
    make."""

    def __init__(
        self,
        ctx: WorkerContext,
        peers: Peers,
        take_in: Callable[[Label, int, Iterable[memoryview]], None],
        lose: Callable[[int, Exception], None],
    ) -> None:
        self._rank, self._store = peers.rank, snapshot_store(ctx)
        self._take_in, self._lose = take_in, lose
        self._word: bytes = peers.share(secrets.token_bytes(_WORD_BYTES), 0)
        host = own_address()
        self._server = listen_at(host)
        self._places: list[tuple[str, int]] = peers.gather((host, self._server.getsockname()[1]))
        self._made: dict[int, socket.socket] = {}
        self._all = [self._server]
        self._is_closed = False
        threading.Thread(target=self._accept, name="piece-links", daemon=True).start()

    def send(self, rank: int, label: Label) -> None:
        """Send a snapshot of this node, or the label alone if it says why there is none. One thread
        for each rank. Raises OSError, or ValueError if the connection is closed meanwhile."""
        with ExitStack() as stack:
            file = None
            try:
                if label.problem is None:
                    file = stack.enter_context(self._store.open(label))
            except OSError as exc:
                label = replace(label, problem=f"it cannot be read: {exc}")
            said = json.dumps(asdict(label)).encode()
            size = os.fstat(file.fileno()).st_size if file is not None else 0
            connection = self._to(rank)
            connection.sendall(_HEAD.pack(len(said), size) + said)
            if file is not None:
                connection.sendfile(file)

    def close(self) -> None:
        """End all connections, and every thread that waits for one."""
        self._is_closed = True
        for each in list(self._all):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _to(self, rank: int) -> socket.socket:
        if rank not in self._made:
            made = socket.create_connection(self._places[rank], timeout=SILENT_S)
            self._all.append(made)
            made.sendall(_HELLO.pack(self._word, self._rank))
            self._made[rank] = made
        return self._made[rank]

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._all.append(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="piece-link", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Take in what one peer sends, until it ends."""
        give_way()
        rank = None
        try:
            connection.settimeout(SILENT_S)
            word, said = _HELLO.unpack(_exactly(connection, _HELLO.size))
            connection.settimeout(None)
            if not hmac.compare_digest(word, self._word):
                connection.close()  # a stranger
                return
            rank = said
            while True:
                length, size = _HEAD.unpack(_exactly(connection, _HEAD.size))
                if length > _MOST_LABEL_BYTES:
                    raise ConnectionError(f"a label of {length} bytes")
                label = Label(**json.loads(_exactly(connection, length)))
                self._take_in(label, size, _blocks(connection, size))
        except (OSError, ValueError, TypeError) as exc:
            if rank is not None:
                self._lose(rank, exc)


def _exactly(connection: socket.socket, size: int) -> bytes:
    return b"".join(map(bytes, _blocks(connection, size)))


def _blocks(connection: socket.socket, size: int) -> Iterable[memoryview]:
    """Yield so many bytes as they come, each block in the memory of the one before. Raises
    ConnectionError if the peer ends before."""
    memory = memoryview(bytearray(min(size, _BLOCK_BYTES)))
    while size:
        received = connection.recv_into(memory[:size])
        if not received:
            raise ConnectionError("the peer has closed the connection")
        size -= received
        yield memory[:received]
