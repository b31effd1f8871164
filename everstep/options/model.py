"""Options as fields of a model: where their values come from, and what is wrong with one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from everstep.errors import UsageError

PREFIX: Final = "EVERSTEP_"
FROM_NAME: Final = f"{PREFIX}…"
"""The variable of most options: the prefix and the field's name."""
FlagValue: TypeAlias = str | bool | list[str]
_MUST: Final = {
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be 1, true, yes or on, or else 0, false, no or off",
    "string_type": "must be text",
}
"""Kind of a fault -> our words, where pydantic's say less."""
DEFAULT_HOME: Final = "~/.everstep"


def home_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory that a service on this machine keeps its files in, ``EVERSTEP_HOME`` or
    ``~/.everstep``, as an absolute path."""
    named = environ.get("EVERSTEP_HOME", "").strip()
    return Path(named or DEFAULT_HOME).expanduser().absolute()


class SettingsError(UsageError):
    """An option has a wrong value. The message names the flag or variable and says what to do."""


@dataclass(frozen=True)
class Option:
    """How an operator sets a field; part of the field's annotation where the defaults do not do."""

    variable: str = FROM_NAME
    """Environment variable with the value; empty if the value is only read from a file."""
    flag: str = ""
    """Flag of ``everstep serve``; empty if only the environment sets the option."""
    metavar: str = ""
    """What the flag's value is, in capitals."""
    file: str = ""
    """Environment variable that names a file with the value."""
    verbatim: bool = False
    """Whether whitespace around the variable's value belongs to it."""
    default: str = ""
    """The default in words, where the value itself says too little."""
    secret: bool = False
    """Whether messages must not show the value; set for fields that ``repr`` does not show."""


def options_of(model: type[BaseModel]) -> dict[str, Option]:
    """Return field name -> Option, for the fields that an operator sets: all but excluded ones."""
    found = {}
    for name, field in model.model_fields.items():
        option = next((each for each in field.metadata if isinstance(each, Option)), Option())
        if option.variable == FROM_NAME:
            option = replace(option, variable=f"{PREFIX}{name.upper()}")
        if not field.exclude:
            found[name] = replace(option, secret=not field.repr)
    return found


def default_of(field: FieldInfo, option: Option) -> str:
    """Return an option's default in words."""
    if option.default:
        return option.default
    if field.annotation is bool:
        return "off"
    default = field.default
    return f"{default:g}" if isinstance(default, float) else str(default or "none")


class OptionsModel(BaseModel):
    """Base of a set of options: read from flags and environment, wrong values in words."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str],
        flags: Mapping[str, FlagValue] | None = None,
    ) -> Self:
        """Return the options that ``flags`` set, else the environment, else the defaults.

        Args:
            environ: A blank variable counts as not set.
            flags: Field name -> value of its flag, without those that were not given.

        Raises SettingsError for a wrong value, and for an empty flag.
        """
        values: dict[str, FlagValue] = {}
        sources: dict[str, str] = {}
        options = options_of(cls)
        for name, option in options.items():
            text = environ.get(option.variable, "")
            path = environ.get(option.file, "").strip()
            if flags and name in flags:
                values[name], sources[name] = _given(option.flag, flags[name]), option.flag
            elif text.strip():
                values[name] = text if option.verbatim else text.strip()
                sources[name] = option.variable
            elif path:
                values[name], sources[name] = _content_of(option.file, path), option.file
        return cls.model_validate(values, context=sources)

    @model_validator(mode="wrap")
    @classmethod
    def _raise_in_words(
        cls, values: Any, validate: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        try:
            return validate(values)
        except ValidationError as exc:
            faults = [
                cls._in_words(fault, info.context or {})
                for fault in exc.errors(include_url=False)
                if fault["type"] != "default_factory_not_called"
            ]
        # Not chained: pydantic's own error may show a secret.
        raise SettingsError("\n".join(faults))

    @classmethod
    def _in_words(cls, fault: ErrorDetails, sources: Mapping[str, str]) -> str:
        """Return what is wrong with an option: the flag or variable, the problem, the way out."""
        own = fault.get("ctx", {}).get("error")
        name = str(fault["loc"][0])
        option = options_of(cls).get(name)
        if option is None:
            return f"{name}: {fault['msg']}"
        source = sources.get(name) or f"{name} ({option.variable or option.file})"
        if own is not None:
            return f"{source} {own}"
        problem = _MUST.get(fault["type"], fault["msg"].replace("Input should", "must"))
        value = "" if option.secret else f", but is {fault['input']!r}"
        default = default_of(cls.model_fields[name], option)
        return f"{source} {problem}{value}; correct it, or leave it out (default: {default})"


def _given(flag: str, value: FlagValue) -> FlagValue:
    """Return a flag's value. Raises SettingsError if it, or an item of it, is empty."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, str) and not item.strip() for item in items):
        raise SettingsError(f"{flag} is empty; give a value, or leave the flag out")
    return value


def _content_of(variable: str, path: str) -> str:
    """Return the text in a file that a variable names. Raises SettingsError."""
    try:
        text = Path(path).expanduser().read_text().strip()
    except OSError as exc:
        raise SettingsError(
            f"{variable} {path} cannot be read: {exc.strerror}; name a file that this user can read"
        ) from exc
    except UnicodeDecodeError:
        # Not chained: the error holds the file's bytes.
        raise SettingsError(f"{variable} {path} is not text; write one line into it") from None
    if not text:
        raise SettingsError(f"{variable} {path} is empty; write one line into it, or unset it")
    return text
