"""How fast a run trains, and which resources it has held: folded from its events like the time.

The ledger is stored in the run's row. Time is in whole microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from everstep.spec.sections import ScalingSpec
from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.model.rows import EventRow
from service.projections.goodput import to_us

_RECENT_S: Final = 60.0
"""Steps older than this have lost most of their weight in the pace."""
_SILENCE_S: Final = 10.0
"""Seconds without a step from which on the pace falls."""
_HOLDING: Final = frozenset({RunStatus.STARTING, RunStatus.RUNNING, RunStatus.STOPPING})
"""Statuses in which ranks hold resources, from the start of an attempt."""


@dataclass
class WorkLedger:
    """Pace and resources up to ``at_us``. Later time is held by ``ranks`` ranks."""

    cpus_per_rank: float
    gpus_per_rank: float
    """GPUs of a rank that trains on a GPU."""
    at_us: int
    ranks: int = 0
    on_gpu: bool = False
    """Whether the ranks of the newest attempt that trained were on GPUs."""
    held_us: int = 0
    """Time of all ranks of the current attempt together."""
    rank_us: int = 0
    """The same of earlier attempts."""
    gpu_rank_us: int = 0
    """The part of ``rank_us`` on GPUs."""
    step: int | None = None
    """Last step of this attempt."""
    step_at_us: int = 0
    recent_steps: float = 0.0
    recent_s: float = 0.0
    """Steps of this attempt and their time, with weights that fall with age."""

    @classmethod
    def begin(cls, scaling: ScalingSpec, created_at: float) -> Self:
        resources = scaling.resources_per_worker
        return cls(
            cpus_per_rank=resources.get("CPU", 0.0),
            gpus_per_rank=resources.get("GPU", 1.0),
            at_us=to_us(created_at),
            on_gpu=scaling.use_gpu is True or "GPU" in resources,
        )

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Self:
        """Return the stored ledger. Fields of newer versions are ignored."""
        return cls(**{name: state[name] for name in cls.__dataclass_fields__ if name in state})

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def apply(self, event: EventRow, latest: float) -> None:
        """Account for the next event of the run's history. Later times count as ``latest``."""
        data = event.data
        if event.kind == EventKind.METRICS:
            for point in data["points"]:
                self._step_done(min(to_us(point["at"]), to_us(latest)), int(point["step"]))
            return
        self._advance(min(to_us(event.at), to_us(latest)))
        match event.kind:
            case EventKind.ATTEMPT_STARTED:
                self._release()
                self.ranks = int(data["world_size"])
            case EventKind.TRAINING_STARTED if data.get("device"):
                self.on_gpu = str(data["device"]).startswith("cuda")
            case EventKind.ATTEMPT_ENDED | EventKind.SUBMISSION_STARTED | EventKind.FINISHED:
                self._release()
            case EventKind.STATUS if data["to"] not in _HOLDING:
                self._release()

    def steps_per_s(self, now: float) -> float | None:
        """Return the pace of the current attempt; None before its second step.

        It falls while no step is reported.
        """
        if not self.recent_s or not self.recent_steps:
            return None
        pace = self.recent_steps / self.recent_s
        silent_s = now - self.step_at_us / 1e6
        return pace if silent_s <= _SILENCE_S else min(pace, 1 / silent_s)

    def hours(self, now: float) -> tuple[float, float]:
        """Return the GPU hours and CPU hours that all attempts have held until ``now``."""
        held_us = self.held_us + self.ranks * max(0, to_us(now) - self.at_us)
        gpu_rank_us = self.gpu_rank_us + (held_us if self.on_gpu else 0)
        hour_us = 3.6e9
        return (
            gpu_rank_us * self.gpus_per_rank / hour_us,
            (self.rank_us + held_us) * self.cpus_per_rank / hour_us,
        )

    def _advance(self, to: int) -> None:
        if to > self.at_us:
            self.held_us += self.ranks * (to - self.at_us)
            self.at_us = to

    def _release(self) -> None:
        """End the current attempt: its ranks hold nothing from here on."""
        self.rank_us += self.held_us
        if self.on_gpu:
            self.gpu_rank_us += self.held_us
        self.held_us = self.ranks = 0
        self.step, self.recent_steps, self.recent_s = None, 0.0, 0.0

    def _step_done(self, at: int, step: int) -> None:
        self._advance(at)
        if self.step is not None and step > self.step and at > self.step_at_us:
            seconds = (at - self.step_at_us) / 1e6
            weight = math.exp(-seconds / _RECENT_S)
            self.recent_steps = self.recent_steps * weight + step - self.step
            self.recent_s = self.recent_s * weight + seconds
        if self.step is None or step > self.step:
            self.step, self.step_at_us = step, at
