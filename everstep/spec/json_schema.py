"""The JSON schema of a spec, for editors that complete and check YAML."""

from __future__ import annotations

from typing import Any

from everstep.spec.run_spec import RunSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def spec_schema() -> dict[str, Any]:
    """Return the schema. What a spec checks over several fields is not in it."""
    return {"$schema": DIALECT, **RunSpec.model_json_schema(), "title": "Everstep spec"}
