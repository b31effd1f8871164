"""Write docs/settings.md, every option of ``everstep serve``, and the versions that pages name.

`python scripts/settings_reference.py` reads the declaration in everstep/options/serve.py, and
versions from pyproject.toml and constraints.txt, and writes the pages. With `--check` it compares
instead, and fails where a page is out of date.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from everstep.options.model import default_of
from everstep.options.serve import OPTIONS, ServeOptions, is_list, is_switch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
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


def released(requirement: str) -> tuple[str, str]:
    """Return the first and the last release of a range, for example 2.58 and 2.60."""
    first, last = re.findall(r"(\d+\.\d+)", requirement)
    major, minor = last.split(".")
    return first, f"{major}.{int(minor) - 1}"


def named_versions() -> dict[str, list[tuple[str, str]]]:
    """Return for each file the patterns of what it says about versions, and what it must say."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {"Python": released(project["requires-python"])}
    for requirement in project["optional-dependencies"]["server"]:
        if found := re.match(r"(torch|torchvision|ray)(\[\S+\])?>=", requirement):
            ranges[found[1]] = released(requirement)
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    first, last = ranges["Python"]
    python = (r"Python 3\.\d+ to 3\.\d+", f"Python {first} to {last}")
    tags = [f"cp{each.replace('.', '')}" for each in ranges["Python"]]
    locks = (r"cp3\d+\.txt` to `…-cp3\d+", f"{tags[0]}.txt` to `…-{tags[1]}")
    rows = [
        f"| {name} | {' to '.join(each)} | {pins.get(name, '')} |" for name, each in ranges.items()
    ]
    table = "\n".join(["| | it runs on | `constraints.txt` has |", "|---|---|---|", *rows])
    return {
        "README.md": [python],
        "CONTRIBUTING.md": [python],
        "docs/security.md": [python, locks],
        "docs/operator.md": [(r"\| \| it runs on(.+\n)+\|.*", table)],
        "deploy/kuberay/raycluster.yaml": [(r"rayVersion: \S+", f"rayVersion: {pins['ray']}")],
        "deploy/helm/everstep/values.yaml": [
            (r"(?<=  version: )2\.\d+\.\d+", pins["ray"]),
        ],
    }


def main() -> None:
    written = {PAGE: page()}
    for name, sayings in named_versions().items():
        text = (ROOT / name).read_text()
        for pattern, said in sayings:
            if not re.search(pattern, text):
                raise SystemExit(f"{name} names no versions as {pattern!r}; write them again")
            text = re.sub(pattern, lambda _, said=said: said, text)
        written[ROOT / name] = text
    for path, text in written.items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            raise SystemExit(
                f"{path.relative_to(ROOT)} is not what everstep/options/serve.py, pyproject.toml "
                "and constraints.txt say; run `python scripts/settings_reference.py`"
            )


if __name__ == "__main__":
    main()
