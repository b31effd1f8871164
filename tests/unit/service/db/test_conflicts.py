"""Two replicas that write the same row at the same moment: neither fails for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, Table, insert

from everstep.spec.parsing import parse_spec
from everstep.wire.team import Quotas
from service.annexes.nodes.store import NodeMarkStore
from service.api.auth import METRICS_TOKEN_ID, ensure_metrics_token
from service.db.checkpoints import CodeArchives, OriginGone
from service.db.engine import Database
from service.db.node_marks import StorageRecords
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.db.tables import (
    TableHooks,
    code_archives,
    node_marks,
    projects,
    storage_identity,
    tokens,
)
from service.db.tokens import TokenStore, sha256_of
from service.model.rows import NodeMarkRow, TokenRow
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from tests.support.api_service import spec

pytest_plugins = ["tests.support.database_fixtures"]

HELD_OPEN_S = 0.3
DIGEST = "sha256:" + "a" * 64
PROJECT = {"name": "vision", "created_at": 1.0}
METRICS = TokenRow(
    METRICS_TOKEN_ID, "metrics", "viewer", None, sha256_of("m" * 40), 1.0, None, None, None
).columns()
STORAGE = {"name": "runs", "storage_id": "sto_a", "recorded_at": 1.0, "seen_at": 1.0}
MARK = NodeMarkRow("n1", "open", None, "ann", 1.0, None, None).columns()
ARCHIVE = {
    "project": "default",
    "digest": DIGEST,
    "size_bytes": 60,
    "created_by": "tok_a",
    "created_at": 1.0,
}


@pytest.fixture
def other(database: Database, database_url: str) -> Iterator[Database]:
    """Another replica's, made up to date by the first one."""
    other = Database(database_url)
    yield other
    other.close()


Write = Callable[[Database], object]
WRITES: dict[str, tuple[Table, dict[str, object], Write, object]] = {
    "quotas of a project": (
        projects,
        PROJECT,
        lambda database: ProjectStore(database).put("vision", Quotas(max_running=2))[1],
        False,  # it is not new
    ),
    "a token for a project": (
        projects,
        PROJECT,
        lambda database: (
            TokenStore(database).create("bo", "viewer", "vision", create_project=True)[0].project
        ),
        "vision",
    ),
    "an upload for a project": (
        projects,
        PROJECT,
        lambda database: CodeArchives(database).record(
            "vision", DIGEST, 60, "tok_b", 100, create_project=True
        ),
        None,
    ),
    "an archive that is shared": (
        code_archives,
        ARCHIVE,
        lambda database: CodeArchives(database).share("default", DIGEST, "tok_b"),
        None,
    ),
    "the token for metrics": (
        tokens,
        METRICS,
        lambda database: ensure_metrics_token(TokenStore(database), "m" * 40),
        None,
    ),
    "the storage that the database belongs to": (
        storage_identity,
        STORAGE,
        lambda database: StorageRecords(database).replace("sto_b").generation,
        1,
    ),
    "the storage that is met first": (
        storage_identity,
        STORAGE,
        lambda database: StorageRecords(database).claim("sto_b").storage_id,
        "sto_a",
    ),
    "a word about a node": (
        node_marks,
        MARK,
        lambda database: NodeMarkStore(database).mark("n1", "cordoned", "bo").state,
        "cordoned",
    ),
    "a word about a node that nobody spoke of": (
        node_marks,
        MARK,
        lambda database: NodeMarkStore(database).cordon_if_unchanged(
            "n1", None, "service", "broken"
        ),
        False,  # somebody has spoken meanwhile
    ),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_row_that_another_replica_is_writing(
    what: str, database: Database, other: Database
) -> None:
    """The other one has written it, and commits while this one waits."""
    table, row, write, expected = WRITES[what]
    begun = threading.Event()

    def wait_and_write() -> object:
        begun.set()
        return write(other)

    with ThreadPoolExecutor(1) as pool:
        with database.write() as connection:
            connection.execute(insert(table).values(**row))
            answer = pool.submit(wait_and_write)
            begun.wait()
            with pytest.raises(TimeoutError):
                answer.result(HELD_OPEN_S)
        assert answer.result(10) == expected
    found = NodeMarkStore(other).all()
    if "nobody" in what:
        assert found["n1"].state == "open"


def test_a_word_replaces_only_the_one_that_was_known(database: Database) -> None:
    marks = NodeMarkStore(database, lambda: 5.0)
    assert marks.cordon_if_unchanged("n1", None, "service", "broken")
    assert not marks.cordon_if_unchanged("n1", None, "service", "again")
    assert not marks.cordon_if_unchanged("n1", 4.0, "service", "again")
    assert marks.cordon_if_unchanged("n1", 5.0, "service", "again")
    assert (marks.all()["n1"].reason, marks.all()["n1"].state) == ("again", "cordoned")


def test_a_run_is_deleted_or_another_starts_from_it_and_never_both(
    database: Database, other: Database
) -> None:
    meanwhile: list[Callable[[], None]] = []

    def recorded(_connection: Connection, _run: RunRow, _now: float) -> None:
        """A run is recorded, and not yet committed."""
        while meanwhile:
            meanwhile.pop()()

    hook = TableHooks(run_changed=recorded, run_events=frozenset({"run_created"}))
    hooked = Database(database.url.render_as_string(hide_password=False), (hook,))
    runs, theirs = RunStore(hooked), RunStore(other)

    def made(parent: str | None) -> str:
        origin = {} if parent is None else {"resume_from": {"run_id": parent, "step": 1}}
        return runs.create(parse_spec(spec(**origin)), "tok_a")[0].id

    first = made(None)
    with pytest.raises(TransitionConflict, match="has ended"):
        theirs.begin_delete(first)
    runs.request_stop(first, "cancel")
    with ThreadPoolExecutor(1) as pool:
        answers: list[Future[None]] = []

        def delete_it() -> None:
            answers.append(pool.submit(theirs.begin_delete, first))
            with pytest.raises(TimeoutError):
                answers[0].result(HELD_OPEN_S)

        meanwhile.append(delete_it)
        second = made(first)
        with pytest.raises(TransitionConflict, match="another run will start from its checkpoint"):
            answers[0].result(10)
    runs.request_stop(second, "cancel")
    for _ in range(2):  # after a crash it is deleted again
        theirs.begin_delete(first)
    with pytest.raises(OriginGone, match="is being deleted"):
        made(first)
    theirs.delete(first)
    with pytest.raises(OriginGone, match="was deleted"):
        made(first)
    assert made(second), "a fork of a fork asks only for its own parent"
    hooked.close()
