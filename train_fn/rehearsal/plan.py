"""The whole rehearsal: which deaths, in which order, and what they showed."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from everstep.errors import UsageError
from everstep.spec.run_spec import RunSpec
from everstep.wire.drills import Rehearsal, RehearsalDifference, RehearsalRow
from storage.code import CodeStore
from storage.filesystem import open_storage
from train_fn.rehearsal.comparison import (
    Difference,
    Record,
    advice_to_task,
    first_difference,
    held_names,
    same_batches,
    with_line,
)
from train_fn.rehearsal.recorder import Orders, Place
from train_fn.rehearsal.trial import Setup, Trial, trial


def summed_up(
    rows: Sequence[RehearsalRow],
) -> tuple[Literal["equal", "different", "impossible"], str]:
    """Return what is worst of all rows, and that in one sentence."""
    different = sum(row.outcome == "different" for row in rows)
    tried = sum(row.outcome in ("equal", "different") for row in rows)
    if different:
        words = f"A restart changes what this code trains: {different} of {tried} rows differ."
        return "different", words
    if any(row.outcome == "impossible" for row in rows):
        return "impossible", "The rehearsal could not be made."
    return "equal", "A restart was rehearsed on this code: equal in every bit."


def row_of(
    name: str, outcome: Any, text: str, difference: Difference | None = None, **facts: str | None
) -> RehearsalRow:
    """Return what one death showed."""
    found = None
    if difference is not None:
        found = RehearsalDifference(**asdict(difference), advice=difference.advice)
    return RehearsalRow(name=name, outcome=outcome, text=text, difference=found, **facts)


class Death(NamedTuple):
    """One way to die."""

    name: str
    orders: Orders


def rehearse(
    spec: RunSpec,
    archive: bytes | None,
    *,
    ranks: int = 2,
    steps: int = 12,
    max_samples: int | None = None,
    every: bool = False,
    say: Callable[[RehearsalRow], None] = lambda row: None,
    begin: Callable[[str], None] = lambda name: None,
) -> Rehearsal:
    """Train a few steps of the spec's code undisturbed, and again with deaths; compare them.

    Args:
        archive: the spec's code, if it has code of its own.
        max_samples: limit on the samples of each data set that has a length; on their tokens with
            ``train.batch_by: tokens``.
        every: try all deaths, also once something was different.
        say: called with each row as soon as it is known.
        begin: called with the name of each row before its training begins.

    Raises UsageError for what cannot be rehearsed.
    """
    if ranks < 1 or steps < 4:
        raise UsageError("a rehearsal needs at least 1 rank and 4 steps; raise --ranks or --steps")
    if spec.code is not None and archive is None:
        raise UsageError("the spec names code by a digest; give --code DIRECTORY, the code itself")
    rows: list[RehearsalRow] = []

    is_task = spec.code is None or spec.code.task is not None

    def tell(row: RehearsalRow) -> None:
        if is_task and row.difference is not None:
            advice = {"advice": advice_to_task(row.difference.what)}
            row = row.model_copy(update={"difference": row.difference.model_copy(update=advice)})
        rows.append(row)
        say(row)

    with tempfile.TemporaryDirectory(prefix="everstep-rehearsal-") as directory:
        name = f"rehearsal-{secrets.token_hex(6)}"
        setup = Setup(_alone(spec), archive, Path(directory), ranks, steps, max_samples, name)
        if archive is not None:
            CodeStore(open_storage(setup.storage)).put(archive)
        notes = _Rehearsal(setup, tell, begin, every=every).run()
    outcome, text = summed_up(rows)
    return Rehearsal(
        outcome=outcome, text=text, ranks=ranks, steps=steps, rows=tuple(rows), notes=notes
    )


def _alone(spec: RunSpec) -> RunSpec:
    """Return the spec of a run that begins anew and reports nowhere, with a checkpoint after every
    step, so that a death of all ranks is not a beginning from nothing."""
    checkpoint = spec.checkpoint.model_copy(update={"every_steps": 1})
    nowhere = {"resume_from": None, "replay": None, "notify": None, "wandb": None}
    return spec.model_copy(update={"checkpoint": checkpoint, **nowhere})


class _Rehearsal:
    def __init__(
        self,
        setup: Setup,
        tell: Callable[[RehearsalRow], None],
        begin: Callable[[str], None],
        *,
        every: bool,
    ) -> None:
        self._setup, self._tell, self._begin, self._every = setup, tell, begin, every
        self._number = 0
        self._expected: list[Record] = []
        self._ignored: set[str] = set()
        self._noted: dict[str, str] = {}

    def run(self) -> tuple[str, ...]:
        """Make all trainings, one after the other. Return notes."""
        if not self._undisturbed() or not self._again():
            return ()
        deaths, left_out = deaths_of(self._expected, self._setup.world_size, self._setup.last_step)
        for at, death in enumerate(deaths, start=1):
            self._begin(f"… {death.name} ({at} of {len(deaths)})")
            row = self._died(death)
            self._tell(row)
            if row.outcome == "different" and not self._every and at < len(deaths):
                name = f"{len(deaths) - at} more deaths"
                text = "not tried once something is different: --all tries them, too"
                left_out = [row_of(name, "left out", text)]
                break
        for row in left_out:
            self._tell(row)
        return tuple(
            f"{with_line(name, self._expected[0].lines)}: {values}. Your code holds it by itself, "
            "and nothing that was compared "
            "depends on it here. If it matters later, derive it from state.step_number or pass it "
            "as es.protect(extra=…)"
            for name, values in self._noted.items()
        )

    @property
    def _is_task(self) -> bool:
        code = self._setup.spec.code
        return code is None or code.task is not None

    def _trial(self, deaths: Sequence[Orders]) -> Trial:
        """Train with these deaths, and then to the end."""
        self._number += 1
        with trial(self._setup, self._number) as training:
            for orders in [*deaths, Orders(self._setup.last_step)]:
                result = training.attempt(orders)
                if result.done or (orders.dies is None and orders.parks_at is None):
                    break
                errors = [each for each in result.ended.values() if each and each.error is not None]
                if not all(each.is_collateral for each in errors):
                    break  # a rank failed by itself: another attempt would show nothing else
        return training

    def _undisturbed(self) -> bool:
        """Train undisturbed. Return whether there is something to compare with."""
        name = "undisturbed"
        self._begin(f"… {name}")
        training = self._trial([])
        result = training.attempts[0]
        self._expected = result.records
        if result.error is not None:
            text = f"the code fails by itself: {result.error}"
            trace = result.failure.traceback if result.failure is not None else None
            self._tell(row_of(name, "impossible", text, traceback=trace))
            return False
        if any(each is not None and each.is_unprotected for each in result.ended.values()):
            text = (
                "the code calls no es.protect, so no step of it is known and a restart begins at "
                "its own checkpoints. Protect its loop: docs/bring-your-own.md"
            )
            self._tell(row_of(name, "impossible", text))
            return False
        made = sum(step.is_committed for step in self._expected[0].steps.values())
        if made < 3:
            text = f"the code makes only {made} steps; a rehearsal needs three"
            self._tell(row_of(name, "impossible", text))
            return False
        alike = None if self._is_task else same_batches(self._expected)
        if alike is not None:
            self._tell(row_of(name, "different", alike.text(), alike))
            return True
        size = self._setup.world_size
        words = f"{size} ranks" if size > 1 else "one rank"
        self._tell(row_of(name, "equal", f"{made} steps on {words}"))
        return True

    def _again(self) -> bool:
        """Train undisturbed once more. Return whether that gives the same."""
        name = "undisturbed, once more"
        self._begin(f"… {name}")
        training = self._trial([])
        attempts = [each.records for each in training.attempts]
        # what two undisturbed trainings do not share is of no interest: times, ids of processes
        self._ignored = set(held_names(self._expected, attempts))
        difference = first_difference(self._expected, attempts, ())
        if training.attempts[0].error is not None:
            difference = Difference("the end", 0, 0, training.attempts[0].error)
        if difference is None:
            self._tell(row_of(name, "equal", "the same in every bit"))
            return True
        text = (
            f"{difference.text()} Nothing has died: the code is not the same twice by itself, so "
            "no restart can be. Seed what it draws, and depend on no clock, no process id and no "
            "order of files or sets"
        )
        self._tell(row_of(name, "different", text, difference))
        return False

    def _died(self, death: Death) -> RehearsalRow:
        training = self._trial([death.orders])
        first, last = training.attempts[0], training.attempts[-1]
        if first.done:
            return row_of(death.name, "left out", "the training ended before the death")
        restored = last.restored or {}
        source = restored.get("source")
        went_on = f"step {restored.get('step')} ({source})" if restored else None
        attempts = [each.records for each in training.attempts]
        difference = first_difference(
            self._expected, attempts if last.done else attempts[:-1], self._ignored
        )
        if not last.done and (difference is None or difference.what == "the number of steps"):
            error = last.error or "it made no further step"
            step = difference.step if difference else int(restored.get("step") or 0)
            difference = Difference("the end", step, 0, f"after the death: {error}")
        if difference is not None:
            failed = last.failure if not last.done else None
            trace = failed.traceback if failed is not None else None
            facts = {"went_on_from": went_on, "traceback": trace}
            return row_of(death.name, "different", difference.text(), difference, **facts)
        for name, values in held_names(self._expected, attempts[1:]).items():
            if name not in self._ignored and "unset" not in values:
                self._noted.setdefault(name, values)
        return row_of(death.name, "equal", "the same in every bit", went_on_from=went_on)


def deaths_of(
    expected: Sequence[Record], world_size: int, last_step: int
) -> tuple[list[Death], list[RehearsalRow]]:
    """Return which deaths to rehearse, the cheapest first, and rows for what does not come within
    the steps. Where all ranks are killed, nobody has to notice, to leave and to save.

    Args:
        expected: what the ranks of an undisturbed training did.
    """
    steps = expected[0].steps
    made = sorted(number for number, step in steps.items() if step.is_committed)
    ends = [number + 1 for number in made[:-1] if steps[number].ends_epoch]
    evaluated = [number for number in made[1:] if steps[number].is_evaluated]
    edges = {*ends, *evaluated}
    inner = [number for number in made[1:] if number not in edges] or made[1:]
    updating = [number for number in inner if steps[number].updates]
    last, place = world_size - 1, len(inner) // 2
    deaths: list[Death] = []

    def dies(name: str, step: int, where: Place, rank: int) -> None:
        deaths.append(Death(name, Orders(last_step, dies=(rank, step, where))))

    if updating:
        step = updating[len(updating) // 2]
        dies(f"a rank killed within step {step + 1}", step, "update", last)
    dies(f"rank 0 killed right after step {inner[place]}", inner[place], "commit", 0)
    # between two optimizer steps, where gradients are added up
    between = [number for number in inner if number - 1 in steps and not steps[number - 1].updates]
    at = (between or inner)[(len(between or inner) * 3) // 4]
    deaths.append(Death(f"all ranks killed after step {at}", Orders(last_step, parks_at=at)))
    for step in sorted({*ends[:1], *evaluated[:1]}):
        what = " and ".join(
            what
            for what, found in (("the end of an epoch", ends), ("an evaluation", evaluated))
            if step in found
        )
        dies(f"a rank killed right after step {step}: {what}", step, "commit", last)
        name = f"all ranks killed after step {step}: {what}"
        deaths.append(Death(name, Orders(last_step, parks_at=step)))
    deaths.sort(key=lambda death: death.orders.parks_at is None)
    left_out = [
        row_of(
            what,
            "left out",
            f"not seen within {len(made)} steps: raise --steps, or lower --max-samples",
        )
        for what, found in (("the end of an epoch", ends), ("an evaluation", evaluated))
        if not found
    ]
    return deaths, left_out
