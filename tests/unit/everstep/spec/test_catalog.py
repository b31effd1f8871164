"""The catalog: what a spec may name, and schemas that mean what the spec accepts."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from everstep.errors import InvalidSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.tasks import TORCHVISION_MODELS, CatalogEntry, catalog

KINDS = ("tasks", "models", "data", "optimizers", "schedules")
ENTRIES = [(kind, entry) for kind in KINDS for entry in getattr(catalog(), kind)]
TEXT = ("gpt", "text_files", "language_modeling")
REQUIRED: dict[str, dict[str, Any]] = {
    "image_folder": {"root": "/data"},
    "text_files": {"path": "/data"},
    "image_classification": {"model": {"name": "mini_resnet"}, "data": {"name": "digits"}},
    "language_modeling": {
        "model": {"name": "gpt"},
        "data": {"name": "text_files", "args": {"path": "/data"}},
    },
}
NAMED = [
    entry
    for entry in ENTRIES
    if entry[0] != "models" or entry[1].name in ("mini_resnet", "gpt", "resnet18", "vit_b_16")
]


def spec_with(kind: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A spec that uses one entry of the catalog with these arguments."""
    task: dict[str, Any] = {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "digits"},
    }
    if name in TEXT:
        task = {
            "name": "language_modeling",
            "model": {"name": "gpt"},
            "data": {"name": "text_files", "args": {"path": "/data"}},
        }
    spec: dict[str, Any] = {"name": "a", "task": task}
    match kind:
        case "models" | "data":
            task[kind.removesuffix("s")] = {"name": name, "args": arguments}
        case "optimizers" | "schedules":
            spec[kind.removesuffix("s")] = {"name": name, **arguments}
        case _:
            task.update({"name": name, **arguments})
    return spec


def test_everything_has_a_name_of_its_own_and_a_description() -> None:
    for kind in KINDS:
        names = [entry.name for entry in getattr(catalog(), kind)]
        assert len(names) == len(set(names)) > 0
    assert all(entry.description.endswith(".") for _, entry in ENTRIES)


@pytest.mark.parametrize(
    ("kind", "entry"), NAMED, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_schema_and_spec_agree(kind: str, entry: CatalogEntry) -> None:
    """What the schema accepts the spec accepts; arguments that the schema does not know, and values
    of no JSON type, it refuses."""
    jsonschema.Draft202012Validator.check_schema(entry.args_schema)
    required = REQUIRED.get(entry.name, {})
    assert set(entry.args_schema["required"]) == set(required)
    jsonschema.validate(required, entry.args_schema)
    parse_spec(spec_with(kind, entry.name, required))
    wrong: list[dict[str, Any]] = [{**required, "no_such_argument": 1}]
    wrong += [{**required, name: object} for name in entry.args_schema["properties"]]
    for arguments in wrong[:1]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(arguments, entry.args_schema)
    for arguments in wrong:
        with pytest.raises(InvalidSpec):
            parse_spec(spec_with(kind, entry.name, arguments))


@pytest.mark.parametrize(
    ("kind", "entry"), NAMED, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_every_argument_is_described(kind: str, entry: CatalogEntry) -> None:
    properties = entry.args_schema["properties"]
    assert [
        name
        for name, schema in properties.items()
        if "description" not in schema and name not in ("model", "data")
    ] == []


@pytest.mark.parametrize("name", TORCHVISION_MODELS)
def test_every_model_can_be_named(name: str) -> None:
    assert parse_spec(spec_with("models", name, {})).task.model.name == name
    assert name in [entry.name for entry in catalog().models]


def test_models_and_data_say_whose_they_are() -> None:
    for kind in ("models", "data"):
        tasks = {entry.name: entry.task for entry in getattr(catalog(), kind)}
        assert {name for name, task in tasks.items() if task == "language_modeling"} == {
            "gpt",
            "text_files",
        } & tasks.keys()
        assert set(tasks.values()) == {"image_classification", "language_modeling"}
