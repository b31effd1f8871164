"""Prove that every node of a group uses the same storage, before the first step.

A local path that is not shared seems fine on every node: each would write its part into its own
directory, and the next attempt would miss the checkpoint on another node. So each node writes a
file whose bytes follow from its name. Rank 0's node reads those of all others, and they read those
of rank 0's node and of the driver.
"""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

from storage.errors import StorageError, StorageNotFound, StorageUnavailable
from storage.run_control import DRIVER_PROBE, probe_bytes
from train_fn.context import WorkerContext
from train_fn.errors import StorageNotShared
from train_fn.step.peers import Peers

APPEAR_S = 5.0
"""How long a network filesystem may take to show a file that another node has written."""
POLL_S = 0.1


@dataclass(frozen=True)
class _Answer:
    """The result of one rank. ``node`` is None for further ranks of a node, which read nothing."""

    node: str | None
    host: str
    error: StorageError | None = None
    differs: str | None = None
    """What shows that this node's storage is another one."""


def prove_storage(ctx: WorkerContext, peers: Peers) -> None:
    """Check that all nodes and the driver read the same bytes. A collective.

    A node that has written before in this submission only reads.

    Raises, on all ranks alike:
        StorageNotShared: they do not. The message says which node lacks what, and what to do.
        StorageError: a node could not use the storage at all.
    """
    leads, host = ctx.local_rank == 0, platform.node()
    written = _Answer(ctx.node_id, host, _write(ctx)) if leads else _Answer(None, host)
    leaders = [answer for answer in peers.gather(written) if answer.node is not None]
    _raise_first(leaders)
    seen = written
    if leads:
        others = leaders[1:] if ctx.node_id == leaders[0].node else leaders[:1]
        seen = _look(
            ctx,
            host,
            {DRIVER_PROBE: "the driver", **{_name(answer): _words(answer) for answer in others}},
        )
    answers = peers.gather(seen)
    _raise_first(answers)
    for answer in answers:
        if answer.differs is not None:
            raise StorageNotShared(
                f"storage {ctx.run_dir.storage.uri} is not the same on all nodes: "
                f"{_words(answer)} {answer.differs}. "
                "Mount one shared filesystem there on every node, the head included, or use s3://"
            )


def _raise_first(answers: list[_Answer]) -> None:
    for answer in answers:
        if answer.error is not None:
            raise StorageUnavailable(
                f"{_words(answer)} cannot use the run's storage: {answer.error}"
            ) from answer.error


def _name(answer: _Answer) -> str:
    assert answer.node is not None
    return answer.node


def _words(answer: _Answer) -> str:
    return f"node {answer.node} (host {answer.host})"


def _write(ctx: WorkerContext) -> StorageError | None:
    """Write this node's probe, unless an earlier attempt did."""
    run_dir, expected = ctx.run_dir, probe_bytes(ctx.run_dir, ctx.submission, ctx.node_id)
    try:
        try:
            is_right = run_dir.read_probe(ctx.submission, ctx.node_id) == expected
        except StorageNotFound:
            is_right = False
        if not is_right:
            run_dir.write_probe(ctx.submission, ctx.node_id)
            if run_dir.read_probe(ctx.submission, ctx.node_id) != expected:
                return StorageUnavailable("it gave back other bytes than were written")
    except StorageError as exc:
        return exc
    return None


def _look(ctx: WorkerContext, host: str, names: dict[str, str]) -> _Answer:
    """Read what others have written. ``names`` says in words who."""
    try:
        for name, words in names.items():
            read = functools.partial(ctx.run_dir.read_probe, ctx.submission, name)
            found = appeared(read, time.monotonic() + APPEAR_S)
            if found is None:
                return _Answer(ctx.node_id, host, differs=f"does not see what {words} has written")
            if found != probe_bytes(ctx.run_dir, ctx.submission, name):
                return _Answer(
                    ctx.node_id, host, differs=f"reads other bytes than {words} has written"
                )
    except StorageError as exc:
        return _Answer(ctx.node_id, host, exc)
    return _Answer(ctx.node_id, host)


def appeared(read: Callable[[], bytes], deadline: float) -> bytes | None:
    """Return what ``read`` returns once it does not raise StorageNotFound; None if it still does at
    ``deadline``, in monotonic seconds."""
    while True:
        try:
            return read()
        except StorageNotFound:
            if time.monotonic() >= deadline:
                return None
        time.sleep(POLL_S)
