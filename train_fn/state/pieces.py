"""Pieces of a state that is sharded over ranks: who owns which rows, who keeps whose copy, and who
sends what to whom. Pure rules, so every rank decides alike.

A tensor is cut along its first dimension as ``torch.chunk`` does, and as FSDP2 does. So the place
of a piece follows from its number and from how many there are. A state that every rank holds whole
is the special case of one piece.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Piece(NamedTuple):
    """Name one of ``of`` pieces of a state. The one of rank ``number`` in a group of that size."""

    number: int = 0
    of: int = 1

    def __str__(self) -> str:
        return f"piece {self.number} of {self.of}"


WHOLE = Piece()
"""All of a state."""


def rows_of(rows: int, piece: Piece) -> tuple[int, int]:
    """Return the first row of a tensor that is in a piece, and the one after the last."""
    size = -(-rows // piece.of)
    return min(piece.number * size, rows), min((piece.number + 1) * size, rows)


def needed(rows: Iterable[int], of: int, piece: Piece) -> list[int]:
    """Return which of ``of`` pieces hold rows of ``piece``: at least one, which says how empty
    tensors look.

    Args:
        rows: how many the tensors have.
    """
    found = set()
    for count in set(rows):
        first, end = rows_of(count, piece)
        for number in range(of):
            start, stop = rows_of(count, Piece(number, of))
            if max(first, start) < min(end, stop):
                found.add(number)
    return sorted(found) or [min(piece.number, of - 1)]


def cut_anew(
    rows: Mapping[str, int],
    pieces: Mapping[int, Mapping[str, torch.Tensor]],
    of: int,
    piece: Piece,
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``piece``, from those of the pieces of another group that ``needed``
    names.

    Args:
        rows: how many each tensor has, by name.
        of: how many pieces there were.

    Raises ValueError if the pieces do not have the rows that their places say.
    """
    found = {}
    for name, count in rows.items():
        first, end = rows_of(count, piece)
        parts, at = [], first
        for number in sorted(pieces):
            start, stop = rows_of(count, Piece(number, of))
            tensor = pieces[number][name]
            if len(tensor) != stop - start:
                raise ValueError(
                    f"{name} has {len(tensor)} rows in {Piece(number, of)} instead of "
                    f"{stop - start}"
                )
            low, high = max(at, start), min(end, stop)
            if low < high:
                parts.append(tensor[low - start : high - start])
                at = high
        if at != end:
            raise ValueError(f"rows {at} to {end} of {name} are in none of pieces {sorted(pieces)}")
        one = parts[0] if parts else next(iter(pieces.values()))[name][:0]
        found[name] = one if len(parts) < 2 else torch.cat(parts)
    return found


def group_size(nodes: Sequence[str]) -> int:
    """Return over how many ranks a model is cut so that each node has all of it: those of a node.

    Return the number of all ranks unless there are several nodes, each with the same number of
    ranks, two or more, in a row.
    """
    size = nodes.count(nodes[0])
    in_rows = [node for node in dict.fromkeys(nodes) for _ in range(size)]
    return size if size > 1 and in_rows == list(nodes) else len(nodes)


WEIGHT, MOMENT, AVERAGE = "model/", "optimizer/", "ema/"
"""Begin the names of a state's shards that are rows of weights, of an optimizer's values, and of
averaged weights."""


def weights_in(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights and buffers in a state, by name: of sharded ones the rows of its piece."""
    shards = state.get("shards") or {}
    rows = {name: value for name, value in shards.items() if name.startswith(WEIGHT)}
    return {**state["model"], **{each.removeprefix(WEIGHT): rows[each] for each in rows}}


def whole_shapes(piece: Mapping[str, Any], kind: str = WEIGHT) -> dict[str, torch.Tensor]:
    """Return empty tensors of the shapes that the sharded weights have over all ranks, by name.

    Args:
        piece: any of them, as a checkpoint has it.
    """
    return {
        name.removeprefix(kind): piece["shards"][name].new_empty(
            (count, *piece["shards"][name].shape[1:]), device="meta"
        )
        for name, count in piece["rows"].items()
        if name.startswith(kind)
    }


def joined(
    common: Mapping[str, Any], pieces: Mapping[int, Mapping[str, Any]], of: int
) -> dict[str, Any]:
    """Return the state of a task that every rank holds whole, from all pieces of a sharded one."""
    shards = {number: piece["shards"] for number, piece in pieces.items()}
    model, moments = dict(common["model"]), _moments_of(common["optimizer"])
    averages = {}
    for name, value in cut_anew(pieces[0]["rows"], shards, of, WHOLE).items():
        if name.startswith(WEIGHT):
            model[name.removeprefix(WEIGHT)] = value
        elif name.startswith(AVERAGE):
            averages[name.removeprefix(AVERAGE)] = value
        else:
            _, number, key = name.removeprefix(MOMENT).split("/", 2)
            moments.setdefault(int(number), {})[key] = value
    left_out = {"piece", "rows", "shards"}
    rest = {name: value for name, value in common.items() if name not in left_out}
    optimizer = {**common["optimizer"], "state": moments}
    whole = {"model": model, "optimizer": optimizer, "ema": averages or None}
    return {**rest, **whole, "unsaved": pieces[0]["unsaved"]}


def in_one_piece(
    state: Mapping[str, Any], rows: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what all pieces of a task's whole state have in common, and its only piece.

    Args:
        rows: names of the shards that are rows of weights.
    """
    model, moments = dict(state["model"]), _moments_of(state["optimizer"])
    names = {name: name.removeprefix(WEIGHT) for name in rows}
    shards = {name: model.pop(key) for name, key in names.items() if key in model}
    averages = state["ema"] or {}  # and buffers, in a checkpoint
    shards |= {AVERAGE + key: averages[key] for key in names.values() if key in averages}
    for number, values in moments.items():
        # A moment has the shape of its weight. A count of steps has no dimension.
        for key in [key for key, value in values.items() if getattr(value, "ndim", 0)]:
            shards[f"{MOMENT}/{number}/{key}"] = values.pop(key)
    piece = {
        "piece": tuple(WHOLE),
        "rows": {name: len(value) for name, value in shards.items()},
        "shards": shards,
        "unsaved": state.get("unsaved"),
    }
    optimizer = {**state["optimizer"], "state": moments}
    return {**state, "model": model, "optimizer": optimizer, "ema": None, "shards": None}, piece


def _moments_of(optimizer: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    return {number: dict(values) for number, values in optimizer["state"].items()}


# ---------------------------------------------------------------- heirs


def heirs(nodes: Sequence[str], of: int | None = None) -> list[int | None]:
    """Return for each rank the one on another node that keeps copies of its pieces; None for all
    if there is one node, and for a rank whose piece a rank of another node has in any case.

    Each rank is the heir of one, unless a node has over half of the ranks.

    Args:
        of: how many pieces there are, if ranks hold the same one. Rank r has piece r % of.
    """
    of = of or len(nodes)
    return [
        None if {*nodes[rank % of :: of]} - {nodes[rank]} else heir
        for rank, heir in enumerate(_on_other_nodes(nodes))
    ]


def _on_other_nodes(nodes: Sequence[str]) -> list[int | None]:
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    found: list[int | None] = [None] * len(nodes)
    if len(by_node) == 1:
        return found
    largest = max(by_node.values(), key=len)
    order = [rank for ranks in by_node.values() for rank in ranks]
    if 2 * len(largest) <= len(nodes):
        # A shift by the largest node's size leaves every node.
        for at, rank in enumerate(order):
            found[rank] = order[(at + len(largest)) % len(order)]
        return found
    others = [rank for rank in order if rank not in largest]
    for side, other in ((largest, others), (others, largest)):
        for at, rank in enumerate(side):
            found[rank] = other[at % len(other)]
    return found


class Move(NamedTuple):
    """A piece that travels from one rank's node to another's."""

    source: int
    target: int
    number: int


def moves(
    held: Sequence[Collection[int]], needs: Sequence[Collection[int]], nodes: Sequence[str]
) -> Iterator[Move]:
    """Yield what has to travel so that each rank finds on its node what it needs. Holders send by
    turns, and one rank of a node receives for all.

    Args:
        held: pieces on each rank's node. Every piece that is needed is somewhere.
        needs: pieces that each rank needs.
    """
    coming = set()
    for target, node in enumerate(nodes):
        for number in sorted(needs[target]):
            if number in held[target] or (node, number) in coming:
                continue
            holders = [rank for rank, there in enumerate(held) if number in there]
            coming.add((node, number))
            yield Move(holders[target % len(holders)], target, number)
