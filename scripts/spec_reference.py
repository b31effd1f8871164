"""Write docs/spec.md: every field of a RunSpec with its type, bounds, default and meaning.

`python scripts/spec_reference.py` reads the pydantic models and writes the page. With `--check` it
compares instead, and fails where the page is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from everstep.spec.run_spec import RunSpec
from everstep.spec.sections import Frozen

PAGE = Path(__file__).parents[1] / "docs" / "spec.md"
HEAD = """\
# Every field of a spec

For anyone who writes a spec. After this page you know each field: its type, its bounds, its
default and what it does. `scripts/spec_reference.py` writes this page from the models that validate
a spec, so do not edit it.

A spec is YAML or JSON. The smallest one names a task:

```yaml
name: digits
task:
  name: image_classification
  model: {name: mini_resnet}
  data: {name: digits}
```

A field that is not listed here is refused, and so is a value outside the bounds. The answer names
every wrong field at once. A field whose default is `null` may be set to `null`. A heading of two
names, such as `optimizer`: `sgd`, is for the section with that `name`.
`everstep submit SPEC --set train.epochs=5` sets a field on the command line.

An editor with the YAML language server completes and checks a spec that begins with

    # yaml-language-server: $schema=spec.schema.json

`everstep init --schema` writes that file, `everstep init NAME` both. A service has it at
`/static/spec.schema.json`, without a token, and at `/v1/schema`.
"""
LONGEST_CHOICE = 12
"""A field with more allowed values than this lists them below the table."""
UNBOUNDED = 2**31 - 1
"""An upper bound that only keeps a number within 32 bits is not shown."""

Schema = dict[str, Any]


class Section:
    """A model and the place in the spec where it is used."""

    def __init__(self, name: str, path: str, variant: str = "") -> None:
        self.name, self.path, self.variant = name, path, variant

    @property
    def heading(self) -> str:
        if not self.path:
            return "The top level"
        return f"`{self.path}`" + (f": `{self.variant}`" if self.variant else "")

    @property
    def link(self) -> str:
        slug = re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")
        return f"[`{self.variant or self.path}`](#{slug})"


def models() -> dict[str, type[BaseModel]]:
    """Return every model of a spec by its name."""

    def below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
        yield model
        for child in model.__subclasses__():
            yield from below(child)

    return {model.__name__: model for model in below(Frozen)}


def references(schema: Any) -> list[str]:
    """Return the names of the models that a field's schema refers to, in order."""
    if isinstance(schema, list):
        return [name for each in schema for name in references(each)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
    return own + [
        name
        for key, value in schema.items()
        if key in ("anyOf", "oneOf", "items", "additionalProperties")
        for name in references(value)
    ]


def sections_of(definitions: dict[str, Schema]) -> list[Section]:
    """Return a section for each model that a spec can contain, a parent before its children."""
    known: dict[str, Section] = {}

    def visit(section: Section) -> None:
        if section.name in known:
            return
        known[section.name] = section
        for field, schema in definitions[section.name]["properties"].items():
            path = f"{section.path}.{field}".lstrip(".")
            names = references(schema)
            for name in names:
                variant = section.variant if field == "args" else ""
                if len(names) > 1 or field in ("model", "data"):
                    value = definitions[name]["properties"]["name"]
                    variant = value.get("const", "torchvision")
                visit(Section(name, path, variant))

    visit(Section(RunSpec.__name__, ""))
    return list(known.values())


def bounds(schema: Schema) -> str:
    """Return the bounds of a number in brackets, empty where there are none."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if high is not None and high >= UNBOUNDED:
        high = None
    if low is not None and high is not None:
        return f" ({low:,} to {high:,})"
    named = {"at least": low, "above": above, "at most": high, "below": below}
    limits = [f"{word} {limit:,}" for word, limit in named.items() if limit is not None]
    return f" ({', '.join(limits)})" if limits else ""


def size(schema: Schema, kind: str, unit: str) -> str:
    """Return how long a text, list or mapping may be, empty where nothing is said."""
    low, high = schema.get(f"min{kind}"), schema.get(f"max{kind}")
    if low and high:
        return f" ({low:,} to {high:,} {unit})"
    return f" (at most {high:,} {unit})" if high else " (not empty)" if low else ""


def type_of(schema: Schema, links: dict[str, str]) -> str:
    """Return the type of a field as words, with links to the sections of models."""
    if "$ref" in schema:
        return links[schema["$ref"].rpartition("/")[2]]
    if "oneOf" in schema or "anyOf" in schema:
        kinds = [type_of(each, links) for each in schema.get("oneOf", schema.get("anyOf", []))]
        return " or ".join(kinds)
    if "const" in schema:
        return f"`{schema['const']}`"
    if len(schema.get("enum", ())) > LONGEST_CHOICE:
        return f"one of the {len(schema['enum'])} names below"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return kind + bounds(schema)
    if kind == "array":
        return f"list of {type_of(schema['items'], links)}" + size(schema, "Items", "entries")
    if kind == "object":
        values = schema.get("additionalProperties", {})
        values = next(iter(schema.get("patternProperties", {}).values()), values)
        inner = type_of(values, links) if isinstance(values, dict) else "anything"
        return f"mapping of names to {inner}" + size(schema, "Properties", "entries")
    names = {"string": "text" + size(schema, "Length", "characters"), "null": "`null`"}
    return names.get(str(kind), str(kind))


def default_of(field: FieldInfo, schema: Schema) -> str:
    """Return a field's default as YAML would have it; empty for a model, whose section has it."""
    if field.is_required():
        return "required"
    if field.default is None and "default" not in schema:
        return "see right"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        name = getattr(value, "name", None)
        return f"`{name}`" if name else ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def table_of(model: type[BaseModel], schema: Schema, links: dict[str, str]) -> list[str]:
    """Return the table of a model's fields; its ``name`` stands in the heading."""
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    choices = []
    for name, of_field in schema["properties"].items():
        if name == "name" and "const" in of_field:
            continue  # it stands in the heading
        default = default_of(model.model_fields[name], of_field)
        meaning = of_field.get("description", "")
        if not meaning and name == "name":
            meaning = "Chooses one of these."
        kind = type_of(of_field, links)
        if default == "`null`":
            kind = kind.removesuffix(" or `null`")
        cells = [f"`{name}`", kind, default, meaning]
        lines.append(f"| {' | '.join(map(cell, cells))} |")
        if len(of_field.get("enum", ())) > LONGEST_CHOICE:
            names = ", ".join(f"`{value}`" for value in of_field["enum"])
            choices += ["", f"`{name}` is one of {names}."]
    return lines + choices if len(lines) > 2 else ["It has no other field."]


def page() -> str:
    """Return the page."""
    whole = RunSpec.model_json_schema()
    definitions: dict[str, Schema] = {**whole["$defs"], RunSpec.__name__: whole}
    classes, sections = models(), sections_of(definitions)
    links = {section.name: section.link for section in sections}
    lines = [HEAD]
    for section in sections:
        schema = definitions[section.name]
        lines += [f"## {section.heading}", ""]
        if section.path and schema.get("description"):
            lines += [" ".join(schema["description"].split()).replace("``", "`"), ""]
        lines += [*table_of(classes[section.name], schema, links), ""]
    return "\n".join(lines)


def main() -> None:
    written = page()
    if "--check" not in sys.argv:
        PAGE.write_text(written)
    elif not PAGE.exists() or PAGE.read_text() != written:
        raise SystemExit(
            "docs/spec.md is not what the models of a spec say; run `python "
            "scripts/spec_reference.py`"
        )


if __name__ == "__main__":
    main()
