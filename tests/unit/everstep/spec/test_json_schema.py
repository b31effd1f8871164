"""The JSON schema of a spec: what it takes, a service takes, and editors find it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest

from everstep import Client
from everstep.cli.submit import SCHEMA_FILE, schema_line
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import spec_schema
from everstep.spec.yaml_file import read_spec
from tests.support.api_service import ApiService, spec
from tests.support.command_line import run_cli

ROOT = Path(__file__).parents[4]
CHECKER = jsonschema.Draft202012Validator(spec_schema())


def test_it_is_a_schema_that_takes_every_example_and_what_a_spec_resolves_to() -> None:
    jsonschema.Draft202012Validator.check_schema(spec_schema())
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        raw = read_spec(str(path))
        CHECKER.validate(raw)
        CHECKER.validate(parse_spec(raw).model_dump(mode="json"))


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"train": {"epohcs": 3}}, ["train"]),
        ({"train": {"epochs": "3"}}, ["train", "epochs"]),
        ({"optimizer": {"name": "adamw", "lr": -1.0}}, ["optimizer"]),
        ({"scaling": {"min_workers": 0}}, ["scaling", "min_workers"]),
        ({"nmae": "x"}, []),
    ],
)
def test_it_refuses_what_a_spec_refuses(fields: dict[str, object], place: list[str]) -> None:
    found = [list(error.absolute_path) for error in CHECKER.iter_errors(spec(**fields))]
    assert place in found


async def test_it_is_served_with_a_token_and_to_editors_without(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.announce(monkeypatch)
    assert await api.get("/v1/schema") == spec_schema()
    stranger = await api.client(None)
    assert (await stranger.get("/v1/schema")).status_code == 401
    assert (await stranger.get("/static/spec.schema.json")).json() == spec_schema()
    assert await asyncio.to_thread(Client().schema) == spec_schema()


def test_init_writes_it_beside_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_cli("init", "task", "spirals", "--in", str(tmp_path)).exit_code == 0
    folder = tmp_path / "spirals"
    first, _, rest = (folder / "spec.yaml").read_text().partition("\n")
    assert first == schema_line(SCHEMA_FILE) == "# yaml-language-server: $schema=spec.schema.json"
    assert json.loads((folder / SCHEMA_FILE).read_text()) == spec_schema()
    assert rest.startswith("# The training")
    CHECKER.validate(read_spec(str(folder / "spec.yaml")))
    assert SCHEMA_FILE in (folder / ".everstepignore").read_text()
    monkeypatch.chdir(tmp_path)
    done = run_cli("init", "schema")
    assert done.stdout == "spec.schema.json\n" and schema_line(SCHEMA_FILE) in done.stderr
    assert json.loads((tmp_path / SCHEMA_FILE).read_text()) == spec_schema()
