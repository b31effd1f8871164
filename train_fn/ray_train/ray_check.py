"""Compare the installed Ray with the names that Everstep expects of it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from everstep.supported import RAY


def check_ray(
    version: str,
    expected: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]],
    attributes: Mapping[type, tuple[str, ...]],
) -> None:
    """Raise ImportError if the installed Ray differs, and name every difference.

    Args:
        version: of the installed Ray.
        expected: functions with the names of their parameters, by qualified name.
        attributes: names of attributes, by class.
    """
    if problem := RAY.problem(version, f"this node ({sys.prefix})"):
        raise ImportError(problem)
    differences = []
    for name, (function, parameters) in expected.items():
        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            differences.append(f"{name} takes ({', '.join(found)}), not ({', '.join(parameters)})")
    for owner, names in attributes.items():
        lost = sorted(set(names) - names_of(owner))
        differences += [f"{owner.__name__} has no {name}" for name in lost]
    if differences:
        raise ImportError(
            f"Everstep uses private names of {RAY}, and this ray {version} differs: "
            + "; ".join(differences)
            + ". Install a release of Ray as the package index has it."
        )


def names_of(owner: type) -> set[str]:
    """Return the attributes that a class has, that its annotations declare, or that its methods
    use."""
    names: set[str] = set()
    for base in owner.__mro__:
        names |= set(vars(base)) | set(inspect.get_annotations(base))
        for member in vars(base).values():
            function = getattr(member, "__func__", getattr(member, "fget", member))
            names |= set(getattr(getattr(function, "__code__", None), "co_names", ()))
    return names
