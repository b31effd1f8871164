"""Write docs/settings.md: every option of ``everstep serve``.

`python scripts/settings_reference.py` reads the declaration in everstep/options/serve.py and writes
the page. With `--check` it compares instead, and fails where the page is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from everstep.options.flags import is_list, is_switch
from everstep.options.model import default_of
from everstep.options.serve import OPTIONS, ServeOptions

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """\
# Every setting of the service

For operators. After this page you know each option of `everstep serve`: its variable, its flag, its
default and what it does. `scripts/settings_reference.py` writes this page from the declaration that
the service reads its settings with, so do not edit it.

A flag comes before its variable, and a variable before the file that another variable names. A
blank variable counts as not set; an empty flag is an error. A wrong value ends the start with exit
code 2 and a message that names the flag or variable. Variables with several values separate them by
commas, or hold a JSON list (`["/data/a,b", "/data/c"]`); their flags are repeated. `everstep serve`
hands its flags to the service process as variables, so that a password in `--database` does not
stay in the list of processes.

The variable of the port is not `EVERSTEP_PORT`: Kubernetes sets that one, to another value, in the
pods beside a Service named `everstep`.

[Operations](operations.md) explains what the settings are for, and lists the variables that the
nodes of a Ray cluster read.

"""


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def row(name: str) -> str:
    """Return the line of an option."""
    option, field = OPTIONS[name], ServeOptions.model_fields[name]
    variables = [code(option.variable), f"file: {code(option.file)}" if option.file else ""]
    value = "" if is_switch(name) else f" {option.metavar}"
    flag = code(f"{option.flag}{value}") if option.flag else ""
    if flag and is_list(name):
        flag += ", repeatable"
    meaning = " ".join((field.description or "").split()).replace("*", "\\*")
    cells = [", ".join(filter(None, variables)), flag, default_of(field, option), meaning]
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the page."""
    table = ["| variable | flag | default | meaning |", "|---|---|---|---|", *map(row, OPTIONS)]
    return HEAD + "\n".join(table) + "\n"


def main() -> None:
    written = page()
    if "--check" not in sys.argv:
        PAGE.write_text(written)
    elif not PAGE.exists() or PAGE.read_text() != written:
        raise SystemExit(
            "docs/settings.md is not what everstep/options/serve.py says; run `python "
            "scripts/settings_reference.py`"
        )


if __name__ == "__main__":
    main()
