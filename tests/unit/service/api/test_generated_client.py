"""Clients that openapi-python-client and openapi-typescript generate from our OpenAPI submit a run
and read it."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_service import ApiService, spec
from tests.support.tools import tool

PACKAGE = "everstep_generated"
PROGRAM = Path(__file__).parents[3] / "tools" / "typescript" / "client.ts"


@pytest.fixture
async def document(api: ApiService, tmp_path: Path) -> Path:
    """The description that the service serves, in a file."""
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(await api.get("/openapi.json")))
    return path


async def run_in(directory: Path, *command: str, **variables: str) -> str:
    """Run a command to its end and return what it printed; fail with that if it failed."""
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=directory,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{command[:3]}: {said}"
    return said


async def test_a_generated_python_client_submits_a_run_and_reads_it(
    api: ApiService, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = dict.fromkeys(("application/x-tar", "application/gzip"), "application/octet-stream")
    (tmp_path / "config.json").write_text(json.dumps({"content_type_overrides": binary}))
    made = tmp_path / "made"
    said = await run_in(
        tmp_path,
        *(sys.executable, "-m", "openapi_python_client", "generate", "--path", str(document)),
        *("--meta", "none", "--config", "config.json", "--output-path", str(made / PACKAGE)),
        PYTHONPATH=str(tool("python-client") / "packages"),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # it formats with ruff
    )
    assert "WARNING" not in said.upper(), said
    monkeypatch.syspath_prepend(str(made))
    await asyncio.to_thread(_use, api.url, api.token("submitter", "default"))


async def test_a_program_with_generated_types_of_typescript_submits_a_run_and_reads_it(
    api: ApiService, document: Path, tmp_path: Path
) -> None:
    """The compiler refuses what the types should refuse, and nothing else."""
    modules = tool("typescript") / "node_modules"
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / PROGRAM.name).write_text(PROGRAM.read_text())
    await run_in(
        tmp_path,
        *("node", str(modules / "openapi-typescript" / "bin" / "cli.js"), str(document)),
        *("--output", "everstep.ts", "--default-non-nullable", "false"),
    )
    await run_in(
        tmp_path,
        *("node", str(modules / "typescript" / "bin" / "tsc"), "--strict", PROGRAM.name),
        *("--target", "es2022", "--lib", "es2022,dom", "--module", "nodenext"),
    )
    said = await run_in(tmp_path, "node", "client.js", api.url, api.token("submitter", "default"))
    assert api.runs.get(said.strip()) is not None


def _use(url: str, token: str) -> None:
    def module(name: str) -> Any:
        return importlib.import_module(f"{PACKAGE}.{name}")

    with module("client").AuthenticatedClient(base_url=url, token=token) as client:
        body = module("models").RunSpec.from_dict(spec(name="generated"))
        made = module("api.runs.create_run").sync(client=client, body=body, idempotency_key="once")
        assert made.name == "generated" and made.status == "QUEUED"
        assert isinstance(made.created_at, datetime)
        again = module("api.runs.create_run").sync(client=client, body=body, idempotency_key="once")
        assert again.id == made.id
        found = module("api.runs.get_run").sync(made.id, client=client)
        assert found.id == made.id and found.tags.to_dict() == {}
        listed = module("api.runs.list_runs").sync(client=client, status=["QUEUED"], limit=1)
        assert [run.id for run in listed.items] == [made.id] and listed.next_cursor is None
        events = module("api.history.get_events").sync(made.id, client=client)
        assert [event.kind for event in events.items][:2] == ["run_created", "status"]
        resolved = module("api.runs.get_spec").sync(made.id, client=client)
        assert resolved.train.epochs >= 1
        missing = module("api.runs.get_run").sync("run_000000000000", client=client)
        assert missing.code == "not_found"
