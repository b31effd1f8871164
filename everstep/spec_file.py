"""A spec from a YAML (or JSON) file: what is wrong with it is said with its line."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from everstep.errors import UsageError

MAX_SPEC_BYTES = 4 << 20


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number, as in JSON, and a key may stand once."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+|\d+\.\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _mapping_without_doubles(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = set[str]()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    return _mapping_without_doubles(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def parse_yaml(text: str, source: str) -> Any:
    """The value that ``text`` says. Raises UsageError with the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        tab = "; indent with spaces, not tabs" if "'\\t'" in str(exc.problem) else ""
        raise UsageError(f"{where}: {exc.problem or exc.context}{tab}{_excerpt(text, mark.line) if mark else ''}") from exc
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        raise UsageError(f"{source}, line {line}: {exc.reason}") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise UsageError(f"{source}: {exc}") from exc


def read_spec(path: str) -> dict[str, Any]:
    """The spec in a file, as plain data; ``-`` reads standard input. Raises UsageError."""
    source = "standard input" if path == "-" else path
    value = parse_yaml(_text(path, source), source)
    if value is None:
        raise UsageError(f"{source} is empty; it should hold a spec (see examples/digits.yaml)")
    if not isinstance(value, dict):
        raise UsageError(
            f"{source} holds a {type(value).__name__}; a spec is a mapping of fields to values, such as `name: digits`"
        )
    return value


def _text(path: str, source: str) -> str:
    try:
        data = sys.stdin.buffer.read(MAX_SPEC_BYTES + 1) if path == "-" else _read(Path(path).expanduser())
        if len(data) > MAX_SPEC_BYTES:
            raise UsageError(f"{source} is larger than {MAX_SPEC_BYTES >> 20} MiB; that is no spec")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise UsageError(f"{source} is not UTF-8 text (byte {exc.start})") from exc
    except FileNotFoundError as exc:
        wanted = Path(path).expanduser()
        near = difflib.get_close_matches(wanted.name, [entry.name for entry in wanted.parent.glob("*.*")], n=1)
        raise UsageError(f"{source} does not exist{f'; did you mean {wanted.with_name(near[0])}?' if near else ''}") from exc
    except OSError as exc:
        raise UsageError(f"{source} cannot be read: {exc.strerror or exc}") from exc


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_SPEC_BYTES + 1)


def _excerpt(text: str, line: int) -> str:
    lines = text.splitlines()
    return f"\n  {line + 1} | {lines[line].rstrip()}" if line < len(lines) else ""
