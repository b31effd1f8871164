"""Specs that a new run begins with: a template of the catalog, or another run's spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from everstep.spec.catalog import CatalogEntry, catalog
from everstep.spec.run_spec import RunSpec
from everstep.spec.yaml_text import to_yaml
from everstep.wire.metric_names import mode_of
from service.model.run_rows import RunRow

DEFAULT_TEMPLATE: Final = "digits"
_NAME_CHARS: Final = 123


def templates() -> dict[str, str]:
    """Return the title of each template by its name, which is that of a data set."""
    return {entry.name: f"{entry.name} ({entry.task})" for entry in catalog().data}


def template(name: str) -> str | None:
    """Return a template as YAML; None for an unknown name. An argument that has to be filled in is
    null, which is a fault until then."""
    known = catalog()
    data = next((entry for entry in known.data if entry.name == name), None)
    if data is None:
        return None
    model = next(entry for entry in known.models if entry.task == data.task)
    task = {"name": data.task, "model": _named(model), "data": _named(data)}
    return to_yaml(
        {
            "name": f"{name.replace('_', '-')}-run",
            "task": task,
            "optimizer": {"name": "adamw", "lr": 0.003},
            "train": {"epochs": 10, "global_batch_size": 128},
            "scaling": {"min_workers": 1, "max_workers": 2},
            "checkpoint": {"every_steps": 50},
        }
    )


def _named(entry: CatalogEntry) -> dict[str, Any]:
    required = entry.args_schema.get("required", ())
    return {"name": entry.name} | ({"args": dict.fromkeys(required)} if required else {})


def again(run: RunRow) -> str:
    """Return the spec of a run as YAML, to run it once more."""
    return to_yaml(_short(dict(run.spec)))


def from_checkpoint(run: RunRow, step: str) -> str:
    """Return the spec of a run that starts from a checkpoint of this one."""
    origin = {"run_id": run.id, "step": int(step) if step.isdigit() else step}
    spec = _short({**run.spec, "name": f"{run.name[:_NAME_CHARS]}-fork"})
    return to_yaml(spec | {"resume_from": origin})


def _short(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a resolved spec without what is the default, or follows from another field."""
    checkpoint = spec.get("checkpoint") or {}
    # Leave out an inferred mode: another metric may have the other one.
    if checkpoint.get("best_mode") == mode_of(checkpoint.get("best_metric")):
        checkpoint = {name: value for name, value in checkpoint.items() if name != "best_mode"}
        spec = spec | {"checkpoint": checkpoint}
    try:
        whole = RunSpec.model_validate(spec)
        short: dict[str, Any] = whole.model_dump(mode="json", exclude_defaults=True)
        short = _without(short, spec)
        is_same = RunSpec.model_validate(short) == whole
    except ValueError:  # of another version, which says other faults when it is submitted
        return spec
    return short if is_same else spec


def _without(short: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``short`` in the order of ``spec``, without what ``spec`` lacks."""
    return {
        name: _without(short[name], spec[name])
        if isinstance(short[name], dict) and isinstance(spec[name], dict)
        else short[name]
        for name in spec
        if name in short
    }
