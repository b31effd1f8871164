"""The documentation: who each page is for, commands that exist, and a reference without gaps.

`make docs` checks links, anchors and that docs/spec.md is what the models say.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from pydantic import BaseModel

import everstep
from everstep.cli.main import app
from everstep.spec.parsing import parse_spec
from everstep.spec.yaml_file import read_spec

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_whom_it_is_for_and_what_they_can_do_after_it(page: Path) -> None:
    title, _, rest = page.read_text().partition("\n\n")
    assert re.fullmatch(r"# .+", title)
    first = " ".join(rest.partition("\n\n")[0].split())
    assert re.match(r"For [^.]+\. After this page you (can|know) ", first), first


MIGRATED = ROOT / "examples" / "migrated"


@pytest.mark.parametrize("name", ["images", "small_gpt", "recommender"])
def test_a_page_of_a_migration_shows_the_difference_of_its_scripts(name: str) -> None:
    """All changed lines but those that are only indented."""
    before, after = (
        (MIGRATED / f"{each}.py").read_text().splitlines() for each in (f"{name}_before", name)
    )
    page = (DOCS / "migrate" / f"{name.replace('_', '-')}.md").read_text()
    shown = page.partition("```diff\n")[2].partition("```")[0].splitlines()
    matcher = difflib.SequenceMatcher(
        None, *([line.strip() for line in each] for each in (before, after)), autojunk=False
    )
    changed = [
        sign + line
        for tag, first, last, new_first, new_last in matcher.get_opcodes()
        if tag != "equal"
        for sign, lines in (("-", before[first:last]), ("+", after[new_first:new_last]))
        for line in lines
    ]
    assert [line for line in shown if line[:1] in ("-", "+")] == changed


def commands_in(text: str) -> Iterator[str]:
    """Commands of everstep: indented lines, and code within a line or a table."""
    for line in text.splitlines():
        if match := re.match(r"    (?:\.venv/bin/)?(everstep .+)", line):
            yield match[1].partition("  #")[0].rstrip()
    yield from re.findall(r"`(everstep [^`]+)`", text)


@pytest.mark.parametrize("page", ["ml-engineer", "operator", "index", "spec", "../README"])
def test_every_command_that_a_guide_names_can_be_typed(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    commands = list(commands_in((DOCS / f"{page}.md").read_text()))
    for line in commands:
        context: click.Context | None = None
        command: click.Command = typer.main.get_command(app)
        words = shlex.split(line.replace("SPEC", "examples/digits.yaml"))[1:]
        while hasattr(command, "resolve_command"):  # a group; typer's may not be click's
            name, found, words = command.resolve_command(click.Context(command), words)
            assert found is not None, f"{line}: no command {name}"
            command = found
        context = command.make_context(command.name, words)  # raises click.UsageError
        context.close()
    assert commands or page == "index"


def test_each_question_about_the_rooms_leads_to_a_file() -> None:
    text = (DOCS / "architecture.md").read_text()
    table = text.partition("| question | answer | file |\n")[2].partition("\n\n")[0]
    answers = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    assert len(answers) >= 9
    for question, _, files in answers:
        paths = re.findall(r"`([^`]+)`", files)
        assert paths and all((ROOT / path).exists() for path in paths), question


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text()
    shown = set(re.findall(r"^::: everstep\.(\w+)$|`everstep\.(\w+)`", text, re.MULTILINE))
    names = {name for pair in shown for name in pair}
    errors = {
        name
        for name in everstep.__all__
        if getattr(everstep, name).__class__ is type
        and getattr(everstep, name).__module__ == "everstep.errors"
    }
    assert "::: everstep.errors" in text and len(errors) > 5
    assert set(everstep.__all__) - names - errors == {"__version__"}
    assert names - {"", "errors"} <= set(everstep.__all__), "and none that is gone"


def test_every_field_that_can_be_set_has_a_row() -> None:
    def fields(value: object) -> set[str]:
        """Names of all fields in a validated spec, with those of its parts."""
        if isinstance(value, BaseModel):
            parts = [fields(getattr(value, name)) for name in type(value).model_fields]
            return set(type(value).model_fields).union(*parts)
        return set()

    text = (DOCS / "spec.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        spec = parse_spec(read_spec(str(path)))
        assert fields(spec) - documented == set(), path.name
