"""Read a spec from a YAML or JSON file; errors name the line."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from everstep.errors import UsageError
from everstep.spec.plain_text import MAX_DEPTH

MAX_SPEC_BYTES = 4 << 20


class SpecLoader(yaml.SafeLoader):
    """Load YAML safely, with the scalars of YAML 1.2 and JSON, and without duplicate keys.

    In YAML 1.1 ``on``, ``yes`` and ``no`` are booleans, ``010`` is 8, ``12:30`` is 750, 1e-3 is
    text, and a date is not text.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 - as its base has it

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a key that is written twice. What ``<<`` adds later may be overridden."""
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    problem = f"the key {key.value!r} occurs twice; remove one"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return node


_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?\d+(_\d+)*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.\d+|\d+(_\d+)*(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": (r"<<", "<"),
}
for _name, (_pattern, _first) in _SCALARS.items():
    SpecLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})$"), list(_first)
    )


def _construct_int(loader: SpecLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


SpecLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _refuse(loader: SpecLoader, node: yaml.Node) -> None:
    problem = (
        f"a spec has no values of the type {node.tag}; write text, a number, true, false, null, a "
        "list or a mapping"
    )
    raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


for _name in ("binary", "timestamp", "omap", "pairs", "set"):
    SpecLoader.add_constructor(f"tag:yaml.org,2002:{_name}", _refuse)


class WrittenSpec(dict[str, Any]):
    """A spec from a file. ``written`` holds the original text of numbers and booleans in its
    sections: 1.10 is not 1.1."""

    written: Mapping[tuple[str, ...], str] = MappingProxyType({})


def _construct_mapping(loader: SpecLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


SpecLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def is_nested_deeply(text: str) -> bool:
    """Return whether more brackets are open at once than a spec may be deep. PyYAML's time grows
    with the square of that depth."""
    depth = 0
    for bracket in re.finditer(r"[][{}]", text):
        if bracket[0] in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                return True
        else:
            depth = max(0, depth - 1)
    return False


def parse_yaml(text: str, source: str) -> Any:
    """Return the value in YAML text. Raise UsageError with the line."""
    if is_nested_deeply(text):
        raise UsageError(
            f"{source} is nested too deeply: more than {MAX_DEPTH} brackets are open at once; "
            "close them, also those in comments"
        )
    try:
        loader = SpecLoader(text)
        try:
            node = loader.get_single_node()
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        if node is None or not isinstance(value, dict):
            return value
        spec = WrittenSpec(value)
        spec.written = dict(_written(node))
        return spec
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        tab = "; indent with spaces, not tabs" if "'\\t'" in str(exc.problem) else ""
        raise UsageError(
            f"{where}: {exc.problem or exc.context}{tab}{_excerpt(text, mark.line) if mark else ''}"
        ) from exc
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        raise UsageError(f"{source}, line {line}: {exc.reason}") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise UsageError(f"{source}: {exc}") from exc


def _written(node: yaml.Node) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield path and text of every scalar two levels deep that YAML does not parse as text."""
    for key, inner in node.value if isinstance(node, yaml.MappingNode) else ():
        for name, value in inner.value if isinstance(inner, yaml.MappingNode) else ():
            if isinstance(value, yaml.ScalarNode) and value.tag != "tag:yaml.org,2002:str":
                yield (str(key.value), str(name.value)), value.value


def read_spec(path: str) -> dict[str, Any]:
    """Return the spec in a file as plain data; ``-`` reads standard input. Raise UsageError."""
    source = "standard input" if path == "-" else path
    value = parse_yaml(_text(path, source), source)
    if value is None:
        raise UsageError(f"{source} is empty; it should hold a spec (see examples/digits.yaml)")
    if not isinstance(value, dict):
        raise UsageError(
            f"{source} contains a {type(value).__name__}; write a mapping of fields to values, "
            "such as `name: digits`"
        )
    return value


def _text(path: str, source: str) -> str:
    try:
        data = (
            sys.stdin.buffer.read(MAX_SPEC_BYTES + 1)
            if path == "-"
            else _read(Path(path).expanduser())
        )
        if len(data) > MAX_SPEC_BYTES:
            raise UsageError(
                f"{source} is larger than {MAX_SPEC_BYTES >> 20} MiB, the limit for a spec"
            )
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise UsageError(f"{source} is not UTF-8 text (byte {exc.start})") from exc
    except FileNotFoundError as exc:
        wanted = Path(path).expanduser()
        near = difflib.get_close_matches(
            wanted.name, [entry.name for entry in wanted.parent.glob("*.*")], n=1
        )
        raise UsageError(
            f"{source} does not "
            f"exist{f'; did you mean {wanted.with_name(near[0])}?' if near else ''}"
        ) from exc
    except OSError as exc:
        raise UsageError(f"{source} cannot be read: {exc.strerror or exc}") from exc


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_SPEC_BYTES + 1)


def _excerpt(text: str, line: int) -> str:
    lines = text.splitlines()
    return f"\n  {line + 1} | {lines[line].rstrip()}" if line < len(lines) else ""
