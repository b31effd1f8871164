"""Read and change single fields of a spec in YAML text, whose comments and layout stay."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import yaml

from everstep.errors import UsageError
from everstep.spec.yaml_file import SpecLoader, is_nested_deeply, parse_yaml

Path = Sequence[str | int]


class _Dumper(yaml.SafeDumper):
    """Write what SpecLoader reads back as it was: text that would be a number is quoted."""

    yaml_implicit_resolvers = SpecLoader.yaml_implicit_resolvers


def to_yaml(value: Any) -> str:
    """Return a JSON value as YAML, mappings in their order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def _scalar(value: Any) -> str:
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10_000
    )
    return text.removesuffix("\n").removesuffix("\n...")


def value_at(value: Any, path: Path) -> Any:
    """Return what is at a path of a JSON value; None if nothing is."""
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value):
            value = value[part]
        else:
            return None
    return value


def lines_of(text: str, paths: Iterable[Path]) -> list[int]:
    """Return for each path the line, from 1, of its field, or of the section that it would be
    in."""
    whole = None if is_nested_deeply(text) else _composed(text)
    return [_line_of(whole, path) for path in paths]


def _line_of(node: yaml.Node | None, path: Path) -> int:
    line = 0
    for part in path if node is not None else ():
        found = _child(node, part)
        if found is None:
            break
        key, node = found
        line = key.start_mark.line
    return line + 1


def has_aliases(text: str) -> bool:
    """Return whether the YAML has anchors or aliases, with which a short text can be a huge
    value."""
    if ("&" not in text and "*" not in text) or is_nested_deeply(text):
        return False
    try:
        return any(
            isinstance(token, yaml.AnchorToken | yaml.AliasToken) for token in yaml.scan(text)
        )
    except yaml.YAMLError:
        return False  # it has no value


def _composed(text: str) -> yaml.Node | None:
    loader = SpecLoader(text)
    try:
        return loader.get_single_node()
    except (yaml.YAMLError, RecursionError):
        return None
    finally:
        loader.dispose()


def _child(node: yaml.Node | None, part: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the key and the value of an entry; for an item of a list, the item twice."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return key, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None


def with_value(text: str, path: Sequence[str], value: Any) -> str:
    """Return the text with another value in a field; None removes it.

    A scalar that is there is replaced, a new field comes to the beginning of its section, a new
    section to the end, and a field on a line of its own goes with it. For any other change the text
    is written anew, without its comments. Raise UsageError if it is not a mapping in YAML.
    """
    before = parse_yaml(text, "the spec")
    if before is not None and not isinstance(before, dict):
        raise UsageError("the spec is not a mapping; write fields such as `name: digits`")
    wanted = _set(before or {}, path, value)
    edited = _edited(text, path, value) if before else None
    if edited is not None:
        with suppress(UsageError):
            if parse_yaml(edited, "the spec") == wanted:
                return edited
    return to_yaml(wanted)


def _edited(text: str, path: Sequence[str], value: Any) -> str | None:
    """Return the text with a field changed, added or removed where it is; None if it has no such
    place."""
    node, key = _composed(text), None
    for depth, part in enumerate(path):
        found = _child(node, part)
        if found is None:
            return text if value is None else _inserted(text, node, path, depth, value)
        key, node = found
    if value is None:
        assert key is not None and node is not None
        begin = key.start_mark.index - key.start_mark.column
        line, _, rest = text[begin:].partition("\n")
        is_alone = line.lstrip().startswith(path[-1]) and node.end_mark.line == key.start_mark.line
        return text[:begin] + rest if is_alone else None
    if not isinstance(node, yaml.ScalarNode):
        return None
    start, end = node.start_mark.index, node.end_mark.index
    gap = " " if start == end and text[start - 1 : start] == ":" else ""
    return f"{text[:start]}{gap}{_scalar(value)}{text[end:]}"


def _inserted(
    text: str, node: yaml.Node | None, path: Sequence[str], depth: int, value: Any
) -> str | None:
    """Return the text with a new field, whose path exists up to this node; None if the node is no
    mapping."""
    entry = _set({}, path[depth:], value)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return None
    if node.flow_style:
        start = node.start_mark.index + 1
        return f"{text[:start]}{_scalar(entry)[1:-1]}, {text[start:]}"
    if depth == 0:
        return f"{text.rstrip()}\n{to_yaml(entry)}"
    first = node.value[0][0].start_mark
    start = first.index - first.column
    return text[:start] + textwrap.indent(to_yaml(entry), " " * first.column) + text[start:]


def _set(value: dict[str, Any], path: Sequence[str], wanted: Any) -> dict[str, Any]:
    """Return a copy of a mapping with another value at a path."""
    first, *rest = path
    copy = dict(value)
    if rest:
        inner = copy.get(first)
        copy[first] = _set(inner if isinstance(inner, dict) else {}, rest, wanted)
    elif wanted is None:
        copy.pop(first, None)
    else:
        copy[first] = wanted
    return copy
