"""What is wrong with a request, in words for the person who wrote it, with the path that they wrote."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from everstep.errors import FieldError


def fields_of(annotation: Any, value: Any = None) -> dict[str, Any]:
    """Field name -> annotation, of the model that ``annotation`` is; of a union, of those that ``value``'s name chooses."""
    found: dict[str, Any] = {}
    for model in models_of(annotation, value):
        hints = typing.get_type_hints(model, include_extras=True)
        found.update({field: hints[field] for field in model.model_fields if field not in found})
    return found


def models_of(annotation: Any, value: Any = None) -> list[type[BaseModel]]:
    """The models that ``annotation`` may be: of a union, those that ``value``'s name chooses, all where it chooses none."""
    models = list(_models(annotation))
    name = value.get("name") if isinstance(value, dict) else None
    return [model for model in models if name is not None and name in _names(model)] or models


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in an annotation: behind Annotated and unions, not in the values of a dict."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) not in (dict, list, tuple, typing.Literal):
        for part in typing.get_args(annotation):
            yield from _models(part)


def _names(model: type[BaseModel]) -> Sequence[str]:
    field = model.model_fields.get("name")
    return typing.get_args(field.annotation) if field is not None else ()


def field_errors(model: type[BaseModel], raw: Any, error: ValidationError) -> tuple[FieldError, ...]:
    """One entry for each fault. The alternatives of a union, of which pydantic reports each, are one fault."""
    messages: dict[tuple[str | int, ...], list[str]] = {}
    for fault in error.errors(include_url=False):
        loc, siblings = _locate(model, raw, fault)
        messages.setdefault(loc, []).append(_words(fault, loc, siblings, raw))
    return tuple(FieldError(loc, "; or ".join(dict.fromkeys(words))) for loc, words in messages.items())


def _locate(model: type[BaseModel], raw: Any, fault: ErrorDetails) -> tuple[tuple[str | int, ...], list[str]]:
    """The path of keys that the user wrote or should have written, without the tags that pydantic adds at unions; and the fields
    that there are beside the last of them."""
    path: list[str | int] = []
    siblings: list[str] = []
    node, annotation = raw, typing.cast(Any, model)
    for part in fault["loc"]:
        if isinstance(node, list) and isinstance(part, int) and part < len(node):
            path.append(part)
            node, annotation = node[part], _item_of(annotation)
            continue
        fields = fields_of(annotation, node)
        written = isinstance(node, dict) and part in node
        if not written and part not in fields:
            continue
        path.append(part)
        siblings = list(fields)
        node = node[part] if isinstance(node, dict) and written else None
        annotation = fields.get(str(part))
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found", "unknown_model"):
        path.append("name")
    return tuple(path), siblings


def _item_of(annotation: Any) -> Any:
    """What a list holds."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is list else None


def _words(fault: ErrorDetails, loc: tuple[str | int, ...], siblings: list[str], raw: Any) -> str:
    """The message, with the way out where pydantic's own does not say it."""
    context = fault.get("ctx", {})
    match fault["type"]:
        case "string_type" if isinstance(fault["input"], bool | int | float):
            written = _as_written(fault["input"], loc, raw)
            what = "key" if fault["loc"][-1] == "[key]" else "value"
            return f'must be text, but the {what} {written} is {_kind(fault["input"])}; quote it: "{written}"'
        case "string_type" if fault["input"] is None:
            return 'must be text, but is empty; write "" for no text, or leave it out'
        case "extra_forbidden":
            near = difflib.get_close_matches(str(loc[-1]), siblings, n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            return f"is not a field; {guess}the fields here are {', '.join(siblings)}"
        case "missing":
            return "is required"
        case "union_tag_not_found":
            return "is required"
        case "union_tag_invalid":
            return f"{context.get('tag')!r} is not known; choose one of {context.get('expected_tags')}"
        case "model_type" | "model_attributes_type":
            return "must be a mapping of fields to values"
        case _:
            return re.sub(r"^(Value error, |Input )", "", fault["msg"])


def _as_written(value: float, loc: tuple[str | int, ...], raw: Any) -> str:
    """How a person wrote a number or boolean: in the file, where that is known, else as JSON has it."""
    written: dict[tuple[str | int, ...], str] = getattr(raw, "written", {})
    return written.get(loc) or json.dumps(value)


def _kind(value: float) -> str:
    return "a boolean" if isinstance(value, bool) else "a number"
