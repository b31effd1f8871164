"""Generated requests against the real application: no 5xx, and no answer that OpenAPI does not tell
of."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode, Response
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from sqlalchemy import select

from everstep.spec.parsing import parse_spec
from everstep.wire.events import EventKind
from service.annex import hooks_of
from service.annexes.registry import ANNEXES
from service.cluster.ray_jobs import RayEndpoint, RayJobs
from service.db.engine import Database
from service.db.events import EventStore
from service.db.runs import RunStore
from service.db.tables import metadata
from service.db.tokens import TokenStore
from service.parts import ServiceParts
from service.process.app import composed, create_app
from service.settings import Settings
from service.storage_identity import StorageGate
from storage.filesystem import Storage, open_storage
from tests.support.api_service import Journal, ManualClock, OneNodeCluster, spec
from tests.support.fake_ray import FakeRay, serving

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
BOUNDED = settings(
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[ServiceParts]:
    database = Database(f"sqlite:///{tmp_path / 'everstep.db'}", hooks_of(ANNEXES))
    database.migrate()
    storage = open_storage(str(tmp_path / "storage"))
    with serving(FakeRay()) as ray:
        endpoint = RayEndpoint(ray.url, ray.token)
        jobs = RayJobs(lambda: endpoint)
        yield composed(
            Settings(home=tmp_path, ray_address=ray.url, drills=True, rate_per_s=0),
            database,
            storage,
            OneNodeCluster(),
            jobs,
            lag_s=lambda: 0.1,
            clock=ManualClock(),
        )
    database.close()


@pytest.fixture
def headers(parts: ServiceParts) -> dict[str, str]:
    return {"Authorization": f"Bearer {parts[TokenStore].create('fuzz', 'admin', None)[1]}"}


@pytest.fixture
def api(parts: ServiceParts) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(parts))


@pytest.fixture
def run_id(parts: ServiceParts) -> str:
    """A run with a history."""
    made = parts[RunStore].create(parse_spec(spec(tags={"a": "b"})), "tok_test")[0].id
    parts[StorageGate].check()  # as a service does before it has any run
    parts[RunStore].claim_submission(made, 0)
    journal = Journal()
    history = [*journal.start(), journal.steps(1, 2), journal.checkpoint(2, accuracy=0.5)]
    history.append(journal.event(EventKind.EVALUATED, step=2, epoch=0, metrics={"accuracy": 0.5}))
    parts[EventStore].apply_journal(made, 1, history, "c")
    return made


def check(case: Case, headers: dict[str, str]) -> Response:
    """Call it with a token; what would follow for ever is asked for once."""
    if isinstance(case.query, dict):
        case.query.pop("follow", None)
    with warnings.catch_warnings():
        # of what the generator sends: invalid cookies, unknown charsets
        warnings.simplefilter("ignore")
        case.headers.update(headers)
        response = case.call()
    case.validate_response(response, checks=CHECKS)
    return response


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_generated_request_gets_an_answer_that_is_not_documented(
    mode: GenerationMode, api: Any, headers: dict[str, str], run_id: str
) -> None:
    for result in api.get_all_operations():
        operation = result.ok()
        known = {"run_id": run_id} if "{run_id}" in operation.path else None

        @settings(BOUNDED, max_examples=3)
        @given(operation.as_strategy(generation_mode=mode, path_parameters=known))
        def ask(case: Case) -> None:
            check(case, headers)

        # What takes nothing cannot be asked wrongly.
        with suppress(Unsatisfiable) if mode is GenerationMode.NEGATIVE else nullcontext():
            ask()


def test_no_sequence_of_requests_gets_there_either(
    api: Any, headers: dict[str, str], parts: ServiceParts
) -> None:
    """Along the links: what is made is looked at, stopped, resumed and deleted."""

    tokens = metadata.tables["tokens"]
    with parts[Database].read() as connection:
        own = [dict(row) for row in connection.execute(select(tokens)).mappings()]

    class Story(api.as_state_machine()):  # type: ignore[misc]
        def setup(self) -> None:
            """Begin where every other story begins: what the same requests are answered with must
            not depend on earlier ones. One may even have revoked the token that all of them
            use."""
            with parts[Database].write() as connection:
                for table in reversed(metadata.sorted_tables):
                    connection.execute(table.delete())
                connection.execute(tokens.insert(), own)
            for path in Path(parts[Storage].uri).glob("*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

        def get_call_kwargs(self, case: Case) -> dict[str, Any]:
            if isinstance(case.query, dict):
                case.query.pop("follow", None)
            case.headers.update(headers)
            return {}

        def validate_response(self, response: Response, case: Case, **_: Any) -> None:
            case.validate_response(response, checks=CHECKS)

    Story.run(settings=settings(BOUNDED, max_examples=6, stateful_step_count=6))
