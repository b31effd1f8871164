"""``--set train.epochs=3``: set any field of a spec by its path."""

from __future__ import annotations

import copy
import difflib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from everstep.errors import FieldError, InvalidSpec, UsageError
from everstep.spec.parsing import fields_of, models_of
from everstep.spec.run_spec import RunSpec
from everstep.spec.yaml_file import parse_yaml


def apply_overrides(raw: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the spec ``raw`` with every ``path=value`` applied in order. Values are
    YAML.

    ``parse_spec`` checks later whether a value fits its field. Raise UsageError for text that is
    not ``path=value``, and InvalidSpec with the path for an unknown field.

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
        _put(spec, parts, partial(_parsed, text))
    return spec


def set_fields(raw: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the spec ``raw`` with the field at each path set. Raise InvalidSpec with the
    path for an unknown field.

    >>> set_fields({"name": "a", "train": {"epochs": 3}}, {"train.seed": 7})
    {'name': 'a', 'train': {'epochs': 3, 'seed': 7}}
    """
    spec = copy.deepcopy(raw)
    for path, value in values.items():
        _put(spec, path.split("."), partial(_copied, value))
    return spec


def _copied(value: Any, _annotation: Any, _parts: list[str]) -> Any:
    return copy.deepcopy(value)


def _put(spec: dict[str, Any], parts: list[str], value_of: Callable[[Any, list[str]], Any]) -> None:
    """Set the field at a path to ``value_of(its annotation, its path)``."""
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
            # a key of a free mapping (env, tags) may contain dots, and nothing is nested in it
            if part != parts[-1]:
                part = ".".join(parts[position:])
                parts = [*parts[:position], part]
        if position == len(parts) - 1:
            node[part] = value_of(annotation, parts)
            return
        inner = node.get(part)
        if not isinstance(inner, dict):
            # Name the default that the spec left out, so that one of its fields can be set alone.
            name = getattr(default, "name", None)
            node[part] = inner = {"name": name} if isinstance(name, str) else {}
        node = inner


def _default(annotation: Any, node: dict[str, Any], part: str) -> Any:
    for model in models_of(annotation, node):
        if part in model.model_fields:
            return model.model_fields[part].get_default(call_default_factory=True)
    return None


def _value_annotation(annotation: Any) -> Any:
    """Return the annotation of a free mapping's values; None for other annotations."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return typing.get_args(annotation)[1] if typing.get_origin(annotation) is dict else None


def _parsed(text: str, annotation: Any, parts: list[str]) -> Any:
    """Parse the value as YAML. A field that takes only text gets it unchanged, as in
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
        hint = "it has no fields"
    where = f"{inside or 'the spec'} has no field {parts[position]!r}; {hint}"
    return InvalidSpec((FieldError(tuple(parts), where),), f"--set {path}: {where}")


def _paths(annotation: Any, node: Any, prefix: tuple[str, ...]) -> Iterator[str]:
    """Yield every path of the spec, following the alternatives that it selects."""
    for field, inner in fields_of(annotation, node).items():
        path = (*prefix, field)
        yield ".".join(path)
        value = node.get(field) if isinstance(node, dict) else None
        yield from _paths(inner, value, path)
