"""Compare a training that was disturbed with one that was not: what is first different, at which
step, and what to write instead. No process, no tensor."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train_fn.errors import few


@dataclass
class Update:
    """One call of an optimizer's step."""

    state: Mapping[str, str]
    """What the state held before it, by path."""
    gradients: Mapping[str, str]
    draws: Mapping[str, str]
    """States of the generators."""
    held: Mapping[str, str]
    """What the user's code held by itself."""
    where: str | None


@dataclass
class Step:
    """What one rank did between two commits."""

    inputs: list[list[list[str]]] = field(default_factory=list)
    """The arguments of each call of the model: a digest and a text of each."""
    updates: list[Update] = field(default_factory=list)
    where: str | None = None
    is_committed: bool = False
    is_evaluated: bool = False
    """Whether the model was evaluated before this step."""
    ends_epoch: bool = False
    carried: list[str] = field(default_factory=list)
    """Variables that held an argument of the model before the step began."""
    carries_state: bool = False
    """Whether a model had made such an argument."""


@dataclass
class Record:
    """What one rank did in one attempt, by steps done before."""

    steps: dict[int, Step] = field(default_factory=dict)
    final: Mapping[str, str] | None = None
    final_step: int | None = None
    losses: dict[int, float] = field(default_factory=dict)
    """By steps done after it."""
    lines: dict[str, int] = field(default_factory=dict)
    """Where the user's code assigns what it holds, by name."""


def read_record(path: Path) -> Record:
    """Read what a rank has written, up to where it died."""
    record = Record()
    if not path.is_file():
        return record
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        _enter(record, entry)
    return record


def _enter(record: Record, entry: dict[str, Any]) -> None:
    number = entry["step"]
    if entry["kind"] == "final":
        record.final, record.final_step = entry["state"], number
        return
    if entry["kind"] == "commit":
        made = record.steps.setdefault(number - 1, Step())
        made.is_committed, made.ends_epoch = True, entry["ends_epoch"]
        return
    step = record.steps.setdefault(number, Step())
    if entry["kind"] == "evaluation":
        step.is_evaluated = not step.inputs or step.is_evaluated
    elif entry["kind"] == "input":
        step.inputs.append(entry["of"])
        step.carried += entry["carried"]
        step.carries_state |= entry["is_made"]
        step.where = entry["where"] or step.where
    elif entry["kind"] == "update":
        names = ("state", "gradients", "draws", "held", "where")
        step.updates.append(Update(**{name: entry[name] for name in names}))
        record.lines.update(entry["lines"])
        step.where = entry["where"] or step.where


@dataclass(frozen=True)
class Difference:
    """What is first different; as ``everstep.wire.drills.RehearsalDifference``."""

    what: str
    """A kind of ADVICE."""
    step: int
    rank: int
    detail: str
    where: str | None = None
    held: tuple[str, ...] = ()

    @property
    def advice(self) -> str:
        return ADVICE[self.what]

    def text(self) -> str:
        """Return it in words."""
        place = f" ({self.where})" if self.where else ""
        held = f" Also different in your code: {'; '.join(self.held)}." if self.held else ""
        return f"{self.what} of step {self.step}, rank {self.rank}{place}: {self.detail}.{held}"


COPIED = "weights"
"""Begins the text of another model that the user's code holds, or of a copy of weights."""

ADVICE = {
    "a batch that was read before": (
        "A variable hands the batch from one step to the next, and no state holds it: after a "
        "restart the code before the loop reads another one. Read each batch within the step that "
        "trains on it, after state.step(), or read the data by es.loader"
    ),
    "a state that the loop carries": (
        "A variable hands what the model has returned from one step to the next, as a hidden "
        "state, and no state holds it: after a restart it begins anew. Keep it in an object with "
        "state_dict() and load_state_dict(), and pass that as es.protect(extra=…)"
    ),
    "what the code keeps": (
        "Another model, or a copy of weights, begins anew after a restart. Pass it as "
        "es.protect(extra=…): a module, or an object with state_dict() and load_state_dict(). Of a "
        "task, let state_dict() and load_state_dict() keep it"
    ),
    "the samples": (
        "The batch is another one. Its order must follow from the seed and the epoch alone: read "
        "it by es.loader and pass that as es.protect(extra=…); say what changes by epoch in "
        "set_epoch(epoch); draw from no clock and no unseeded generator"
    ),
    "the weights": (
        "The step before had the same weights, samples and gradients, and still made others: the "
        "optimizer, or code after it, uses something that no state holds. Keep it in the "
        "optimizer's state or in a buffer of the model, or pass it as es.protect(extra=…)"
    ),
    "the optimizer's state": (
        "Pass every optimizer to es.protect(optimizer=…), and keep what it counts in its state"
    ),
    "the optimizer's groups": (
        "Something that no state holds sets the learning rate or another option. Compute it from "
        "state.step_number, use a scheduler and pass it as es.protect(scheduler=…), or give what "
        "it depends on state_dict() and load_state_dict() and pass it as es.protect(extra=…)"
    ),
    "the scheduler": (
        "Pass it as es.protect(scheduler=…), step it before state.step() or at the end of an "
        "epoch, and call it with nothing that only a variable holds"
    ),
    "an extra": (
        "Its state_dict() or load_state_dict() leaves something out, or it is changed where "
        "nothing says that a step begins. Change it before state.step()"
    ),
    "the gradients": (
        "Weights and inputs of the step are the same. So the targets, the loss, gradients that are "
        "added up over steps, or an attribute that no state holds differ. Keep what the loss "
        "depends on in a buffer, or pass it as es.protect(extra=…); commit once for each step of "
        "the optimizer"
    ),
    "the random numbers": (
        "Code draws other numbers than in the undisturbed run. Draw inside of the step, or call "
        "state.reseed() before you draw between two steps"
    ),
    "the loss": "It depends on something that no state holds. Pass that as es.protect(extra=…)",
    "the number of optimizer steps": (
        "What decides when the optimizer steps is held by no state. Decide it by state.step_number"
    ),
    "the number of steps": "The loop must count by state.step_number, which a restart restores",
    "what ranks train on": (
        "Ranks train on the same batches. Divide the data: es.loader(dataset, global_batch_size=…) "
        "does, or a DistributedSampler"
    ),
    "the end": ("The code did not go on after the death. The text says why"),
}
"""What to write instead, by what is different."""
_OF_TASK = (
    "It depends on something that no state of the task holds. Keep tensors in buffers of the "
    "model, and all else in state_dict() and load_state_dict() of the task; take a count of steps "
    "from the argument step of loss (docs/own-task.md, State of the task)"
)


def advice_to_task(what: str) -> str:
    """Return what to write instead in a task, which has no ``state``."""
    text = ADVICE[what]
    return _OF_TASK if "es." in text or "state." in text else text


_KINDS = (
    ("model", "the weights"),
    ("optimizer", "the optimizer's state"),
    ("scheduler", "the scheduler"),
    ("extra", "an extra"),
)


def kind_of(path: str) -> str:
    """Return what a value of a state belongs to."""
    if path.startswith("optimizer") and "/param_groups/" in f"/{path}":
        return "the optimizer's groups"
    return next((kind for prefix, kind in _KINDS if path.startswith(prefix)), "an extra")


_ORDER = (
    "the optimizer's groups",
    "the scheduler",
    "the weights",
    "the optimizer's state",
    "an extra",
)
"""The first of them is named: a learning rate causes what weights show."""


def first_difference(
    expected: Sequence[Record], found: Iterable[Sequence[Record]], ignored: Collection[str] = ()
) -> Difference | None:
    """Return what is first different between an undisturbed training and the attempts of another.

    Args:
        expected: of each rank, in the one attempt.
        found: of each rank, for each attempt.
        ignored: what the user's code holds and is not worth a word, by its name.
    """
    attempts = list(found)
    for ranks in attempts:
        different = [
            one
            for rank, record in enumerate(ranks)
            if (one := _of_rank(rank, expected[rank], record, ignored)) is not None
        ]
        if different:
            return min(different, key=lambda each: each.step)
    return _missing(expected, attempts)


def _missing(expected: Sequence[Record], attempts: Sequence[Sequence[Record]]) -> Difference | None:
    for rank, record in enumerate(expected):
        made = {
            number
            for ranks in attempts
            if rank < len(ranks)
            for number, step in ranks[rank].steps.items()
            if step.is_committed or number in _committed(ranks)
        }
        for number, step in sorted(record.steps.items()):
            if step.is_committed and number not in made:
                return Difference("the number of steps", number + 1, rank, "it was not made")
    return None


def _committed(ranks: Sequence[Record]) -> set[int]:
    """Return the steps that some rank has committed: one that died may not have said so."""
    return {number for each in ranks for number, step in each.steps.items() if step.is_committed}


def _of_rank(
    rank: int, expected: Record, found: Record, ignored: Collection[str]
) -> Difference | None:
    last = max(found.steps, default=-1)
    for number in sorted(found.steps):
        step, twin = found.steps[number], expected.steps.get(number)
        is_whole = step.is_committed or (number == last and found.final is not None)
        if twin is None:
            if step.is_committed:
                return Difference(
                    "the number of steps", number + 1, rank, "the undisturbed run has no such step"
                )
            continue
        one = _of_step(rank, number, twin, step, is_whole, ignored, found.lines)
        if one is not None:
            return one
        loss, other = expected.losses.get(number + 1), found.losses.get(number + 1)
        is_same = loss == other or (loss != loss and other != other)  # both are no numbers
        if loss is not None and other is not None and not is_same:
            return Difference("the loss", number + 1, rank, f"{loss} became {other}", step.where)
    if found.final is not None and expected.final is not None:
        if found.final_step != expected.final_step:
            detail = f"{expected.final_step} steps became {found.final_step}"
            return Difference("the number of steps", found.final_step or 0, rank, detail)
        changed = _changed(expected.final, found.final)
        if changed is not None:
            return Difference(changed[0], expected.final_step or 0, rank, f"after it, {changed[1]}")
    return None


def _of_step(
    rank: int,
    number: int,
    twin: Step,
    step: Step,
    is_whole: bool,
    ignored: Collection[str],
    lines: Mapping[str, int],
) -> Difference | None:
    """Compare one step. One that was broken off is compared as far as it got."""

    def differs(what: str, detail: str, at: int | None = None) -> Difference:
        index = min(at or 0, len(step.updates) - 1, len(twin.updates) - 1)
        held: tuple[str, ...] = ()
        if index >= 0:
            changes = held_changes(twin.updates[index], step.updates[index], ignored, lines)
            held = tuple(changes[:4])
        return Difference(what, number + 1, rank, detail, step.where, held)

    if step.updates and twin.updates:
        changed = _changed(twin.updates[0].state, step.updates[0].state)
        if changed is not None:
            return differs(*changed)
    for one, other in zip(twin.inputs, step.inputs, strict=False):
        if [each[0] for each in one] != [each[0] for each in other]:
            became = f"{_shown(one)} became {_shown(other)}"
            if twin.carried:
                of = f"{few(twin.carried, 2)} held it when the step before was committed: {became}"
                if twin.carries_state:
                    return differs("a state that the loop carries", of)
                return differs("a batch that was read before", of)
            return differs("the samples", became)
    if is_whole and len(step.inputs) != len(twin.inputs):
        detail = f"{len(twin.inputs)} calls of the model became {len(step.inputs)}"
        return differs("the samples", detail)
    for at, (due, made) in enumerate(zip(twin.updates, step.updates, strict=False)):
        if at and (changed := _changed(due.state, made.state)) is not None:
            return differs(*changed, at)
        if names := _names(due.gradients, made.gradients):
            return differs("the gradients", f"of {few(names, 2)}", at)
        if names := _names(due.draws, made.draws):
            return differs("the random numbers", f"of {few(names, 2)}", at)
    if is_whole and len(step.updates) != len(twin.updates):
        detail = f"{len(twin.updates)} became {len(step.updates)}"
        return differs("the number of optimizer steps", detail)
    if step.updates and twin.updates:
        before, after = twin.updates[0].held, step.updates[0].held
        kept = [name for name in after if _is_lost(before.get(name, ""), after[name])]
        if kept := [name for name in kept if name not in ignored]:
            lost = few([with_line(each, lines) for each in kept], 2)
            return differs("what the code keeps", lost)
    return None


def _is_lost(expected: str, found: str) -> bool:
    """Return whether a copy of weights became another one, or none."""
    is_kept = expected.startswith(COPIED) and (found.startswith(COPIED) or found == "None")
    return is_kept and expected != found


def with_line(name: str, lines: Mapping[str, int]) -> str:
    """Return a name with the line that assigns it, where that is known."""
    return f"{name}, line {lines[name]}" if name in lines else name


def _changed(expected: Mapping[str, str], found: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the kind and the words of what differs most tellingly between two states."""
    names = _names(expected, found)
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(kind_of(name), []).append(name)
    for kind in _ORDER:
        if kind in by_kind:
            return kind, _values(by_kind[kind], expected, found)
    return None


def _values(names: list[str], expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    # initial_lr and the like say less than what is in force
    first = next((each for each in names if each.endswith("/lr")), names[0])
    before, after = expected.get(first, "nothing"), found.get(first, "nothing")
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    values = f": {before} became {after}" if not before.startswith("#") else ""
    return f"{first}{values}{more}"


def _names(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    names = [name for name in expected if found.get(name) != expected[name]]
    return names + [name for name in found if name not in expected]


def _shown(call: list[list[str]]) -> str:
    return "; ".join(each[1] for each in call) or "nothing"


def held_changes(
    expected: Update, found: Update, ignored: Collection[str], lines: Mapping[str, int]
) -> list[str]:
    """Return in words what the user's code holds and is different, with the line that assigns it.
    Counters and the like come first: they cause what tensors show."""
    changes = [
        (name, expected.held.get(name, "unset"), found.held.get(name, "unset"))
        for name in _names(expected.held, found.held)
        if name not in ignored
    ]
    changes.sort(key=lambda each: (each[1].startswith(("#", COPIED)), "." in each[1]))
    return [
        f"{with_line(name, lines)} ({before} became {after})" for name, before, after in changes
    ]


def held_names(expected: Sequence[Record], attempts: Iterable[Sequence[Record]]) -> dict[str, str]:
    """Return what the user's code holds that is different in any step, with the first values."""
    names: dict[str, str] = {}
    for ranks in attempts:
        for rank, record in enumerate(ranks):
            for number, step in sorted(record.steps.items()):
                twin = expected[rank].steps.get(number)
                if twin is None or not twin.updates or not step.updates:
                    continue
                one, other = twin.updates[0].held, step.updates[0].held
                for name in _names(one, other):
                    values = f"{one.get(name, 'unset')} became {other.get(name, 'unset')}"
                    names.setdefault(name, f"{values} in step {number + 1}")
    return names


def same_batches(ranks: Sequence[Record]) -> Difference | None:
    """Return the difference that is missing: two ranks that trained on the same batches."""
    for rank in range(1, len(ranks)):
        first, other = ranks[0].steps, ranks[rank].steps
        common = [n for n in first if n in other and any(first[n].inputs)]
        if len(common) >= 3 and all(
            _digests(first[number]) == _digests(other[number]) for number in common
        ):
            detail = f"rank {rank} had the batches of rank 0 in all {len(common)} steps"
            return Difference("what ranks train on", min(common) + 1, rank, detail)
    return None


def _digests(step: Step) -> list[list[str]]:
    return [[each[0] for each in call] for call in step.inputs]
