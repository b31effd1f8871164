"""``--grid`` and ``--random``: the fields that a sweep varies, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from everstep.errors import UsageError
from everstep.spec.yaml_file import parse_yaml

_RANGES = ("uniform", "log", "int")
_EXAMPLES = "log:1e-4..1e-1, uniform:0..0.5, int:1..8 or choice:adamw,sgd"


def grid_of(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Return field -> values from ``FIELD=VALUE,VALUE``. Values are YAML.

    >>> grid_of(["optimizer.lr=1e-3,3e-3", "train.compile=true"])
    {'optimizer.lr': [0.001, 0.003], 'train.compile': [True]}
    """
    found: dict[str, list[Any]] = {}
    for setting in settings:
        path, text = _parts(setting, "--grid", "optimizer.lr=1e-3,3e-3", found)
        found[path] = _values(text, f"--grid {setting}")
    return found


def random_of(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return field -> distribution from ``FIELD=NAME:LOW..HIGH`` or ``FIELD=choice:VALUE,VALUE``.

    >>> random_of(["optimizer.lr=log:1e-4..1e-1"])
    {'optimizer.lr': {'name': 'log', 'low': 0.0001, 'high': 0.1}}
    """
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        path, text = _parts(setting, "--random", "optimizer.lr=log:1e-4..1e-1", found)
        name, _, rest = text.partition(":")
        low, dots, high = rest.partition("..")
        if name == "choice" and rest:
            found[path] = {"name": name, "values": _values(rest, f"--random {setting}")}
        elif name in _RANGES and dots and low.strip() and high.strip():
            ends = [parse_yaml(each, f"--random {setting}") for each in (low, high)]
            found[path] = {"name": name, "low": ends[0], "high": ends[1]}
        else:
            raise UsageError(
                f"--random {setting!r} has no distribution after the =; use for example {_EXAMPLES}"
            )
    return found


def _parts(setting: str, option: str, example: str, found: dict[str, Any]) -> tuple[str, str]:
    path, separator, text = setting.partition("=")
    path = path.strip()
    if not separator or not path or not text.strip():
        raise UsageError(
            f"{option} {setting!r} is not FIELD=VALUES, for example {option} {example}"
        )
    if path in found:
        raise UsageError(f"{option} names {path} twice; give all its values at once")
    return path, text


def _values(text: str, source: str) -> list[Any]:
    values = parse_yaml(f"[{text}]", source)
    if not isinstance(values, list):
        raise UsageError(f"{source} is not a list of values; separate them by commas")
    return values
