"""A rank's own work in a step, without the time that it waits for peers, and the rank for which
the others wait.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from everstep.wire.events import EventKind
from train_fn.recovery.links import SLOW_RATIO
from train_fn.samples.shares import divided


class StepClock:
    """Measure one rank's own time: from the last step's gate, which all ranks pass together, to its
    last gradient in this step.

    The rest until the next gate is the all-reduce: moving gradients, or waiting for slower ranks.
    The first step finds the parameter that gets the last gradient. Only that parameter keeps its
    hook. On CUDA, events on the stream give the times, without waiting for it.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._began: float | torch.cuda.Event | None = None
        self._last_gradient: float | torch.cuda.Event | None = None
        self._newest: torch.Tensor | None = None
        self._hooks: dict[int, Any] = {
            id(parameter): parameter.register_post_accumulate_grad_hook(self._mark)  # type: ignore[no-untyped-call]
            for parameter in parameters
        }

    def restart(self) -> None:
        """Discard the time until the next gate, because work outside of steps came between."""
        self._began = None

    def gate(self) -> float:
        """Mark the gate that this rank has just passed. Return the seconds of its own work in that
        step; 0 if unknown."""
        own_s = (
            self._elapsed_s()
            if self._began is not None and self._last_gradient is not None
            else 0.0
        )
        if self._newest is not None and len(self._hooks) > 1:
            self._keep_hook_of(self._newest)
        self._began, self._last_gradient = self._now(), None
        return own_s

    def close(self) -> None:
        """Measure nothing any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _keep_hook_of(self, last: torch.Tensor) -> None:
        kept = self._hooks.pop(id(last))
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {id(last): kept}

    def _mark(self, parameter: torch.Tensor) -> None:
        self._last_gradient, self._newest = self._now(), parameter

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _elapsed_s(self) -> float:
        began, ended = self._began, self._last_gradient
        if isinstance(began, float) and isinstance(ended, float):
            return ended - began
        assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
        return began.elapsed_time(ended) / 1000 if ended.query() else 0.0  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- stragglers

# Find the rank that the others wait for. Rank 0 aggregates every rank's own time by step, and
# reports a rank that stays slow.

WINDOW_S = 5.0
"""Shortest time in seconds over which steps are collected for one comparison."""
WINDOW_STEPS = 20
"""Fewest steps in one comparison."""
PERSISTS = 12
"""Consecutive windows for which a rank must be slow, or no longer slow, before this is reported: a
minute at least. A rank that is busy for a moment is not a straggler."""
SLOW_S = 0.003
"""A straggler is slower than its peers by more than this many seconds in a step, and by
``SLOW_RATIO``."""
REPORT_EVERY_S = 60.0
"""Interval in seconds between reports of every rank's times while nothing changes."""
_STEPS_KEPT = 256

Emit = Callable[[EventKind, dict[str, Any]], None]


class StragglerWatch:
    """Compare every rank's own seconds in each step. Only rank 0 has a StragglerWatch.

    Ranks are compared by their time for one micro-batch, since their shares of a global batch may
    differ. If shares follow speed, a rank is slow only as far as they cannot make up for it.
    Medians are compared, so that an occasional checkpoint or evaluation does not make a rank a
    straggler.
    """

    def __init__(
        self,
        emit: Emit,
        node_ids: Sequence[str],
        shares: Sequence[int],
        monotonic: Callable[[], float] = time.monotonic,
        *,
        by_speed: bool = False,
    ) -> None:
        """Start with no rank marked as slow.

        Args:
            emit: receives ``rank_times`` and ``straggler`` events.
            node_ids: the node of each rank.
            shares: micro-batches of each rank in a full global batch.
            monotonic: returns seconds on a monotonic clock.
            by_speed: whether shares follow the ranks' speed (``scaling.shares``).
        """
        self._emit, self._by_speed = emit, by_speed
        self._node_ids = tuple(node_ids)
        self._monotonic = monotonic
        self._window: deque[tuple[float, ...]] = deque(maxlen=_STEPS_KEPT)
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._window_began: float | None = None
        self.divide_anew(shares)
        self._in_a_row = [0] * len(self._node_ids)
        self._slow = [False] * len(self._node_ids)

    def divide_anew(self, shares: Sequence[int]) -> None:
        """Begin a window with these shares, and report it: the ranks have other ones now."""
        self._shares = tuple(max(1, share) for share in shares)
        self._window.clear()
        self._steps_s.clear()
        self._window_began, self._reported_at = None, float("-inf")

    def note(self, step: int, own_s: Sequence[float], step_s: float) -> None:
        """Add one step: every rank's own seconds (0 if unknown), and the seconds of the whole
        step."""
        now = self._monotonic()
        if self._window_began is None:
            self._window_began = now
        if all(own_s):
            self._window.append(tuple(own_s))
            self._steps_s.append(step_s)
        if len(self._window) < WINDOW_STEPS or now - self._window_began < WINDOW_S:
            return
        own = [median(times) for times in zip(*self._window, strict=True)]
        typical_s = median(self._steps_s)
        self._window.clear()
        self._steps_s.clear()
        self._window_began = now
        changed = self._compare(step, own)
        if changed or now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            self._emit(
                EventKind.RANK_TIMES,
                {"step": step, "step_s": round(typical_s, 6), "ranks": self._rows(own, typical_s)},
            )

    def _rows(self, own: Sequence[float], step_s: float) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "node_id": self._node_ids[rank],
                "micro_batches": self._shares[rank],
                "own_s": round(seconds, 6),
                "wait_s": round(max(0.0, step_s - seconds), 6),
                "skew": round(seconds / peers_s, 3),
            }
            for rank, (seconds, peers_s) in enumerate(zip(own, self._peers_s(own), strict=True))
        ]

    def _peers_s(self, own: Sequence[float]) -> list[float]:
        """Return for each rank the seconds that a typical peer would need for its share; longer if
        peers still work that long once shares follow the speed of these times."""
        of_micro_batch = [seconds / share for seconds, share in zip(own, self._shares, strict=True)]
        others_s = medians_of_others(of_micro_batch)
        if self._by_speed:
            fitting = divided(sum(self._shares), tuple(of_micro_batch))
            then_s = medians_of_others(list(map(operator.mul, of_micro_batch, fitting)))
            others_s = list(map(max, others_s, map(operator.truediv, then_s, fitting)))
        return [max(each * share, 1e-9) for each, share in zip(others_s, self._shares, strict=True)]

    def _compare(self, step: int, own: Sequence[float]) -> bool:
        """Report ranks that have become slow, or are no longer slow. Return whether there were
        any."""
        changed = False
        for rank, (seconds, peers_s) in enumerate(zip(own, self._peers_s(own), strict=True)):
            slow = seconds > SLOW_RATIO * peers_s and seconds > peers_s + SLOW_S
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if slow != self._slow[rank] else 0
            if self._in_a_row[rank] < PERSISTS:
                continue
            self._slow[rank], self._in_a_row[rank], changed = slow, 0, True
            self._emit(
                EventKind.STRAGGLER,
                {
                    "rank": rank,
                    "node_id": self._node_ids[rank],
                    "step": step,
                    "slow": slow,
                    "own_s": round(seconds, 6),
                    "peers_s": round(peers_s, 6),
                    "skew": round(seconds / peers_s, 3),
                },
            )
        return changed


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each of several values the median of all others."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranked = [values[number] for number in order]
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # in the middle of the others
    medians = [0.0] * len(values)
    for place, number in enumerate(order):
        # those above the value that is left out move down by one
        medians[number] = (ranked[low + (low >= place)] + ranked[high + (high >= place)]) / 2
    return medians
