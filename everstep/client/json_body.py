"""Bodies of requests, checked before they are sent: JSON has no NaN, infinity or objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from everstep.errors import InvalidSpec
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec


def spec_body(spec: RunSpec | Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec as the body of a request; the service validates it. Raise InvalidSpec for
    values that JSON cannot represent."""
    if isinstance(spec, RunSpec):
        return spec.model_dump(mode="json")
    raw = dict(spec)
    try:
        return checked(raw, "spec")
    except InvalidSpec:
        parse_spec(raw)  # names the field if the spec itself is invalid
        raise


def checked(body: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the body. Raise InvalidSpec for values that JSON cannot represent."""
    try:
        json.dumps(body, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise InvalidSpec((), f"the {what} cannot be written as JSON: {exc}") from exc
    return body
