"""Mistakes in the order of a loop, found in the first steps of an attempt.

What a loop changes after ``state.step()`` would be done twice, or not at all, by a restart. What
differs between ranks could not be trusted by one. Both are found by digests of two steps, which
takes a few milliseconds once.
"""

from __future__ import annotations

from train_fn.errors import BadTask
from train_fn.protect.loop_state import LoopState
from train_fn.step.peers import Peers

_STEPS = 2


class OrderWatch:
    """Compares the state of a commit with that before the next optimizer step, and between
    ranks."""

    def __init__(self, state: LoopState, peers: Peers) -> None:
        self._state, self._peers = state, peers
        self._left = _STEPS
        self._committed: dict[str, str] | None = None

    def committed(self) -> None:
        """Note the state of a commit, and compare it between ranks at the first one. A collective.

        Raises BadTask if it differs.
        """
        if not self._left:
            return
        self._committed = self._state.digests()
        if self._left == _STEPS and not self._peers.alone:
            mine = {**self._committed, **self._state.digest_of_rest()}
            self._compare(self._peers.gather(mine))
        self._left -= 1

    def renew(self) -> None:
        """Note the state again: what the loop did after the commit belongs to it."""
        if self._committed is not None:
            self._committed = self._state.digests()

    def about_to_change(self) -> None:
        """Compare the present state with that of the commit. Raises BadTask if the loop changed it
        since."""
        if self._committed is None:
            return
        before, self._committed = self._committed, None
        now = self._state.digests()
        changed = [
            name for name in before if now[name] != before[name] and not self._state.is_copied(name)
        ]
        if changed:
            raise BadTask(
                f"the loop changed {', '.join(changed)} after state.step() and before the next "
                "optimizer step, so a restart would do it twice or not at all. Move the change "
                "before state.step()"
            )

    def _compare(self, of_ranks: list[dict[str, str]]) -> None:
        for rank, digests in enumerate(of_ranks):
            differing = [
                name
                for name in digests
                if name not in self._state.parts.loaders and digests[name] != of_ranks[0].get(name)
            ]
            if differing:
                raise BadTask(
                    f"{', '.join(differing)} differ between rank {rank} and rank 0 after "
                    "state.step(). es.protect keeps one state for all ranks: wrap the model by "
                    "DistributedDataParallel, and leave what differs by rank out of extra"
                )
