"""``--set train.epochs=3``: any field of a spec, named by its path."""

from __future__ import annotations

import copy
import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from everstep.errors import FieldError, InvalidSpec, UsageError
from everstep.spec.field_errors import fields_of, models_of
from everstep.spec.run_spec import RunSpec
from everstep.spec.yaml_file import parse_yaml


def apply_overrides(raw: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of the spec ``raw`` with every ``path=value`` put in, in order; the values are YAML.

    Whether a value fits its field is for ``parse_spec`` to say. Raises UsageError for what is no
    ``path=value``, and InvalidSpec that names the path where there is no such field.

    >>> apply_overrides({"name": "a"}, ["train.epochs=3", "tags.team=vision"])
    {'name': 'a', 'train': {'epochs': 3}, 'tags': {'team': 'vision'}}
    """
    spec = copy.deepcopy(raw)
    for setting in settings:
        path, separator, text = setting.partition("=")
        parts = path.strip().split(".")
        if not separator or not all(parts):
            raise UsageError(
                f"--set {setting!r} is not FIELD=VALUE, for example --set train.epochs=3"
            )
        _put(spec, parts, text)
    return spec


def _put(spec: dict[str, Any], parts: list[str], text: str) -> None:
    node, annotation, default = spec, typing.cast(Any, RunSpec), typing.cast(Any, None)
    for position, part in enumerate(parts):
        fields = fields_of(annotation, node)
        if fields and part not in fields:
            raise _unknown(parts, position, spec)
        if fields:
            default = _default(annotation, node, part)
            annotation = fields[part]
        else:
            default, annotation = None, _value_annotation(annotation)
            if annotation is None or typing.get_origin(annotation) is dict:
                raise _unknown(parts, position, spec)
            # a key of a free mapping may hold dots: env and tags do, and nothing lies deeper
            if part != parts[-1]:
                part = ".".join(parts[position:])
                parts = [*parts[:position], part]
        if position == len(parts) - 1:
            node[part] = _value(annotation, text, parts)
            return
        inner = node.get(part)
        if not isinstance(inner, dict):
            # What the spec leaves to its default is named, so that one field of it can be set
            # alone.
            name = getattr(default, "name", None)
            node[part] = inner = {"name": name} if isinstance(name, str) else {}
        node = inner


def _default(annotation: Any, node: dict[str, Any], part: str) -> Any:
    for model in models_of(annotation, node):
        if part in model.model_fields:
            return model.model_fields[part].get_default(call_default_factory=True)
    return None


def _value_annotation(annotation: Any) -> Any:
    """Annotation of a free mapping's values; None where ``annotation`` is no such mapping."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return typing.get_args(annotation)[1] if typing.get_origin(annotation) is dict else None


def _value(annotation: Any, text: str, parts: list[str]) -> Any:
    """YAML, but where the field takes text and nothing else the text as it stands:
    ``env.OMP_NUM_THREADS=1``."""
    bare = annotation
    while typing.get_origin(bare) is typing.Annotated:
        bare = typing.get_args(bare)[0]
    if bare is str:
        return text
    return parse_yaml(text, f"--set {'.'.join(parts)}={text}")


def _unknown(parts: list[str], position: int, spec: dict[str, Any]) -> InvalidSpec:
    path, inside = ".".join(parts), ".".join(parts[:position])
    every = list(_paths(RunSpec, spec, ()))
    siblings = [known for known in every if known.rpartition(".")[0] == inside]
    ends = {known.rpartition(".")[2]: known for known in siblings}
    near = difflib.get_close_matches(parts[position], ends, n=1)
    same_end = [known for known in every if known.rpartition(".")[2] == parts[-1]]
    if near:
        hint = f"did you mean {ends[near[0]]}?"
    elif same_end:
        hint = f"did you mean {' or '.join(same_end[:3])}?"
    elif siblings:
        hint = f"its fields are {', '.join(ends)}"
    else:
        hint = "nothing lies below it"
    where = f"{inside or 'the spec'} has no field {parts[position]!r}; {hint}"
    return InvalidSpec((FieldError(tuple(parts), where),), f"--set {path}: {where}")


def _paths(annotation: Any, node: Any, prefix: tuple[str, ...]) -> Iterator[str]:
    """Every path of the spec, in the alternatives that it chose."""
    for field, inner in fields_of(annotation, node).items():
        path = (*prefix, field)
        yield ".".join(path)
        value = node.get(field) if isinstance(node, dict) else None
        yield from _paths(inner, value, path)
