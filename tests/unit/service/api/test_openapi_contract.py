"""OpenAPI is complete, and what it says is frozen in ``contract.txt``: a line for each operation,
with a digest of all that the document says of it, and a digest of the whole. A change of the API is
a change of that file, to be seen in review.

``python -m tests.unit.service.api.test_openapi_contract`` writes the file anew.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from service.cluster.ray_jobs import RayJobs
from service.db.engine import Database
from service.process.app import composed, create_app
from service.settings import Settings
from storage.filesystem import open_storage
from tests.support.api_service import OneNodeCluster

FROZEN = Path(__file__).with_name("contract.txt")
OPEN = {"/healthz", "/readyz"}
"""Routes without a token."""


def described() -> dict[str, Any]:
    """What the application says of itself, but for its version."""
    with tempfile.TemporaryDirectory() as directory:
        database = Database(f"sqlite:///{directory}/x.db")
        parts = composed(
            Settings(home=Path(directory)),
            database,
            open_storage(directory),
            OneNodeCluster(),
            RayJobs(lambda: None),
            lag_s=lambda: None,
        )
        schema: dict[str, Any] = json.loads(json.dumps(create_app(parts).openapi()))
        database.close()
    schema["info"].pop("version")
    return schema


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, methods in described()["paths"].items()
        for method, operation in methods.items()
    ]


def digest_of(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def components_of(value: object, document: dict[str, Any]) -> dict[str, Any]:
    """All components that a part of the document names, and those that these name, by reference."""
    found: dict[str, Any] = {}
    waiting = [value]
    while waiting:
        for reference in re.findall(r'"#/components/([^"]+)"', json.dumps(waiting.pop())):
            if reference not in found:
                kind, name = reference.split("/")
                found[reference] = document["components"][kind][name]
                waiting.append(found[reference])
    return found


def contract(document: dict[str, Any]) -> list[str]:
    """The lines of ``contract.txt``."""
    lines = [
        " ".join(
            (
                f"{method.upper()} {path} {operation['operationId']}",
                ",".join(sorted(operation["responses"])),
                digest_of([operation, components_of(operation, document)]),
            )
        )
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return [*sorted(lines, key=lambda line: line.split()[1::-1]), f"whole {digest_of(document)}"]


def differences(now: list[str], agreed: list[str]) -> str:
    """The operations that differ, agreed (-) and now (+); "" if none does."""
    lines = difflib.unified_diff(agreed, now, "agreed", "now", n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith("@@"))


def test_the_contract_is_as_it_was_agreed() -> None:
    differs = differences(contract(described()), FROZEN.read_text().splitlines())
    assert not differs, (
        f"the API differs from {FROZEN.name}:\n{differs}\n"
        "a deliberate change? python -m tests.unit.service.api.test_openapi_contract"
    )


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
    FROZEN.write_text("\n".join(contract(described())) + "\n")
