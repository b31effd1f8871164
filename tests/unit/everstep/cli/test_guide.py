"""What `--help` shows: every command has a group and an example, and every example is right."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.cli.submit import EXAMPLES, GROUPS


def commands(group: Any, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        yield (*before, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))


ALL = dict(commands(typer.main.get_command(app)))
LEAVES = {path: command for path, command in ALL.items() if not hasattr(command, "commands")}


def test_the_first_screen_has_nine_commands_first_and_every_other_in_a_group() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).stdout
    first = shown.partition("Begin here")[2].partition("╰")[0]
    assert [name for name in EXAMPLES if f"│ {name} " in first] == GROUPS["Begin here"].split()
    assert len(GROUPS["Begin here"].split()) == 9
    places = [shown.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places) and "─ Commands ─" not in shown
    assert {path[0] for path in ALL} == set(" ".join(GROUPS.values()).split())


def test_every_command_has_an_example_and_no_other_thing_has() -> None:
    assert {" ".join(path) for path in ALL} == set(EXAMPLES)


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_the_help_ends_with_an_example_that_the_command_takes(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "bool" not in done.stdout
    last = done.stdout.strip().splitlines()[-1].strip()
    example = shlex.split(last.removeprefix("Example: everstep "))
    assert last.startswith("Example: ") and tuple(example[: len(path)]) == path
    LEAVES[path].make_context(" ".join(path), example[len(path) :])  # raises what is not taken
