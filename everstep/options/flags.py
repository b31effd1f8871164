"""The options of ``everstep serve`` as flags of a command line."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping

from everstep.options.model import FlagValue, default_of
from everstep.options.serve import FLAGS, ServeOptions


def is_switch(name: str) -> bool:
    """Return whether an option's flag takes no value."""
    return ServeOptions.model_fields[name].annotation is bool


def is_list(name: str) -> bool:
    """Return whether an option's flag may be repeated."""
    return typing.get_origin(ServeOptions.model_fields[name].annotation) is tuple


def help_of(name: str) -> str:
    """Return the help text of an option's flag."""
    option, field = FLAGS[name], ServeOptions.model_fields[name]
    text = " ".join((field.description or "").split())
    notes = [] if is_switch(name) else [f"default: {default_of(field, option)}"]
    notes += ["repeatable"] if is_list(name) else []
    return f"{text} ({'; '.join([*notes, f'or {option.variable}'])})"


def as_variables(flags: Mapping[str, FlagValue]) -> dict[str, str]:
    """Return the variables that say the same as ``flags``.

    A list becomes JSON, since an item may contain a comma.
    """
    return {
        FLAGS[name].variable: (
            json.dumps(value)
            if isinstance(value, list)
            else str(int(value))
            if isinstance(value, bool)
            else value
        )
        for name, value in flags.items()
    }
