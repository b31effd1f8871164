"""What ranks exchange by ``Peers`` is known to be theirs before anything is unpickled: two ranks of
gloo, of which one makes a collective of a user's instead."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from train_fn.step.peers import Peers

ENDS_S = 60.0


def gather(peers: Peers) -> Any:
    return peers.gather({"rank": peers.rank})


def share(peers: Peers) -> Any:
    return peers.share("of rank 1", 1)


def gather_as_users_do(peers: Peers) -> None:
    """Gather objects as torch does: it sends sizes first, as ``Peers`` does."""
    dist.all_gather_object([None, None], "of a user")


def broadcast_as_users_do(peers: Peers) -> None:
    dist.broadcast(torch.tensor([3]), 1)


def _main(call: Callable[[Peers], Any], rank: int, store: str, sender: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        sender.send(call(Peers(rank, 2, torch.device("cpu"))))
    except Exception as exc:
        sender.send(f"{type(exc).__name__}: {exc}")


def both(tmp_path: Path, *calls: Callable[[Peers], Any]) -> list[Any]:
    """Return what each of two ranks gets, or the text of its error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_fn.step.peers"])
    pipes, ranks = [], []
    for rank, call in enumerate(calls):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (call, rank, str(tmp_path / "store"), sender)
        ranks.append(context.Process(target=_main, args=arguments, daemon=True))
        ranks[-1].start()
        sender.close()
        pipes.append(receiver)
    try:
        return [pipe.recv() if pipe.poll(ENDS_S) else "no answer" for pipe in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_ranks_that_exchange_alike_get_what_was_sent(tmp_path: Path) -> None:
    assert both(tmp_path, gather, gather) == [[{"rank": 0}, {"rank": 1}]] * 2


@pytest.mark.parametrize(
    ("ours", "theirs"), [(gather, gather_as_users_do), (share, broadcast_as_users_do)]
)
def test_a_users_collective_is_never_taken_for_ours(
    ours: Callable[[Peers], Any], theirs: Callable[[Peers], Any], tmp_path: Path
) -> None:
    mine = both(tmp_path, ours, theirs)[0]
    assert str(mine).startswith("BadTask: a collective of the task's code was met"), mine
    assert mine.endswith("Call collectives on all ranks alike, and keep no process group")
