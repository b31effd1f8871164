"""What a replay needs of the run whose steps it trains again."""

from __future__ import annotations

from everstep.errors import FieldError, InvalidSpec
from everstep.spec.run_spec import RunSpec
from service.api.context import ApiContext
from service.model.run_rows import RunRow
from service.projections import attempts
from service.projections.drills import Stretch, begun_at, stretches, words


async def trained_by(context: ApiContext, run: RunRow) -> list[Stretch]:
    """Return which steps of a run were trained by how many ranks."""
    events = await context.database_call(context.events.of_kinds, run.id, attempts.ATTEMPT_KINDS)
    return stretches(attempts.attempts(events), run.step)


async def check_replay(context: ApiContext, spec: RunSpec) -> None:
    """Check that the steps of a replay can be trained again and compared. Raises InvalidSpec."""
    wanted = spec.replay
    if wanted is None:
        return
    run = await context.database_call(context.runs.get, wanted.run_id)
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
    _check_size(spec, run, await trained_by(context, run))


def _check_size(spec: RunSpec, run: RunRow, trained: list[Stretch]) -> None:
    """Raise InvalidSpec if the steps were trained by another number of ranks than the replay's, or
    by several."""
    assert spec.replay is not None
    if run.exactness == "elastic" and spec.train.exactness == "elastic":
        return  # any number of ranks gives the same bits
    met = [each for each in trained if each.meets(spec.replay.from_step, spec.replay.to_step)]
    sizes = {each.world_size for each in met}
    why = (
        "Ranks of another number sum gradients in another order, so only the same number gives the "
        "same bits"
    )
    if len(sizes) > 1:
        raise _fault(
            "to_step",
            f"these steps of run {run.id} were trained by several numbers of ranks: {words(met)}. "
            f"{why}: replay each of these ranges by itself",
        )
    own = (spec.scaling.min_workers, spec.scaling.max_workers)
    if sizes and own != (min(sizes), min(sizes)):
        [size] = sizes
        raise InvalidSpec(
            (
                FieldError(
                    ("scaling", "max_workers"),
                    f"must be {size}, and min_workers too: run {run.id} trained these steps on "
                    f"{size} ranks. {why}",
                ),
            )
        )


def _fault(field: str, msg: str) -> InvalidSpec:
    return InvalidSpec((FieldError(("replay", field), msg),))
