"""Read and change single fields of a spec in YAML text: its comments and layout stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    Where that cannot be done within the text, it is written anew, without its comments. Raise
    UsageError if the text is not a mapping in YAML.
    """
    before = parse_yaml(text, "the spec")
    if before is not None and not isinstance(before, dict):
        raise UsageError("the spec is not a mapping; write fields such as `name: digits`")
    wanted = _set(before or {}, path, value)
    node = _composed(text)
    edited = None
    if isinstance(node, yaml.MappingNode):
        edited = _removed(text, node, path) if value is None else _edited(text, node, path, value)
    if edited is not None:
        try:
            if parse_yaml(edited, "the spec") == wanted:
                return edited
        except UsageError:
            pass
    return to_yaml(wanted)


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


def _edited(text: str, node: yaml.MappingNode, path: Sequence[str], value: Any) -> str | None:
    """Return the text with a changed or a new field; None if it has no place for it."""
    found = _child(node, path[0])
    if found is None:
        return _inserted(text, node, path, value)
    _, inner = found
    if len(path) > 1 and isinstance(inner, yaml.MappingNode):
        return _edited(text, inner, path[1:], value)
    is_block = isinstance(inner, yaml.CollectionNode) and not inner.flow_style
    if len(path) > 1 or is_block:
        return None
    start, end = inner.start_mark.index, inner.end_mark.index
    gap = " " if start == end and text[start - 1 : start] == ":" else ""
    return f"{text[:start]}{gap}{_scalar(value)}{text[end:]}"


def _inserted(text: str, node: yaml.MappingNode, path: Sequence[str], value: Any) -> str | None:
    if node.flow_style or not node.value:
        entry = _scalar(value)
        for name in reversed(path):
            entry = f"{name}: {entry}" if name == path[0] else f"{{{name}: {entry}}}"
        start = node.start_mark.index + 1
        return f"{text[:start]}{entry}{', ' if node.value else ''}{text[start:]}"
    indent = " " * node.value[0][0].start_mark.column
    lines = text.splitlines()
    place = _last_line(node) + 1
    fresh = [f"{indent}{'  ' * depth}{name}:" for depth, name in enumerate(path)]
    fresh[-1] += f" {_scalar(value)}"
    return "\n".join([*lines[:place], *fresh, *lines[place:]]) + "\n"


def _last_line(node: yaml.Node) -> int:
    """Return the last line, from 0, of a node without the comments behind it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    line: int = node.end_mark.line
    is_block = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
    return line - 1 if is_block else line


def _removed(text: str, node: yaml.MappingNode, path: Sequence[str]) -> str | None:
    """Return the text without the line of a field; None if it is not a line of its own."""
    parent: yaml.Node = node
    for part in path[:-1]:
        found = _child(parent, part)
        if found is None:
            return text
        parent = found[1]
    found = _child(parent, path[-1])
    if found is None or not isinstance(parent, yaml.MappingNode):
        return text
    key, inner = found
    line = key.start_mark.line
    if parent.flow_style or inner.end_mark.line != line or len(parent.value) < 2:
        return None
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:line], *lines[line + 1 :]])
