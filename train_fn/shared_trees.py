"""Trees handed to another process: plain values travel as bytes, tensors stay in memory that both have mapped.

A state's copy is made in the memory of the one before. So the receiver is told of a tensor's place once, and of its number with
every state; what is pickled is short, and pickled by the interpreter's own C.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

import torch

from train_fn.shared_tensors import Block, Place, place_of


class NotShared(Exception):
    """A tensor lies in memory that the other process cannot map."""


class _Parcel(NamedTuple):
    """What is sent of a tree, before the descriptors of its new blocks."""

    forget: bool
    """Whether what was told of places before is void."""
    places: list[Place]
    """Of tensors that are new; they get the next numbers."""
    blocks: list[tuple[int, int]]
    """Number and size in bytes of the blocks that are new."""
    tree: bytes


class TreeSender:
    """One end. What it sends goes to one receiver, in order."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection, self._pid = connection, pid
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        """Number and object of each tensor that was told, by ``id``; an object that is kept here keeps its ``id``."""
        self._blocks: set[int] = set()
        self._forget = True

    def send(self, tree: Any) -> None:
        """Hand over a tree; its tensors, if it has any, are the receiver's to read until they are changed.

        Raises NotShared, and then nothing is sent; OSError where the receiver is gone.
        """
        pickler = _Pickler(dict(self._known))
        data = pickler.dumps(tree)
        new = {number: block for number, block in pickler.blocks.items() if number not in self._blocks}
        blocks = [(number, len(block)) for number, block in new.items()]
        self._connection.send(_Parcel(self._forget, pickler.places, blocks, data))
        for block in new.values():
            send_handle(self._connection, block.fd, self._pid)
        if not pickler.used:
            return
        # Of a tensor that this state does not have any more nothing is kept: with the next state all are told anew.
        self._forget = len(pickler.used) < len(pickler.known)
        self._known = {} if self._forget else pickler.known
        self._blocks = set() if self._forget else self._blocks | new.keys()


class TreeReceiver:
    """The other end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._blocks: dict[int, mmap.mmap] = {}
        self._tensors: list[torch.Tensor] = []

    def receive(self) -> Any:
        """The next tree; its tensors are the sender's. Raises EOFError where the sender is gone."""
        parcel: _Parcel = self._connection.recv()
        if parcel.forget:
            self._tensors, self._blocks = [], {}
        for number, size_bytes in parcel.blocks:
            fd = recv_handle(self._connection)
            self._blocks[number] = mmap.mmap(fd, size_bytes)
            os.close(fd)
        self._tensors += [place.tensor_in(self._blocks) for place in parcel.places]
        return _Unpickler(parcel.tree, self._tensors).load()


def _tensor(number: int) -> torch.Tensor:
    raise AssertionError(f"tensor {number} is looked up by the receiver")


class _Pickler(pickle.Pickler):
    """Puts a number in place of each tensor. The tensors' own classes know another way, which is not asked for."""

    def __init__(self, known: dict[int, tuple[int, torch.Tensor]]) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)
        self.known = known
        self.used: set[int] = set()
        self.places: list[Place] = []
        self.blocks: dict[int, Block] = {}

    def dumps(self, tree: Any) -> bytes:
        self.dump(tree)
        return self._file.getvalue()

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        number, _ = self.known.get(id(value)) or self._told(value)
        self.used.add(number)
        return _tensor, (number,)

    def _told(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        found = place_of(tensor)
        if found is None:
            raise NotShared
        place, block = found
        if block is not None:
            self.blocks[block.number] = block
        self.places.append(place)
        self.known[id(tensor)] = len(self.known), tensor
        return self.known[id(tensor)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor: Callable[[int], torch.Tensor] = tensors.__getitem__

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_tensor.__module__, _tensor.__name__):
            return self._tensor
        return super().find_class(module, name)
