"""A run's fields are written once, and what is derived from them is complete."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import update

from everstep.client.handles import RunFields
from everstep.spec.parsing import parse_spec
from everstep.wire import Run, RunStatus
from service.api.answers import ServiceLinks, run_json
from service.db import tables
from service.db.engine import Database
from service.db.runs import RunStore, new_row
from service.model.run_rows import ListedRun, RunRow
from service.projections.protection import protection
from service.reconciler.observe import facts_of
from tests.support.api_service import NOON, OneNodeCluster, spec

pytest_plugins = ["tests.support.database_fixtures"]

LINKS = ServiceLinks(OneNodeCluster(), "http://here", relays_ray=False)
OLD = {"name": "digits", "task": spec()["task"]}
"""As the first versions might have stored a spec: most sections are missing."""


def row(stored: dict[str, Any]) -> RunRow:
    return replace(new_row("run_1", parse_spec(spec()), "tok", NOON), spec=stored)


def test_the_answer_says_every_field_of_a_run() -> None:
    run = row(spec())
    answer = run_json(run, [], LINKS, NOON)
    assert set(answer) == set(Run.model_fields)
    changed = replace(
        run,
        name="other",
        attempt=3,
        step=7,
        metrics={"loss": 0.5},
        guarantee="each sample once",
        steps_lost=2,
        started_at=NOON + 1,
    )
    read = Run.model_validate(run_json(changed, [], LINKS, NOON))
    assert (read.name, read.attempt, read.step, read.metrics) == ("other", 3, 7, {"loss": 0.5})
    assert (read.guarantee, read.steps_lost) == ("each sample once", 2)
    assert read.started_at is not None and read.started_at.timestamp() == NOON + 1


def test_a_handle_has_the_fields_of_the_answer_with_their_types() -> None:
    """The class lists them for type checkers and editors; they are read from the answer."""

    def annotations(tree: ast.AST) -> dict[str, str]:
        return {
            node.target.id: ast.unparse(node.annotation)
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    handle = ast.parse(inspect.getsource(RunFields))
    [listed] = [node for node in handle.body[0].body if isinstance(node, ast.If)]  # type: ignore[attr-defined]
    answer = annotations(ast.parse(inspect.getsource(Run)))
    for own in ("id", "metrics", "goodput"):  # a property, and methods that ask for more
        del answer[own]
    assert annotations(ast.Module([listed], [])) == {
        name: kind.replace("Time", "datetime").removeprefix("Open[").removesuffix("]" * is_open)
        for name, kind in answer.items()
        for is_open in [kind.startswith("Open[")]
    }


@pytest.mark.parametrize("changes", [{}, {"from_the_future": 1}, {"train": {"sparkle": True}}])
def test_a_stored_spec_of_another_version_can_be_read(changes: dict[str, Any]) -> None:
    run = row(OLD | changes)
    assert run.stored_spec.train.epochs == 1 and run.stored_spec.checkpoint.best_mode == "max"
    facts = facts_of(run)
    assert (facts.min_workers, facts.max_workers, facts.use_gpu) == (1, 1, "auto")
    assert protection(run).survives == ("rank", "node", "driver")
    assert run_json(run, [], LINKS, NOON)["forked_from"] is None


def test_a_run_with_an_old_spec_is_listed_and_scheduled(runs: RunStore, database: Database) -> None:
    run = runs.create(parse_spec(spec()), "tok")[0]
    old = OLD | {"resume_from": {"run_id": "run_0", "step": 12, "of_the_future": True}}
    with database.write() as connection:
        connection.execute(update(tables.runs).values(spec=old))
    listed, _ = runs.listed([run.id])[run.id]
    assert isinstance(listed, ListedRun) and listed.max_system_failures is None
    assert run_json(listed, [], LINKS, NOON)["forked_from"] == {"run_id": "run_0", "step": 12}
    assert [facts_of(live).max_workers for live in runs.live()] == [1]
    assert runs.checkpoints.awaited() == {"run_0": frozenset({12})}
    stopped = runs.request_stop(run.id, "cancel")
    assert stopped.status is RunStatus.CANCELLED, "a webhook is looked for in the spec"
