"""The run's size, decided from nodes that answer now: the right one at the first try, and growth
only after ranks have saved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.wire import ReasonCode
from everstep.wire.events import EventKind
from train_fn.journal.client import ActorJournalClient
from train_fn.ray_train.nodes import Look
from train_fn.ray_train.ray_internals import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import Fit, NodeView, fit_workers

logger = logging.getLogger(__name__)

_AUTOSCALER_REFRESH_S = 20.0
_WAITING_REPEAT_S = 60.0


@dataclass(frozen=True)
class _Look:
    nodes: tuple[NodeView, ...]
    fit: Fit


class LiveScalingPolicy(ScalingPolicy):  # type: ignore[misc]
    """Sizes the group by what is really there; lives in the controller."""

    def __init__(
        self,
        scaling_config: Any,
        settings: RecoverySettings,
        journal: ActorJournalClient,
        look: Look,
        held: Callable[[Collection[str]], Mapping[str, int]],
        limit: Callable[[], int | None] = lambda: None,
    ) -> None:
        """``look`` sees the nodes; ``held`` tells, given the living ones, this run's own bundles on
        each, which count as free; ``limit`` is the most ranks that the run may use now, None for as
        many as it asks for."""
        super().__init__(scaling_config)
        self._settings = settings
        self._journal = journal
        self._look_at_nodes = look
        self._held = held
        self._limit = limit
        self._not_before = 0.0
        self._waiting_since: float | None = None
        self._waiting_told = float("-inf")
        self._looked_at = 0.0
        self._room_since: float | None = None
        self.wanted: int | None = None
        """Size to change to once the ranks have left, None while none is wanted."""
        self.draining: frozenset[str] = frozenset()
        """Nodes that the ranks are to leave before they are taken away."""
        self._leave_by: float | None = None
        """When the first of these is taken away, in unix seconds; None where nobody said."""

    # -- without a group

    def back_off(self, seconds: float) -> None:
        """Start no group for so long."""
        self._not_before = time.monotonic() + seconds

    @property
    def waiting(self) -> bool:
        """Whether the last look found too little for the smallest group."""
        return self._waiting_since is not None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self.wanted = None
        self._room_since = None
        if time.monotonic() < self._not_before:
            return NoopDecision()
        return self._resize_to_what_is_there()

    def _resize_to_what_is_there(self) -> ScalingDecision:
        look = self._look()
        if look is None:
            return NoopDecision()
        if look.fit.missing:
            self._tell_waiting(look.fit)
            return NoopDecision()
        self._waiting_since = None
        return self._resize(look.fit.num_workers)

    def _look(self) -> _Look | None:
        """The nodes as they are now and what fits on them; None where the GCS does not answer,
        which is a matter of waiting."""
        config = self.scaling_config
        try:
            nodes = self._look_at_nodes()
            held = self._held({node.node_id for node in nodes})
        except Exception as exc:
            logger.warning("the cluster's nodes could not be seen: %s", exc)
            return None
        fit = fit_workers(
            nodes,
            held,
            config._resources_per_worker_not_none,
            min_workers=config.min_workers,
            max_workers=self._most_workers(),
            strategy=config.placement_strategy,
        )
        return _Look(nodes, fit)

    def _most_workers(self) -> int:
        """Ranks that the run may have now; never fewer than it needs."""
        least, most, limit = (
            self.scaling_config.min_workers,
            self.scaling_config.max_workers,
            self._limit(),
        )
        return int(most if limit is None else max(least, min(most, limit)))

    def _tell_waiting(self, fit: Fit) -> None:
        now = time.monotonic()
        if self._waiting_since is not None and now - self._waiting_told < _WAITING_REPEAT_S:
            return
        self._waiting_since = self._waiting_since or now
        self._waiting_told = now
        needs = ", ".join(f"{amount:g} {name}" for name, amount in fit.missing.items())
        least = self.scaling_config.min_workers
        message = (
            f"room for {fit.num_workers} of at least {least} workers; {needs} more must become "
            "free on live nodes"
        )
        self._journal.emit(
            EventKind.WAITING,
            {
                "code": ReasonCode.WAITING_FOR_CAPACITY.value,
                "message": message,
                "missing": fit.missing,
            },
        )

    # -- with a group

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Only notes in ``wanted`` that the group should change; the controller asks its ranks to
        save and leave first.

        A smaller count while ranks run is left to the failure path, which sees why, unless the
        service has limited the run.
        """
        if worker_group_status.finished:
            return self._resize_after_yield()
        now = time.monotonic()
        if now - self._looked_at < self._settings.resize_interval_s:
            return NoopDecision()
        self._looked_at = now
        look = self._look()
        if look is None:
            return NoopDecision()
        self.draining = self._draining(look.nodes, worker_group_state)
        if self.draining:
            self.wanted = look.fit.num_workers
        elif worker_group_state.num_workers > self._most_workers():
            # Another run needs the room: at once, but the ranks save first, as always.
            self.wanted = self._most_workers()
        elif now - worker_group_state.start_time < self._settings.growth_cooldown_s:
            return NoopDecision()
        elif look.fit.num_workers <= worker_group_state.num_workers:
            self._room_since = None
        elif self._room_since is None:
            self._room_since = now
        elif now - self._room_since >= self._settings.growth_settle_s:
            self.wanted = look.fit.num_workers
        return NoopDecision()

    def must_have_left(self, now: float) -> bool:
        """Whether a node with ranks is taken away by ``now``, in unix seconds."""
        return bool(self.draining) and self._leave_by is not None and self._leave_by <= now

    def _draining(self, nodes: tuple[NodeView, ...], worker_group_state: Any) -> frozenset[str]:
        """Nodes with ranks of this group that are about to be taken away."""
        used = {worker.metadata.node_id for worker in worker_group_state.workers}
        leaving = [node for node in nodes if node.draining and node.node_id in used]
        self._leave_by = min(
            (node.drain_deadline for node in leaving if node.drain_deadline is not None),
            default=None,
        )
        return frozenset(node.node_id for node in leaving)

    def _resize_after_yield(self) -> ScalingDecision:
        """The ranks have left for a resize: the size is what is there now, not what was there when
        they were asked.

        Where too little is there, the group ends all the same, so that nothing stays on a node that
        it was to leave: its next start finds no room, and the run then waits as any other does, and
        says so.
        """
        self.wanted = None
        self._room_since = None
        look = self._look()
        if look is None:
            return NoopDecision()
        return self._resize(
            self.scaling_config.min_workers if look.fit.missing else look.fit.num_workers
        )

    def _resize(self, num_workers: int) -> ScalingDecision:
        return ResizeDecision(
            num_workers=num_workers,
            resources_per_worker=self.scaling_config._resources_per_worker_not_none,
        )

    # -- callbacks of the controller

    def after_controller_start(self, train_run_context: Any) -> None:
        """Tell the autoscaler what the run wants, from a thread: the coordinator's process may take
        seconds to start."""
        if not self._settings.autoscaler_requests:
            return

        def request() -> None:
            try:
                super(LiveScalingPolicy, self).after_controller_start(train_run_context)
                while self._coordinator_client is not None:
                    time.sleep(_AUTOSCALER_REFRESH_S)
                    self._maybe_send_resource_request()
            except Exception as exc:
                logger.warning("the autoscaler was not told of this run: %s", exc)

        threading.Thread(target=request, name="autoscaler-requests", daemon=True).start()

    def _get_num_workers_for_resource_request(self) -> int:
        return self._most_workers()
