"""What `from everstep import …` offers, and that it is said."""

from __future__ import annotations

import importlib.metadata
import inspect
from importlib.resources import files

import pytest
from pydantic import BaseModel

import everstep
from everstep import wire
from everstep.spec import code, run_spec, sections, tasks


def test_every_error_is_public_and_below_one() -> None:
    from everstep import errors

    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception)
    ]
    assert all(
        issubclass(kind, everstep.EverstepError) and kind.__name__ in everstep.__all__
        for kind in kinds
    )


def test_the_version_is_the_distribution_s() -> None:
    assert everstep.__version__ == importlib.metadata.version("everstep")


def test_types_are_shipped() -> None:
    assert files("everstep").joinpath("py.typed").is_file()


SPEC_MODULES = (
    run_spec,
    sections,
    code,
    tasks,
)


def models() -> list[type[BaseModel]]:
    found = {
        kind
        for module in SPEC_MODULES
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, BaseModel) and kind.__module__.startswith("everstep.")
    }
    return sorted(found, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("model", models())
def test_every_field_of_a_spec_says_what_it_means(model: type[BaseModel]) -> None:
    silent = [
        name
        for name, field in model.model_fields.items()
        if not field.description and name not in ("name", "args", "model", "data")
    ]
    if issubclass(model, tasks.Catalog):
        silent = []
    assert silent == []


def test_every_wire_type_is_frozen() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(wire, inspect.isclass)
        if issubclass(kind, BaseModel) and kind is not BaseModel
    ]
    assert all(
        kind.model_config.get("frozen")
        for kind in kinds
        if kind.__module__.startswith("everstep.wire.")
    )


@pytest.mark.parametrize("name", ["Client", "AsyncClient", "AsyncRun", "RunHandle", "DrillHandle"])
def test_every_public_method_is_documented(name: str) -> None:
    methods = inspect.getmembers(getattr(everstep, name), inspect.isfunction)
    assert [
        method
        for method, function in methods
        if not method.startswith("_") and not inspect.getdoc(function)
    ] == []
