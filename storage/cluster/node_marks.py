"""Marks of nodes that may take no rank: ``cluster/nodes.json``, from the service to drivers.

Only the service writes it, and always as a whole. Without the file no node is marked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from everstep.spec import plain_text
from storage.errors import CorruptFile, StorageNotFound
from storage.filesystem import Storage

PATH = "cluster/nodes.json"
VERSION = 1

MarkState = Literal["cordoned", "draining"]


@dataclass(frozen=True)
class NodeMark:
    """A node that takes no new ranks. Ranks also leave a node that is ``draining``. Times are unix
    seconds."""

    node_id: str
    state: MarkState
    reason: str | None
    by: str
    """Name of whoever set the mark."""
    at: float
    deadline: float | None = None
    """When a draining node will be removed; None if unknown."""


def encode_marks(marks: Iterable[NodeMark]) -> bytes:
    """Return the file's bytes; equal marks give equal bytes."""
    nodes = {}
    for mark in sorted(marks, key=lambda mark: mark.node_id):
        fields = asdict(mark)
        nodes[fields.pop("node_id")] = fields
    return json.dumps({"version": VERSION, "nodes": nodes}, indent=1).encode()


NO_MARKS = encode_marks(())


def read_marks_file(storage: Storage) -> bytes:
    """Return the file's bytes; NO_MARKS if it does not exist. Raises StorageError."""
    try:
        return storage.files.read(PATH)
    except StorageNotFound:
        return NO_MARKS


def write_marks_file(storage: Storage, data: bytes) -> None:
    """Replace the file atomically. Raises StorageError."""
    storage.files.write(PATH, data)


def read_node_marks(storage: Storage) -> dict[str, NodeMark]:
    """Return the marks by node id. Fields of a newer service are ignored.

    Raises StorageError; CorruptFile if the file has other content.
    """
    data = read_marks_file(storage)
    try:
        nodes = plain_text.parse_json(data)["nodes"]
        return {node_id: _mark(node_id, fields) for node_id, fields in nodes.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptFile(
            f"{storage.files.path(PATH)} does not contain node marks: {data[:80]!r}"
        ) from exc


def _mark(node_id: str, fields: dict[str, object]) -> NodeMark:
    state, deadline = fields["state"], fields.get("deadline")
    if state not in ("cordoned", "draining"):
        raise ValueError(f"unknown state {state!r}")
    return NodeMark(
        node_id=node_id,
        state="draining" if state == "draining" else "cordoned",
        reason=None if fields.get("reason") is None else str(fields["reason"]),
        by=str(fields.get("by", "")),
        at=float(str(fields["at"])),
        deadline=None if deadline is None else float(str(deadline)),
    )
