"""Which service a client talks to, and whose token it sends there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from everstep import UsageError
from everstep.client.address import DEFAULT_URL, find_address


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("local\n")
    return {"EVERSTEP_HOME": str(tmp_path)}


def test_the_service_of_this_machine_is_found_by_its_files(home: dict[str, str]) -> None:
    assert find_address(environ=home).url == DEFAULT_URL
    (Path(home["EVERSTEP_HOME"]) / "url").write_text("http://127.0.0.1:8123\n")
    found = find_address(environ=home)
    assert (found.url, found.token) == ("http://127.0.0.1:8123", "local")


def test_arguments_come_before_the_environment_and_that_before_files(home: dict[str, str]) -> None:
    (Path(home["EVERSTEP_HOME"]) / "url").write_text("http://127.0.0.1:8123")
    environ = {**home, "EVERSTEP_URL": "https://train.example/base/", "EVERSTEP_TOKEN": "env"}
    found = find_address(environ=environ)
    assert (found.url, found.token) == ("https://train.example/base", "env")
    found = find_address("http://other:9", "given", environ)
    assert (found.url, found.token) == ("http://other:9", "given")


@pytest.mark.parametrize(
    "url",
    [
        "http://train.example",
        "http://10.0.0.7:8000",
        "http://127.0.0.1.evil.example",
        "http://localhost.evil",
    ],
)
def test_the_local_admin_token_is_never_sent_to_another_machine(
    home: dict[str, str], url: str
) -> None:
    found = find_address(url, environ=home)
    assert found.token is None and "EVERSTEP_TOKEN" in found.token_source


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:1",
        "127.0.0.1:8000",
        "http://[::1]:8000",
        f"http://{socket.gethostname()}:1",
    ],
)
def test_it_is_sent_to_this_machine_by_any_name(home: dict[str, str], url: str) -> None:
    assert find_address(url, environ=home).token == "local"


def test_it_is_sent_where_the_service_itself_says_that_it_listens(home: dict[str, str]) -> None:
    (Path(home["EVERSTEP_HOME"]) / "url").write_text("http://10.0.0.7:8000")
    assert find_address(environ=home).token == "local"
    assert find_address("http://10.0.0.7:8000/", environ=home).token == "local"


def test_no_token_is_told_with_the_way_out(tmp_path: Path) -> None:
    found = find_address(environ={"EVERSTEP_HOME": str(tmp_path)})
    assert found.token is None and str(tmp_path / "token") in found.token_source


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:0",
        "http://host:99999",
        "://",
        "http:///x",
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not the URL of a service"):
        find_address(url, "t", {})


@pytest.mark.parametrize("token", ["", "  ", "two words", "line\nbreak", "ünïcode", "nul\0"])
def test_what_cannot_be_a_token_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(UsageError, match="not a token") as caught:
        find_address(DEFAULT_URL, token, {})
    assert not token.strip() or token not in str(caught.value)
