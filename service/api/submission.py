"""Submit a run: check the spec and all that it refers to, then record it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from service.api.answers import JsonObject, run_json
from service.api.auth import Principal
from service.api.code import check_code
from service.api.context import ApiContext
from service.api.origins import Origins, with_origin
from service.api.problems import ProblemError, invalid_request
from service.api.replay_rules import check_replay
from service.api.spec_body import content_sha256, validated
from service.db.engine import Guard
from service.db.idempotency import IdempotencyKey
from service.db.new_run import first_transition
from service.db.projects import UnknownProject
from service.model.rows import TransitionRow
from service.model.run_rows import RunRow


async def submitted(
    context: ApiContext,
    caller: Principal,
    raw: object,
    idempotency_key: str | None,
    confirm: Guard | None = None,
    *,
    create_project: bool = False,
) -> tuple[JsonObject, bool]:
    """Submit a run; return it, and whether it is new.

    Args:
        context: the service's context.
        caller: who submits.
        raw: the spec as received.
        idempotency_key: the client's key for the request.
        confirm: raises if the caller is no longer allowed to.
        create_project: create a missing project; a caller's own project is always created.
    """
    spec, idempotency = await checked(context, caller, raw, idempotency_key, confirm)
    make = partial(
        context.runs.create,
        spec,
        caller.token_id,
        idempotency,
        confirm,
        create_project=create_project or caller.project is not None,
        owner=caller.owner or caller.name,
    )
    try:
        (run, transitions), is_new = await context.database_write(_made, context, make)
    except UnknownProject as exc:
        raise InvalidSpec((FieldError(("project",), str(exc)),)) from exc
    answer = run_json(
        run,
        transitions,
        context.cluster_view.dashboard_url,
        context.clock(),
        context.public_url,
        context.prices,
    )
    return answer, is_new


async def checked(
    context: ApiContext,
    caller: Principal,
    raw: object,
    idempotency_key: str | None = None,
    confirm: Guard | None = None,
    *,
    keep: bool = True,
) -> tuple[RunSpec, IdempotencyKey | None]:
    """Return the spec in a request and its key, after every check but that of its project.

    Args:
        context: the service's context.
        caller: who submits.
        raw: the spec as received.
        idempotency_key: the client's key for the request; the checkpoint that a known one starts
            from is not looked for again.
        confirm: raises if the caller is no longer allowed to.
        keep: keep the checkpoint that the run starts from.

    Raises InvalidSpec with every fault.
    """
    caller.require("submitter")
    spec = await validated(parse_spec, raw)
    check_reaches(caller, spec.project)
    idempotency = idempotency_of(idempotency_key, caller, raw)
    # confirm the caller before errors can reveal what exists
    refers = spec.code is not None or spec.origin is not None or spec.replay is not None
    if confirm is not None and refers:
        await context.database_lookup(confirmed, context, confirm)
    is_known = spec.origin is not None and await context.database_call(
        context.runs.knows, idempotency
    )
    return await allowed(context, caller, spec, keep=keep, find_origin=not is_known), idempotency


async def allowed(
    context: ApiContext,
    caller: Principal,
    spec: RunSpec,
    *,
    keep: bool,
    find_origin: bool = True,
    origins: Origins | None = None,
    look_at_code: bool = True,
) -> RunSpec:
    """Return a valid spec with the checkpoint that it starts from, after the checks of what this
    service allows and has.

    Args:
        context: the service's context.
        caller: who submits.
        spec: the spec.
        keep: keep the checkpoint that the run starts from.
        find_origin: look for that checkpoint.
        origins: what was looked up for other runs of the request.
        look_at_code: check the user's code.

    Raises InvalidSpec with every fault.
    """
    faults: list[FieldError] = []
    with _gathered(faults):
        context.pip_rule.check(spec)
    with _gathered(faults):
        _check_notify(context, spec)
    with _gathered(faults):
        context.storage_roots.check_data(spec)
    if spec.code is not None and look_at_code:
        with _gathered(faults):
            await check_code(context, caller, spec.project, spec.code)
    with _gathered(faults):
        await check_replay(context, spec)
    if spec.origin is not None and find_origin:
        with _gathered(faults):
            spec = await with_origin(context, spec, origins or Origins(), keep=keep and not faults)
    if faults:
        raise InvalidSpec(tuple(faults))
    return spec


def check_reaches(caller: Principal, project: str) -> None:
    """Raise 403 if the caller's token belongs to another project."""
    if not caller.reaches(project):
        raise ProblemError(
            403,
            "forbidden",
            f"token {caller.name!r} belongs to project {caller.project!r}, not {project!r}",
        )


async def validated_spec(
    context: ApiContext, caller: Principal, raw: object, *, create_project: bool = False
) -> RunSpec:
    """Return the spec as it would be submitted. Nothing is recorded, and no checkpoint is kept."""
    spec, _ = await checked(context, caller, raw, keep=False)
    if not create_project and caller.project is None:
        try:
            await context.database_call(context.projects.require, spec.project)
        except UnknownProject as exc:
            raise InvalidSpec((FieldError(("project",), str(exc)),)) from exc
    return spec


@contextmanager
def _gathered(faults: list[FieldError]) -> Iterator[None]:
    """Collect faults, so that all are reported at once."""
    try:
        yield
    except InvalidSpec as exc:
        faults += exc.errors


def _check_notify(context: ApiContext, spec: RunSpec) -> None:
    """Raise InvalidSpec if this service does not call the URL."""
    if spec.notify is not None and not context.notify.allows(spec.notify.url):
        allowed = ", ".join(sorted(context.notify.origins)) or "none"
        msg = f"its origin is not allowed; use one that the operator allows: {allowed}"
        raise InvalidSpec((FieldError(("notify", "url"), msg),))


def confirmed(context: ApiContext, confirm: Guard) -> None:
    """Raise 401 if the caller is no longer allowed to submit."""
    with context.database.autocommit() as connection:
        confirm(connection)


def _made(
    context: ApiContext, make: Callable[[], tuple[RunRow, bool]]
) -> tuple[tuple[RunRow, Sequence[TransitionRow]], bool]:
    run, is_new = make()
    return (
        run,
        [first_transition(run)] if is_new else context.runs.transitions([run.id])[run.id],
    ), is_new


def idempotency_of(key: str | None, caller: Principal, raw: object) -> IdempotencyKey | None:
    """Return the identity of a request with a key. Raises 422 for a key that is not printable."""
    if key is None:
        return None
    if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        raise invalid_request("Idempotency-Key", msg="must be 1 to 255 printable ASCII characters")
    return IdempotencyKey(caller.token_id, key, content_sha256(raw))
