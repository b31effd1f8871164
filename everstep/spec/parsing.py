"""Parse a spec, and report every fault in it at once."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from everstep.code import DIGEST_PATTERN, ENTRY_PATTERN, REQUIREMENT_PATTERN
from everstep.errors import FieldError, InvalidSpec
from everstep.spec import plain_text
from everstep.spec.code import reserved_reason
from everstep.spec.run_spec import (
    FORMER,
    NAME_PATTERN,
    PROJECT_PATTERN,
    VARIABLE_PATTERN,
    RunSpec,
)
from everstep.text.words import closest

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
    faults = (
        *plain_text.faults(raw),
        *_amount_faults(raw),
        *_env_faults(raw),
        *_former_faults(raw),
    )
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


def _former_faults(raw: Any) -> list[FieldError]:
    """Return one fault for each field of earlier versions that is set to more than its default."""
    found = []
    for (section, name), (default, words) in FORMER.items():
        given = raw.get(section) if isinstance(raw, dict) else None
        if isinstance(given, dict) and given.get(name, default) != default:
            found.append(FieldError((section, name), words))
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


# ---------------------------------------------------------------- field errors

# Turn pydantic's errors into messages for the person who wrote the request, with the path as
# written.

PATTERNS = {
    ENTRY_PATTERN: "does not name a class or function; write MODULE:NAME, for example "
    "my_task.task:MyTask",
    DIGEST_PATTERN: "is not a digest; use what POST /v1/code or client.code.upload returned",
    NAME_PATTERN: "is not a name; use letters, digits, spaces, dots, - and _, with a letter or "
    "digit first",
    PROJECT_PATTERN: "is not the name of a project; use at most 63 lower-case letters, digits, - "
    "and _, with a letter or digit first",
    REQUIREMENT_PATTERN: "is not a package by name and version; write for example einops>=0.8",
    VARIABLE_PATTERN: "is not the name of a variable; use letters, digits and _, for example "
    "HF_HOME",
}
"""What to say of a text that a pattern does not fit, in place of the pattern."""
_MEANT = {
    "batch_size": "global_batch_size",
    "global_batch_tokens": "batch_by",
    "learning_rate": "lr",
}
"""Names of fields elsewhere, and ours."""
MAX_FAULTS = 50
"""Most faults that are described; further ones are only counted."""
_MAX_SUGGESTIONS = 10
_MAX_MESSAGE_CHARS = 2000
_MAX_NAME_CHARS = 200


def fields_of(annotation: Any, value: Any = None) -> dict[str, Any]:
    """Return field name -> annotation of a model. For a union, use the models that ``name`` in
    ``value`` selects."""
    found: dict[str, Any] = {}
    for model in models_of(annotation, value):
        found.update({field: hint for field, hint in _hints(model).items() if field not in found})
    return found


@lru_cache(maxsize=256)
def _hints(model: type[BaseModel]) -> Mapping[str, Any]:
    """Return field name -> annotation. Cached: evaluating annotations takes a millisecond or
    more."""
    hints = typing.get_type_hints(model, include_extras=True)
    return {field: hints[field] for field in model.model_fields}


def models_of(annotation: Any, value: Any = None) -> list[type[BaseModel]]:
    """Return the models in an annotation. For a union, return those that ``name`` in ``value``
    selects, or all if it selects none."""
    models = list(_models(annotation))
    name = value.get("name") if isinstance(value, dict) else None
    return [model for model in models if name is not None and name in _names(model)] or models


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation: inside Annotated and unions, not in the values of a
    dict."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) not in (dict, list, tuple, typing.Literal):
        for part in typing.get_args(annotation):
            yield from _models(part)


def _names(model: type[BaseModel]) -> Sequence[str]:
    field = model.model_fields.get("name")
    return typing.get_args(field.annotation) if field is not None else ()


def field_errors(
    model: type[BaseModel], raw: Any, error: ValidationError
) -> tuple[FieldError, ...]:
    """Return one entry for each fault, limited by ``few``. Pydantic reports each alternative of a
    union; these become one entry.

    The work per fault is small and constant, so a request with thousands of faults is answered
    quickly.
    """
    messages: dict[tuple[str | int, ...], list[str]] = {}
    faults = error.errors(include_url=False)
    num_seen = num_suggested = 0
    for fault in faults:
        loc, siblings = _locate(model, raw, fault)
        if loc not in messages and len(messages) == MAX_FAULTS:
            break
        num_seen += 1
        num_suggested += fault["type"] == "extra_forbidden"
        messages.setdefault(loc, []).append(
            _words(fault, loc, siblings, raw, suggest=num_suggested <= _MAX_SUGGESTIONS)
        )
    found = [FieldError(loc, "; or ".join(dict.fromkeys(words))) for loc, words in messages.items()]
    return few(found, len(faults) - num_seen)


def few(faults: Sequence[FieldError], num_more: int = 0) -> tuple[FieldError, ...]:
    """Return at most MAX_FAULTS faults, with names and messages cut to a readable length, plus one
    that counts the rest."""
    num_more += max(0, len(faults) - MAX_FAULTS)
    found = [
        FieldError(tuple(map(_short, fault.loc)), _cut(fault.msg)) for fault in faults[:MAX_FAULTS]
    ]
    if num_more:
        found.append(
            FieldError((), f"has {num_more} more faults that are not listed; fix these first")
        )
    return tuple(found)


def _short(part: str | int) -> str | int:
    return (
        f"{part[:_MAX_NAME_CHARS]}…"
        if isinstance(part, str) and len(part) > _MAX_NAME_CHARS
        else part
    )


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}…"


def _locate(
    model: type[BaseModel], raw: Any, fault: ErrorDetails
) -> tuple[tuple[str | int, ...], list[str]]:
    """Return the path of keys that the user wrote or should have written, and the fields at its
    end.

    The path leaves out the tags that pydantic adds at unions.
    """
    path: list[str | int] = []
    siblings: list[str] = []
    node, annotation = raw, typing.cast(Any, model)
    for part in fault["loc"]:
        if isinstance(node, list) and isinstance(part, int) and part < len(node):
            path.append(part)
            node, annotation = node[part], _item_of(annotation, list)
            continue
        fields = fields_of(annotation, node)
        written = isinstance(node, dict) and part in node
        if not written and part not in fields:
            continue
        path.append(part)
        siblings = list(fields)
        node = node[part] if isinstance(node, dict) and written else None
        annotation = fields.get(str(part)) if fields else _item_of(annotation, dict)
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found", "unknown_model"):
        path.append("name")
    return tuple(path), siblings


def _item_of(annotation: Any, container: type[list[Any] | dict[str, Any]]) -> Any:
    """Return the annotation of the items of a list, or of the values of a mapping; None if it is no
    such container."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return typing.get_args(annotation)[-1] if typing.get_origin(annotation) is container else None


def _words(
    fault: ErrorDetails, loc: tuple[str | int, ...], siblings: list[str], raw: Any, *, suggest: bool
) -> str:
    """Return the message for a fault, with a fix if pydantic's own message does not name one."""
    context = fault.get("ctx", {})
    match fault["type"]:
        case "string_type" if isinstance(fault["input"], bool | int | float):
            written = _as_written(fault["input"], loc, raw)
            what = "key" if fault["loc"][-1] == "[key]" else "value"
            return (
                f"must be text, but the {what} {written} is {_kind(fault['input'])}; quote it: "
                f'"{written}"'
            )
        case "string_type" if fault["input"] is None:
            return 'must be text, but is empty; write "" for empty text, or remove it'
        case "extra_forbidden":
            if not suggest:
                return "is not a field"
            near = _MEANT.get(str(loc[-1]))
            near = near if near in siblings else closest(str(loc[-1]), siblings)
            guess = f"did you mean {near!r}? " if near else ""
            return f"is not a field; {guess}the fields here are {', '.join(siblings)}"
        case "string_pattern_mismatch" if context["pattern"] in PATTERNS:
            return f"{str(fault['input'])[:100]!r} {PATTERNS[context['pattern']]}"
        case "missing" | "union_tag_not_found":
            return "is required"
        case "union_tag_invalid":
            return (
                f"{context.get('tag')!r} is not known; choose one of {context.get('expected_tags')}"
            )
        case "model_type" | "model_attributes_type":
            return "must be a mapping of fields to values"
        case _:
            return re.sub(r"^(Value error, |Input )", "", fault["msg"])


def _as_written(value: float, loc: tuple[str | int, ...], raw: Any) -> str:
    """Return a number or boolean as the user wrote it in the file, or as JSON if there is no
    file."""
    written: dict[tuple[str | int, ...], str] = getattr(raw, "written", {})
    return written.get(loc) or json.dumps(value)


def _kind(value: float) -> str:
    return "a boolean" if isinstance(value, bool) else "a number"
