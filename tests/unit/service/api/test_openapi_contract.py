"""OpenAPI is complete, and what it says is frozen: a change of the API is a change of
``openapi.json``, to be seen in review.

``python -m tests.unit.service.api.test_openapi_contract`` writes the file anew.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from service.annexes.registry import ANNEXES
from service.api.context import ApiContext
from service.db.engine import Database
from service.process.app import create_app
from storage.filesystem import open_storage
from tests.support.api_service import OneNodeCluster

FROZEN = Path(__file__).with_name("openapi.json")
OPEN = {"/healthz", "/readyz"}
"""Routes without a token."""


def described() -> dict[str, Any]:
    """What the application says of itself, but for its version."""
    with tempfile.TemporaryDirectory() as directory:
        context = ApiContext(
            Database(f"sqlite:///{directory}/x.db"),
            open_storage(directory),
            OneNodeCluster(),
            lambda: None,
            annexes=ANNEXES,
        )
        schema: dict[str, Any] = json.loads(json.dumps(create_app(context).openapi()))
        context.database.close()
    schema["info"].pop("version")
    return schema


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, methods in described()["paths"].items()
        for method, operation in methods.items()
    ]


def test_the_contract_is_as_it_was_agreed() -> None:
    now, agreed = described(), json.loads(FROZEN.read_text())
    for part in ("paths", "components"):
        assert now[part] == agreed[part], (
            "a deliberate change? python -m tests.unit.service.api.test_openapi_contract"
        )
    assert now == agreed


def test_everything_says_what_it_is() -> None:
    missing = []
    for method, path, operation in operations():
        name = f"{method} {path}"
        missing += [
            f"{name}: {what}" for what in ("summary", "operationId") if not operation.get(what)
        ]
        missing += [
            f"{name}: {one['name']}"
            for one in operation.get("parameters", ())
            if not one.get("description")
        ]
        body = operation.get("requestBody", {}).get("content", {})
        shown = {
            kind for kind, content in body.items() if "example" in content or "examples" in content
        }
        missing += [
            f"{name}: example of {kind}" for kind in body if "json" in kind and kind not in shown
        ]
        missing += [
            f"{name}: {status}"
            for status, answer in operation["responses"].items()
            if not answer.get("description")
        ]
    assert missing == []


def test_every_route_tells_its_answer_and_every_problem() -> None:
    for method, path, operation in operations():
        answers = operation["responses"]
        good = [status for status in answers if status.startswith("2")]
        assert good, (method, path)
        for status in good:
            assert status == "204" or answers[status].get("content"), (method, path, status)
        if path not in OPEN:
            assert {"401", "429", "503"} <= answers.keys(), (method, path)
            assert operation.get("security"), (method, path)
        for status in answers.keys() - good:
            if path not in OPEN:
                [kind] = answers[status]["content"]
                assert kind == "application/problem+json", (method, path, status)


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(described(), indent=1, sort_keys=True) + "\n")
