"""`everstep serve` becomes the service, with the options and variables that it was given."""

from __future__ import annotations

import os
import re
import sys

import pytest

from everstep.cli import service as cli_service
from everstep.options.serve import FLAGS, OPTIONS, VARIABLES, ServeOptions
from everstep.supported import install_command
from tests.support.command_line import run_cli


def test_serve_without_the_server_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_service, "SERVER_MODULES", ("no_such_package", "json"))
    for command in ("serve", "demo"):
        result = run_cli(command)
        assert (
            result.exit_code == 2
            and install_command("server") in result.stderr
            and "no_such_package" in result.stderr
        )


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Arguments and environment of each process that a command became."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _path, *given: found.append(given))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


GIVEN_FLAGS = {
    "--host": "0.0.0.0",
    "--port": "9000",
    "--nodes": "4",
    "--cpus-per-node": "2",
    "--node-return-s": "5",
    "--cluster-env": "HF_*",
    "--ray-address": "http://head:8265",
    "--database": "postgresql+psycopg://everstep:hidden@db/everstep",
    "--storage": "s3://b/p",
    "--storage-root": "/data/a,b",
    "--adopt-storage": "an-id",
}


def test_serve_becomes_the_service_with_the_same_options(
    became: list[tuple[list[str], dict[str, str]]],
) -> None:
    flags = [text for pair in GIVEN_FLAGS.items() for text in pair]
    result = run_cli("serve", *flags, "--drills", "--cluster-env", "A", "--json")
    assert result.exit_code == 0, result.output
    [(arguments, environ)] = became
    # Nothing of what was given stays in the list of processes.
    assert arguments == [sys.executable, "-P", "-m", "service.process.serve"]
    read = ServeOptions.read(environ)
    assert (read.host, read.port, read.nodes, read.cpus_per_node) == ("0.0.0.0", 9000, 4, 2)
    assert read.node_return_s == 5
    assert read.cluster_env == ("HF_*", "A") and read.storage_roots == ("/data/a,b",)
    assert (read.ray_address, read.storage_uri) == ("http://head:8265", "s3://b/p")
    assert read.database_url == GIVEN_FLAGS["--database"]
    assert read.adopt_storage == "an-id"
    assert read.drills and read.log_format == "json"


def test_serve_without_flags_changes_no_variable(
    became: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_DRILLS", "1")
    assert run_cli("serve").exit_code == 0
    assert became[0][1] == dict(os.environ)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "many"], "--nodes must be a whole number, but is 'many'"),
        (["--port", "-1"], "--port must be greater than or equal to 0"),
        (["--ray-address", ""], "--ray-address is empty"),
        (["--database", ""], "--database is empty"),
        (["--storage-root", "/a", "--storage-root", " "], "--storage-root is empty"),
        (["--ray-address", "ray://head:10001"], "--ray-address 'ray://head:10001' is not a"),
        (["--cluster-env", "A=b"], "--cluster-env 'A=b' is not the name of a variable"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_starts(
    flags: list[str], message: str, became: list[tuple[list[str], dict[str, str]]]
) -> None:
    result = run_cli("serve", *flags)
    assert result.exit_code == 2 and message in result.stderr and not became


def test_a_wrong_variable_is_named_and_a_flag_replaces_it(
    became: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_NODES", "many")
    result = run_cli("serve")
    assert result.exit_code == 2 and "EVERSTEP_NODES must be a whole number" in result.stderr
    assert run_cli("serve", "--nodes", "3").exit_code == 0
    assert ServeOptions.read(became[0][1]).nodes == 3


def test_serve_offers_every_option_of_the_service(
    became: list[tuple[list[str], dict[str, str]]],
) -> None:
    known = {option.flag for option in FLAGS.values()}
    assert known == {*GIVEN_FLAGS, "--drills"}
    shown = run_cli("serve", "--help").stdout
    assert all(f"{flag} " in shown for flag in known)
    assert len(re.findall(r"^[│ ]*--[a-z-]+", shown, re.MULTILINE)) <= 25


def test_a_setting_that_is_given_as_an_option_names_its_variable(
    became: list[tuple[list[str], dict[str, str]]],
) -> None:
    for name in OPTIONS.keys() - FLAGS.keys():
        refused = run_cli("serve", f"--{name.replace('_', '-')}", "1")
        assert refused.exit_code == 2 and became == []
        assert f"set {OPTIONS[name].variable or OPTIONS[name].file} instead" in refused.stderr
