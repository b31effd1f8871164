"""Submit a sweep: check it with every run that it will submit, then record it."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from pydantic import ValidationError

from everstep.errors import FieldError, InvalidSpec
from everstep.spec import plain_text
from everstep.spec.code import CodeSpec
from everstep.spec.parsing import few, field_errors
from everstep.spec.sweep import AshaSpec, SweepSpec
from everstep.spec.trials import SweepTrial, trials_of, words_of
from service.annexes.sweeps.store import SweepRow, SweepStore
from service.api.auth import Principal
from service.api.bodies import check_shape, validated
from service.api.context import ApiContext
from service.db.projects import UnknownProject
from service.runs.origins import Origins
from service.runs.submission import allowed, check_reaches, idempotency_of

MAX_VALUES = 500_000
"""Maximum number of values in the runs of a sweep together: each run is validated and stored."""

_SEED_BITS = 31


async def submitted_sweep(
    context: ApiContext,
    caller: Principal,
    raw: Any,
    idempotency_key: str | None,
    *,
    create_project: bool,
) -> tuple[SweepRow, bool]:
    """Record a sweep; return it, and whether it is new.

    Args:
        context: the service's context.
        caller: who submits.
        raw: the sweep as received.
        idempotency_key: the client's key for the request.
        create_project: create a missing project; a caller's own project is always created.

    Raises InvalidSpec with the faults of every run.
    """
    idempotency = idempotency_of(idempotency_key, caller, raw)
    sweep, trials = await _checked(context, caller, raw, keep=True)
    make = partial(
        SweepStore(context.database, context.clock).create,
        sweep,
        trials,
        caller.token_id,
        idempotency,
        create_project=create_project or caller.project is not None,
    )
    try:
        return await context.database_call(make)
    except UnknownProject as exc:
        raise InvalidSpec((FieldError(("spec", "project"), str(exc)),)) from exc


def _parsed(raw: Any) -> tuple[SweepSpec, list[SweepTrial]]:
    """Return the sweep with name and seed, and its runs."""
    try:
        sweep = SweepSpec.model_validate(raw)
    except ValidationError as exc:
        raise InvalidSpec(field_errors(SweepSpec, raw, exc)) from exc
    if faults := plain_text.faults(raw):
        raise InvalidSpec(few(faults))
    _check_size(sweep, raw)
    sweep = sweep.model_copy(
        update={
            "seed": secrets.randbits(_SEED_BITS) if sweep.seed is None else sweep.seed,
            "name": sweep.name or sweep.spec.get("name"),
        }
    )
    trials = trials_of(sweep)
    _check_rungs(sweep, trials)
    return sweep, trials


def _check_size(sweep: SweepSpec, raw: Any) -> None:
    """Refuse a sweep whose runs take long to validate: many of them, each with a long spec."""
    num_values = check_shape(raw)
    if num_values * sweep.num_runs > MAX_VALUES:
        message = (
            f"has {num_values} values for each of {sweep.num_runs} runs, more than "
            f"{MAX_VALUES} together; submit fewer runs, or a shorter spec"
        )
        raise InvalidSpec((FieldError(("spec",), message),))


def _check_rungs(sweep: SweepSpec, trials: list[SweepTrial]) -> None:
    """Refuse rungs by the length of a run whose length its own loop does not tell."""
    is_by_length = isinstance(sweep.scheduler, AshaSpec) and sweep.scheduler.min_steps is None
    if is_by_length and any(trial.spec.runs_own_function for trial in trials):
        message = (
            "is required with code.script and code.train_fn, which do not tell how many steps "
            "they train; set the step of the first rung"
        )
        raise InvalidSpec((FieldError(("scheduler", "min_steps"), message),))


async def validated_sweep(
    context: ApiContext, caller: Principal, raw: Any, *, create_project: bool
) -> SweepSpec:
    """Return the sweep as it would be submitted, with name and seed. Nothing is recorded, and no
    checkpoint is kept. Raises InvalidSpec with the faults of every run."""
    sweep, trials = await _checked(context, caller, raw, keep=False)
    if not create_project and caller.project is None:
        try:
            await context.database_call(context.projects.require, trials[0].spec.project)
        except UnknownProject as exc:
            raise InvalidSpec((FieldError(("spec", "project"), str(exc)),)) from exc
    return sweep


async def _checked(
    context: ApiContext, caller: Principal, raw: Any, *, keep: bool
) -> tuple[SweepSpec, list[SweepTrial]]:
    """Return the sweep with its runs after every check but that of its project. Raises
    InvalidSpec."""
    caller.require("submitter")
    sweep, trials = await validated(_parsed, raw)
    check_reaches(caller, trials[0].spec.project)
    return sweep, await _allowed(context, caller, trials, keep=keep)


async def _allowed(
    context: ApiContext, caller: Principal, trials: list[SweepTrial], *, keep: bool
) -> list[SweepTrial]:
    """Return the runs after the checks of a single submission. Raises InvalidSpec."""
    checked: list[SweepTrial] = []
    faults: dict[FieldError, str] = {}
    seen: set[object] = set()
    origins = Origins()
    for number, trial in enumerate(trials):
        shape = _shape(trial.spec.code)
        try:
            spec = await allowed(
                context,
                caller,
                trial.spec,
                keep=keep and not faults,
                origins=origins,
                look_at_code=shape not in seen,
            )
            checked.append(SweepTrial(trial.params, spec))
        except InvalidSpec as exc:
            for error in exc.errors:
                faults.setdefault(error, f"run {number}: {words_of(trial.params)}")
        seen.add(shape)
    if faults:
        found = [
            FieldError(("spec", *error.loc), f"{error.msg} ({where})")
            for error, where in faults.items()
        ]
        raise InvalidSpec(few(found))
    return checked


def _shape(code: CodeSpec | None) -> object:
    """Return what the check of a user's code depends on: equal shapes are checked once."""
    if code is None:
        return None
    names = (tuple(sorted(code.args or {})), tuple(sorted(code.config or {})))
    return (code.archive, code.task, code.train_fn, code.script, names)
