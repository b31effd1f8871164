"""Files of snapshots on their way from rank to rank.

Not by gloo's messages: if a peer dies in the middle of one, its receiver waits for the whole
timeout. A socket ends at once, and closing it frees whoever waits.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace

from train_fn.context import WorkerContext
from train_fn.node.network import listen_at, own_address
from train_fn.node.usage import give_way
from train_fn.snapshots.store import Label, SnapshotStore, snapshot_store
from train_fn.step.peers import Peers

SILENT_S = 60.0
"""A peer whose piece is awaited and that sends no byte for so long counts as gone."""
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
