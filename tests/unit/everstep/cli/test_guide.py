"""What `--help` shows: every command has a group and an example, and every example is right."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.cli.submit import EXAMPLES, FORMER, GROUPS, HINTS, SYNONYMS


def commands(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*before, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))


ROOT = Path(__file__).parents[4]
ALL = dict(commands(typer.main.get_command(app)))
LEAVES = {path: command for path, command in ALL.items() if not hasattr(command, "commands")}


def test_the_first_screen_has_nine_commands_first_and_every_other_in_a_group() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).stdout
    first = shown.partition("Begin here")[2].partition("╰")[0]
    names = " ".join(GROUPS.values()).split()
    assert [name for name in names if f"│ {name} " in first] == GROUPS["Begin here"].split()
    assert len(GROUPS["Begin here"].split()) == 9
    places = [shown.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places) and "─ Commands ─" not in shown
    assert {path[0] for path in ALL} == set(" ".join(GROUPS.values()).split())


def test_every_example_is_of_a_command() -> None:
    assert {" ".join(path) for path in ALL} >= set(EXAMPLES)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_the_help_ends_with_an_example_that_the_command_takes(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "bool" not in done.stdout
    last = done.stdout.strip().splitlines()[-1].strip()
    example = shlex.split(last.removeprefix("Example: everstep "))
    assert last.startswith("Example: ") and tuple(example[: len(path)]) == path
    LEAVES[path].make_context(" ".join(path), example[len(path) :])  # raises what is not taken


def test_a_former_name_and_what_people_type_lead_to_a_command_that_is_there() -> None:
    assert len(LEAVES) <= 45
    for typed, found in (FORMER | SYNONYMS).items():
        group: Any = typer.main.get_command(app)
        words = [*typed.split(), "--help"]
        while hasattr(group, "resolve_command"):
            _, group, words = group.resolve_command(click.Context(group), words)
        options = {option for each in group.params for option in each.opts}
        assert set(words) - {"--help"} <= options and (typed not in EXAMPLES or typed == "init")
        assert CliRunner().invoke(app, [*typed.split(), "--help"]).exit_code == 0, (typed, found)
    for typed, hint in HINTS.items():
        refused = CliRunner().invoke(app, [typed, "x"], env={"COLUMNS": "300"})
        assert refused.exit_code == 2 and hint in refused.stderr
        for words in re.findall(r"`everstep (\w+)", hint):
            assert (words,) in LEAVES


OTHERS = {"ray start", "torchrun", "tensorboard", "--shm-size"}
"""Programs of others, and an option of several, that our messages name."""


def texts_of(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings, each joined with its inserted parts."""
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                each.value if isinstance(each, ast.Constant) else "X" for each in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in described
        ):
            yield node.value


def test_every_option_that_a_message_names_exists() -> None:
    options = {
        name
        for command in (typer.main.get_command(app), *ALL.values())
        for option in command.params
        for name in (*option.opts, *option.secondary_opts, "--help")
    }
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for house in ("everstep", "service", "storage", "train_fn")
        for path in sorted((ROOT / house).rglob("*.py"))
        for text in texts_of(ast.parse(path.read_text()))
        for name in re.findall(r"(?<=[ `])--[a-z][a-z-]+", text)
        if " " in text and name not in options and not any(each in text for each in OTHERS)
    ]
    assert wrong == []
