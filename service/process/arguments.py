"""The settings of a service process from its arguments and its environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from everstep.options.flags import help_of, is_list, is_switch
from everstep.options.model import FlagValue
from everstep.options.serve import FLAGS
from service.settings import Settings


def settings_of(argv: Sequence[str] | None) -> Settings:
    """Return the settings. Raises SettingsError; argparse exits with code 2."""
    return Settings.of_process(os.environ, flags_of(argv))


def flags_of(argv: Sequence[str] | None) -> dict[str, FlagValue]:
    """Return field name -> value of each flag that was given, still unchecked."""
    parser = argparse.ArgumentParser(
        prog="everstep serve",
        description="Run the Everstep service, by default with a Ray cluster of its own on this "
        "machine. It keeps its database, storage and tokens in EVERSTEP_HOME (default "
        "~/.everstep).",
        argument_default=argparse.SUPPRESS,
    )
    for name, option in FLAGS.items():
        text = help_of(name).replace("%", "%%")
        if is_switch(name):
            parser.add_argument(option.flag, dest=name, action="store_true", help=text)
        else:
            action = "append" if is_list(name) else "store"
            parser.add_argument(
                option.flag, dest=name, action=action, metavar=option.metavar, help=text
            )
    return vars(parser.parse_args(argv))
