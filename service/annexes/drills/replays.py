"""Replays: train steps of a run again, and compare them."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Response

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.run_spec import RunSpec
from everstep.wire import Attempt, Page, Run
from everstep.wire.events import EventKind
from everstep.wire.run import ReplayRequest
from service.annexes.drills.history import Stretch, begun_at, stretches, words
from service.api.answers import as_json
from service.api.auth import Caller, ControlledRun, VisibleRun
from service.api.blocking import db_read, of_history
from service.api.bodies import ApiRouter, Parsed, example
from service.api.dependencies import Events
from service.api.openapi import problem_answers
from service.db.events import EventStore
from service.db.runs import RunStore
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.parts import ServiceParts
from service.projections import attempts
from service.runs.submission import TheSubmissions
from service.runs.views import Views

ReplayBody = Annotated[ReplayRequest, Parsed(), example({"from_step": 400, "to_step": 450})]

router: Final = ApiRouter("/v1/runs/{run_id}/replays", "replays")

_NAME_CHARS: Final = 128


@router.post(
    "",
    status_code=201,
    summary="Train steps of a run again, and compare them",
    response_model=Run,
    responses=problem_answers(400, 403, 404, 409, 413, 415, 422),
)
async def create_replay(
    wanted: ReplayBody,
    run: ControlledRun,
    events: Events,
    submissions: TheSubmissions,
    caller: Caller,
) -> Response:
    """Submits a run that begins from a checkpoint of this one and trains the same steps. It changes
    nothing of this run. `replay_of` of the new run has the result once it has ended."""
    raw = replay_spec(run, wanted, await trained_by(events, run))
    made, _ = await submissions.submit(caller, raw, None)
    return as_json(made, 201, {"Location": f"/v1/runs/{made['id']}"})


@router.get("", summary="Replays of a run", responses=problem_answers(404))
async def list_replays(run: VisibleRun, views: Views) -> Page[Run]:
    """The newest hundred, newest first."""
    found = await db_read(views.runs.replays_of, run.id)
    return Page(items=tuple(await views.of(found)), next_cursor=None)


def replay_spec(run: RunRow, wanted: ReplayRequest, trained: list[Stretch]) -> dict[str, Any]:
    """Return the spec of a replay: that of the run, but for what names, places and reports it."""
    spec = RunSpec.model_validate(run.spec)
    met = [each for each in trained if each.meets(wanted.from_step, wanted.to_step)]
    workers = wanted.workers or max(
        (each.world_size for each in met), default=spec.scaling.max_workers
    )
    raw = spec.model_dump(mode="json")
    raw["name"] = f"{spec.name[: _NAME_CHARS - 7]}-replay"
    raw["replay"] = {
        "run_id": run.id,
        "from_step": wanted.from_step,
        "to_step": wanted.to_step,
        "max_workers": spec.full_size,
    }
    if wanted.from_step != begun_at(run):
        raw["resume_from"] = None
    # ``auto`` depends on the number of ranks, and decides the order in which gradients are summed.
    of_steps = next((each.micro_batch_size for each in met), None)
    raw["train"]["micro_batch_size"] = of_steps or spec.micro_batch_size
    raw["scaling"] |= {"min_workers": workers, "max_workers": workers}
    raw["notify"] = None
    return raw


async def trained_by(events: EventStore, run: RunRow) -> list[Stretch]:
    """Return which steps of a run were trained by how many ranks, and how."""
    made, sizes = await of_history(events, run.id, attempts.ATTEMPT_KINDS, _attempts_and_sizes)
    may_differ = run.spec["train"].get("on_out_of_memory") == "smaller"
    return stretches(made, run.step, sizes if may_differ else {})


def _attempts_and_sizes(events: list[EventRow]) -> tuple[list[Attempt], dict[int, int]]:
    begun = (each for each in events if each.kind == EventKind.TRAINING_STARTED)
    sizes = {each.attempt: each.data["micro_batch_size"] for each in begun}
    return attempts.attempts(events), sizes


async def check_replay(parts: ServiceParts, spec: RunSpec) -> None:
    """Check that the steps of a replay can be trained again and compared. Raises InvalidSpec."""
    wanted = spec.replay
    if wanted is None:
        return
    run = await db_read(parts[RunStore].get, wanted.run_id)
    if run is None or run.project != spec.project:
        raise _fault("run_id", f"run {wanted.run_id} does not exist in project {spec.project!r}")
    if run.chain is None:
        raise _fault(
            "run_id",
            f"run {run.id} has recorded no digests of its steps: it has taken none yet, runs a "
            "loop of its own, or is of an older version. There is nothing to compare with",
        )
    if wanted.to_step > run.step:
        raise _fault("to_step", f"run {run.id} has done {run.step} steps; choose one of these")
    if wanted.from_step < begun_at(run):
        raise _fault("from_step", f"run {run.id} began at step {begun_at(run)}; begin there")
    _check_size(spec, run, await trained_by(parts[EventStore], run))


def _check_size(spec: RunSpec, run: RunRow, trained: list[Stretch]) -> None:
    """Raise InvalidSpec if the steps were trained by another number of ranks than the replay's, or
    by several, or with micro-batches of another size."""
    assert spec.replay is not None
    if run.exactness == "elastic" and spec.train.exactness == "elastic":
        return  # any number of ranks gives the same bits
    met = [each for each in trained if each.meets(spec.replay.from_step, spec.replay.to_step)]
    ways = {(each.world_size, each.micro_batch_size) for each in met}
    of_spec = (None, RunSpec.model_validate(run.spec).micro_batch_size)
    why = (
        "Ranks of another number, or micro-batches of another size, sum gradients in another "
        "order, so only the same give the same bits"
    )
    if len(ways) > 1:
        raise _fault(
            "to_step",
            f"these steps of run {run.id} were trained in several ways: {words(met)}. {why}: "
            "replay each of these ranges by itself",
        )
    needed: dict[tuple[str, str], int] = {}
    for size, micro_batch_size in ways:
        needed |= {("scaling", "max_workers"): size, ("scaling", "min_workers"): size}
        if micro_batch_size not in of_spec:  # else a change on purpose is compared
            needed["train", "micro_batch_size"] = micro_batch_size
    for (section, field), value in needed.items():
        if getattr(getattr(spec, section), field) != value:
            message = f"must be {value}: run {run.id} trained {words(met)}. {why}"
            raise InvalidSpec((FieldError((section, field), message),))


def _fault(field: str, msg: str) -> InvalidSpec:
    return InvalidSpec((FieldError(("replay", field), msg),))
