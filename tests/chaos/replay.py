"""The same training without faults: plain ranks that make each step at the world size that the
disturbed run made it at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from everstep.client.runs import RunHandle
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.run_control import Stop
from tests.integration.ranks import Job, make_run_dir, train_to_end

Segments = tuple[tuple[int, int], ...]
"""(steps done at its end, world size) of each stretch of a run."""


def segments(run: RunHandle) -> Segments:
    """The stretches of the history that the run kept: what a later attempt took back is not in
    it."""
    events = list(run.events())
    # The controller tells of an attempt, its ranks of what they restored: a quick rank may be heard
    # first.
    world_sizes = {
        event.attempt: event.data["world_size"]
        for event in events
        if event.kind == "attempt_started"
    }
    starts: list[tuple[int, int]] = []
    for event in events:
        if event.kind == "restored":
            starts = [start for start in starts if start[0] < event.data["step"]]
            starts.append((event.data["step"], world_sizes[event.attempt]))
    joined: list[tuple[int, int]] = []
    for (_, size), end in zip(starts, [*(step for step, _ in starts[1:]), run.step], strict=True):
        if joined and joined[-1][1] == size:
            joined.pop()
        joined.append((end, size))
    return tuple(joined)


def replay(stretches: Segments, spec: dict[str, Any], directory: Path) -> dict[str, torch.Tensor]:
    """Weights after the same steps at the same world sizes, paused between the stretches and never
    disturbed."""
    run_dir = make_run_dir(directory)
    for submission, (end, world_size) in enumerate(stretches, start=1):
        stopped: tuple[Stop, int] | None = (
            ("pause", end - 1) if submission < len(stretches) else None
        )
        job = Job(
            run_dir,
            RunSpec.model_validate(spec),
            world_size,
            submission=submission,
            stopped=stopped,
        )
        outcome = train_to_end(job, directory)
        assert max(outcome.losses) == end, (
            f"the replay ended its stretch at step {max(outcome.losses)}, not {end}"
        )
        assert [data["source"] for data in outcome.of_kind(EventKind.RESTORED)] == [
            "fresh" if submission == 1 else "checkpoint"
        ]
    newest = max((directory / "storage").rglob("model.pt"), key=lambda path: path.parent.name)
    weights: dict[str, torch.Tensor] = torch.load(newest, weights_only=True)
    return weights
