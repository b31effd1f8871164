"""Parse a spec, and report every fault in it at once."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from everstep.errors import FieldError, InvalidSpec
from everstep.spec import plain_text
from everstep.spec.field_errors import few, field_errors
from everstep.spec.reserved_env import reserved_reason
from everstep.spec.run_spec import RunSpec

_LEAST_AMOUNT, _MOST_AMOUNT = 0.0001, 1e18
"""Bounds of a resource amount; Ray counts resources in units of 0.0001."""
_RAYS_OWN = {
    "cpu": "CPU",
    "gpu": "GPU",
    "memory": "memory",
    "object_store_memory": "object_store_memory",
}
"""Resources that every Ray node has, keyed by their names in lower case."""


def parse_spec(raw: Any) -> RunSpec:
    """Return the RunSpec in parsed JSON or YAML. Raise InvalidSpec with one entry for each fault,
    all found at once.

    Use this for new requests only. Read a stored spec with ``RunSpec`` itself, so that checks added
    later do not refuse it.
    """
    faults = (*plain_text.faults(raw), *_amount_faults(raw), *_env_faults(raw))
    try:
        spec = RunSpec.model_validate(raw)
    except ValidationError as exc:
        found = field_errors(RunSpec, raw, exc)
        named = {fault.loc for fault in found}
        raise InvalidSpec(
            (*found, *few([fault for fault in faults if fault.loc not in named]))
        ) from exc
    if faults:
        raise InvalidSpec(few(faults))
    return spec


def _env_faults(raw: Any) -> list[FieldError]:
    """Return one fault for each reserved variable in ``env`` and ``secrets``."""
    found = []
    for field in ("env", "secrets"):
        variables = raw.get(field) if isinstance(raw, dict) else None
        names = (
            [name for name in variables if isinstance(name, str)]
            if isinstance(variables, dict)
            else []
        )
        found += [
            FieldError((field, name), reason)
            for name in names
            if (reason := reserved_reason(name)) is not None
        ]
    return found


def _amount_faults(raw: Any) -> list[FieldError]:
    """Return one fault for each misspelt resource, and for each amount that Ray cannot count."""
    path = ("scaling", "resources_per_worker")
    node = raw
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    amounts = (
        {name: amount for name, amount in node.items() if isinstance(amount, int | float)}
        if isinstance(node, dict)
        else {}
    )
    return [
        FieldError(
            (*path, str(name)),
            (
                "is not a Ray resource; resource names are case-sensitive: did you mean "
                f"{_RAYS_OWN[near]}?"
            ),
        )
        for name in (node if isinstance(node, dict) else ())
        if (near := str(name).casefold().removesuffix("s")) in _RAYS_OWN and name != _RAYS_OWN[near]
    ] + [
        FieldError(
            (*path, str(name)),
            (
                f"must be at least {_LEAST_AMOUNT:g}, Ray's smallest unit, and at most "
                f"{_MOST_AMOUNT:g}"
            ),
        )
        for name, amount in amounts.items()
        if not _LEAST_AMOUNT <= amount <= _MOST_AMOUNT
    ]
