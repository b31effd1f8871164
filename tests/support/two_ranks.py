"""Two ranks of one attempt in one process: each is a thread, and their collectives a barrier."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from storage.run_control import Stop
from tests.support.saves import make_context
from train_fn.context import WorkerContext
from train_fn.errors import CheckpointFailed, PeersGone
from train_fn.session.session import Session, leave
from train_fn.snapshots.keeper import Remains
from train_fn.state.pieces import Piece
from train_fn.state.run_state import RunState
from train_fn.step.peers import Peers

DEADLINE_S = 30.0


class SmallState(RunState):
    """Three rows of weights: whole, or the rows of a piece."""

    def __init__(self, piece: Piece | None = None) -> None:
        super().__init__()
        self.count, self.scheduler, self.rate = torch.zeros(()), 0, 0.1
        self.weight = torch.zeros(3 if piece is None else 2 - piece.number, 4)
        if piece is not None:
            self.piece, self.rows = piece, {"model/w": 3}

    @property
    def epoch(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        rest = {"optimizer": {"lr": self.rate}, "scaler": {}, "ema": None, "fingerprint": "data"}
        rest["task"], model = {"scheduler": self.scheduler}, {"count": self.count}
        if self.piece is None:
            return {**self.counters(0), **rest, "model": {**model, "w": self.weight}}
        own = {"piece": tuple(self.piece), "rows": self.rows, "shards": {"model/w": self.weight}}
        return {**self.counters(0), **rest, "model": model, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_counters(state)
        self.weight.copy_(state["model"]["w"] if self.piece is None else state["shards"]["model/w"])
        self.complete = True

    def require_sound(self, state: Mapping[str, Any]) -> None:
        pass


class Together:
    """What the collectives of two ranks do, for ranks that are threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=DEADLINE_S)
        self._said: list[Any] = [None, None]

    def exchange(self, rank: int, value: Any, kind: object = "") -> list[Any]:
        """Return both ranks' values. Both must be in the same kind of collective."""
        self._said[rank] = kind, value
        self.barrier.wait()
        kinds, found = zip(*self._said, strict=True)
        self.barrier.wait()
        assert kinds[0] == kinds[1], f"one rank is in {kinds[0]}, the other in {kinds[1]}"
        return list(found)


@dataclasses.dataclass(frozen=True)
class TwoPeers(Peers):
    together: Together

    def gather(self, value: Any) -> list[Any]:
        return self.together.exchange(self.rank, value, "gather")

    def share(self, value: Any, source: int) -> Any:
        return self.together.exchange(self.rank, value, ("share", source))[source]

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self.share(tensor.clone(), source))

    def exchange(self, own: bytes, group: Any = None) -> list[bytes]:
        return self.together.exchange(self.rank, own, ("exchange", len(own)))


def peers_of(rank: int, together: Together) -> TwoPeers:
    return TwoPeers(rank, 2, torch.device("cpu"), together)


def one_of_two(place: Path, rank: int, *, nodes: int = 2, **others: Any) -> WorkerContext:
    """The context of a rank of two, on a node of its own or on the only one."""
    ctx = make_context(place, rank, **others.pop("checkpoint", {}))
    node = {"node_id": f"node{rank % nodes}", "num_nodes": nodes}
    return dataclasses.replace(ctx, world_size=2, **node, **others)


class Rank:
    """A rank with the smallest loop that lives by a session."""

    def __init__(
        self, rank: int, place: Path, together: Together, in_pieces: bool, **how: Any
    ) -> None:
        self.ctx = one_of_two(place, rank, **how)
        self.state = SmallState(Piece(rank, 2) if in_pieces else None)
        self.peers = peers_of(rank, together)
        self.session = Session(self.ctx, self.state, self.peers)
        self.did: list[str] = []

    def begin(self) -> None:
        self.session.restore(lambda state, origin: state)
        self.session.open(exchange=self.peers.exchange)
        self.session.begin({})
        self.session.keeper.begin()

    def change(self) -> None:
        self.session.report_safe_steps()
        self.session.change()
        self.state.weight += 1

    def step(self, *, saves: bool = False) -> None:
        self.change()
        with self.session.commit():
            self.state.count_step(None)
        self.session.reporter.step_done({}, None)
        self.session.keep(is_due=saves)

    def gate(self) -> None:
        self.session.report_safe_steps()
        self.session.reporter.hand_over()

    def finish(self, stop: Stop | None = None) -> Exception | None:
        self.session.report_safe_steps()
        try:
            self.session.finish(stop)
        except CheckpointFailed as exc:
            return exc
        return None

    @property
    def beginning(self) -> tuple[str, int, float]:
        return self.session.restored.source, self.state.step, float(self.state.weight.mean())

    # -- as a ``Leaver``

    def leave(self) -> tuple[int | None, str | None]:
        error, problem = leave(self.ctx, self.session, PeersGone("rank 1 is gone"), self)
        return error.snapshot_step, problem

    def let_go(self, cause: BaseException, error: Any) -> None:
        self.did.append("let go")
        self._error = error

    def close(self) -> None:
        self.did.append("close")

    def keep(self) -> Remains:
        self.did.append("keep")
        whole = self.state.state_dict
        return self.session.keeper.leave(
            self._error, lambda: whole() if self.state.complete else "between two states"
        )


def both(action: Callable[[Any], Any], of: list[Any]) -> list[Any]:
    """Let both ranks do something at once; return what each did."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(action, of))
