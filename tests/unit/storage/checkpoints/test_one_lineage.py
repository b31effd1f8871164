"""Storage, ranks and the service agree which states count, and which checkpoint is the best."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hypothesis import example, given
from hypothesis import strategies as st

from everstep.wire.events import EventKind
from service.model.rows import EventRow
from service.projections import checkpoints as projection
from storage.checkpoints.reader import RestorePoint, best_of, in_lineage
from storage.run_dir import CheckpointName, Origin
from train_fn.snapshots import election
from train_fn.snapshots.store import Label

ACT = st.tuples(
    st.sampled_from(["same submission", "newer submission"]),
    st.sampled_from(["newest", "older", "snapshot", "fresh"]),
    st.integers(0, 7),  # which older checkpoint
    # steps between the commits of this attempt, each with its evaluation
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=4),
)


@dataclass
class History:
    """A run as it happened: every state knows the checkpoints that it descends from."""

    ancestors: list[CheckpointName] = field(default_factory=list)
    """What the newest attempt's state descends from, and has committed."""
    last_step: int = 0
    points: dict[Origin, RestorePoint] = field(default_factory=dict)
    names: list[CheckpointName] = field(default_factory=list)
    scores: dict[CheckpointName, float] = field(default_factory=dict)
    events: list[EventRow] = field(default_factory=list)

    def begin(self, origin: Origin, how: str, pick: int) -> None:
        """Restore by one of the ways that a run has."""
        source = "snapshot" if how == "snapshot" else "checkpoint"
        if how == "fresh" or not self.ancestors:
            source, step, self.ancestors = "fresh", 0, []
        elif how == "snapshot":  # a state beyond the newest checkpoint
            step = self.last_step
        else:
            index = -1 if how == "newest" else pick % len(self.ancestors)
            step = self.ancestors[index].step
            self.ancestors = [name for name in self.ancestors if name.step <= step]
        self.last_step = step
        self.points[origin] = RestorePoint(step, source == "fresh")
        self._report(EventKind.RESTORED, origin, step=step, source=source)

    def commit(self, origin: Origin, steps: int, score: float) -> None:
        self.last_step += steps
        name = CheckpointName(self.last_step, *origin)
        self.names.append(name)
        self.ancestors.append(name)
        self.scores[name] = score
        self._report(
            EventKind.CHECKPOINT_COMMITTED,
            origin,
            step=name.step,
            name=str(name),
            epoch=0,
            size_bytes=1,
            digest="d" * 64,
            metrics={"val_score": score},
        )

    def _report(self, kind: EventKind, origin: Origin, **data: object) -> None:
        number = len(self.events) + 1
        self.events.append(EventRow(number, float(number), kind, *origin, data))


@given(acts=st.lists(ACT, min_size=1, max_size=8), mode=st.sampled_from(["min", "max"]))
@example(acts=[("same submission", "fresh", 0, [(5, 1), (5, 1)])] * 2, mode="max")
def test_everybody_reads_one_lineage_and_one_best_checkpoint(
    acts: list[tuple[str, str, int, list[tuple[int, int]]]], mode: Literal["min", "max"]
) -> None:
    """Attempts count from 1 again in each submission."""
    history, origin = History(), (1, 0)
    for follows, how, pick, commits in acts:
        is_newer = follows == "newer submission"
        origin = (origin[0] + 1, 1) if is_newer else (origin[0], origin[1] + 1)
        history.begin(origin, how, pick)
        for steps, score in commits:
            history.commit(origin, steps, float(score))

    expected = history.ancestors
    assert in_lineage(history.names, history.points) == sorted(expected)
    listed = projection.checkpoints(history.events, {})
    assert [item.name for item in listed] == [str(name) for name in expected]
    candidates = [
        election.Candidate(0, Label(name.submission, name.attempt, name.step, 0, "d", None))
        for name in history.names
    ]
    standing, rejected = election.in_lineage(candidates, history.points)
    assert [CheckpointName(o.label.step, *o.label.origin) for o in standing] == expected
    assert len(standing) + len(rejected) == len(candidates)

    # Training keeps the first state that beats all before it.
    first_best: CheckpointName | None = None
    for name in expected:
        best_so_far = None if first_best is None else history.scores[first_best]
        score = history.scores[name]
        if best_so_far is None or (score > best_so_far if mode == "max" else score < best_so_far):
            first_best = name
    for found in (best_of(listed, "score", mode), projection.best(listed[::-1], "val_score", mode)):
        assert (found and found.name) == (first_best and str(first_best))
