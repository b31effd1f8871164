"""Compare specs field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def leaves(value: Any, path: str = "") -> dict[str, str]:
    """Return every leaf of a JSON value by its path, as JSON: ``{"train.epochs": "5"}``. An empty
    object or list is a leaf."""
    if isinstance(value, Mapping) and value:
        return {
            name: text
            for key, item in value.items()
            for name, text in leaves(item, f"{path}.{key}" if path else key).items()
        }
    return {path: json.dumps(value, ensure_ascii=False)}


def differences(specs: list[dict[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Return the paths at which the specs differ, with each spec's value; None if it has none.
    Names are left out."""
    flat = [leaves(spec) for spec in specs]
    paths = dict.fromkeys(path for spec in flat for path in spec)
    rows = [(path, [spec.get(path) for spec in flat]) for path in paths if path != "name"]
    return [(path, values) for path, values in rows if len(set(values)) > 1]
