"""The declaration of serve's options: where a value comes from, and what a wrong one is called."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.options.model import FlagValue, SettingsError
from everstep.options.serve import (
    FLAGS,
    OPTIONS,
    SECRET_VARIABLES,
    VARIABLES,
    ServeOptions,
    as_variables,
    is_list,
    is_switch,
)
from scripts.settings_reference import PAGE, page

OTHERS = {
    "EVERSTEP_URL",
    "EVERSTEP_TOKEN",
    "EVERSTEP_SECRETS_DIR",
    "EVERSTEP_MLFLOW_TRACKING_URI",
    "EVERSTEP_RECOVERY_",
    "EVERSTEP_RECOVERY_BACKOFF_MAX_S",
    "EVERSTEP_RECOVERY_SILENT_PEER_S",
    "EVERSTEP_LISTEN",
    "EVERSTEP_NOFILE",
    "EVERSTEP_SUBNET",
    "EVERSTEP_TARGET",
}
"""Variables of docs/operations.md that are read by clients, nodes or the compose file."""


def test_a_flag_comes_before_its_variable_and_a_variable_before_its_file(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("sqlite:////file\n")
    environ = {"EVERSTEP_DATABASE_FILE": str(tmp_path / "url"), "EVERSTEP_NODES": " 3 "}
    assert ServeOptions.read(environ).database_url == "sqlite:////file"
    environ["EVERSTEP_DATABASE"] = "sqlite:////variable"
    assert ServeOptions.read(environ).database_url == "sqlite:////variable"
    read = ServeOptions.read(environ, {"database_url": "sqlite:////flag", "nodes": "4"})
    assert (read.database_url, read.nodes) == ("sqlite:////flag", 4)
    padded = {"EVERSTEP_NODES": " 3 ", "EVERSTEP_DRILLS": " No ", "EVERSTEP_STORAGE": " /srv "}
    read = ServeOptions.read(padded)
    assert (read.nodes, read.drills, read.storage_uri) == (3, False, "/srv")


def test_a_blank_variable_counts_as_not_set() -> None:
    blank = dict.fromkeys(VARIABLES, " ")
    assert ServeOptions.read(blank) == ServeOptions.read({})


def test_a_word_for_no_leaves_drills_off() -> None:
    for word in ("", "0", "false", "No", "off"):
        assert not ServeOptions.read({"EVERSTEP_DRILLS": word}).drills
    assert ServeOptions.read({"EVERSTEP_DRILLS": "1"}).drills


@pytest.mark.parametrize("name", FLAGS)
def test_an_empty_flag_is_never_the_default(name: str) -> None:
    if is_switch(name):
        return
    given: FlagValue = ["x", ""] if is_list(name) else ""
    with pytest.raises(SettingsError, match=f"^{FLAGS[name].flag} is empty; give a value"):
        ServeOptions.read({}, {name: given})


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_value_is_called_by_the_name_that_the_operator_used(
    name: str, tmp_path: Path
) -> None:
    """Numbers, words and lists refuse what is none; paths and free text take everything."""
    option, wrong = OPTIONS[name], "\N{SNOWMAN}=,"
    free = {"home", "host", "tls_cert", "tls_key", "database_url", "storage_uri", "allow_pip"}
    free |= {"storage_roots", "notify_origins", "notify_secret", "ray_address"}
    free |= {"oidc_client_id", "oidc_client_secret", "oidc_grants", "oidc_groups_claim"}
    free |= {"oidc_label", "adopt_storage"}
    if name in free:
        return
    (tmp_path / "value").write_text(wrong)
    environ = {option.variable: wrong} if option.variable else {option.file: f"{tmp_path}/value"}
    with pytest.raises(SettingsError, match=f"^{option.variable or option.file} ") as caught:
        ServeOptions.read(environ)
    assert (wrong in str(caught.value)) is not option.secret or name == "cluster_env"
    if option.flag and not is_switch(name):
        with pytest.raises(SettingsError, match=f"^{option.flag} "):
            ServeOptions.read(environ, {name: [wrong] if is_list(name) else wrong})


@pytest.mark.parametrize("text", [",", " , ", "[1]", "[", '["a"'])
def test_a_list_that_names_nothing_is_no_list(text: str) -> None:
    """Roots that were meant and not read would let a run read everything."""
    with pytest.raises(SettingsError, match=r"^EVERSTEP_STORAGE_ROOTS "):
        ServeOptions.read({"EVERSTEP_STORAGE_ROOTS": text})


def test_flags_say_the_same_as_variables() -> None:
    flags: dict[str, FlagValue] = {
        "port": "0",
        "nodes": "3",
        "drills": True,
        "storage_roots": ["/data/a,b", "/c"],
        "cluster_env": ["HF_*"],
        "storage_uri": "/srv/[1], x",
    }
    assert ServeOptions.read(as_variables(flags)) == ServeOptions.read({}, flags)


def test_no_variable_is_one_that_kubernetes_sets_beside_a_service() -> None:
    """``EVERSTEP_PORT=tcp://10.0.0.1:8000`` is in every pod beside a Service named everstep."""
    theirs = re.compile(r"_(PORT|SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP).*)$")
    assert not [name for name in VARIABLES if theirs.search(name)]
    assert ServeOptions.read({"EVERSTEP_PORT": "tcp://10.0.0.1:8000"}).port == 8000


def test_secrets_are_neither_shown_nor_logged() -> None:
    assert {name for name in VARIABLES if re.search("SECRET|TOKEN|DATABASE|SMTP_URL", name)} == (
        SECRET_VARIABLES
    )
    given = {
        "EVERSTEP_DATABASE": "postgresql+psycopg://everstep:hidden@db/everstep",
        "EVERSTEP_NOTIFY_SECRET": " hidden ",
    }
    read = ServeOptions.read(given)
    assert "hidden" not in repr(read) and read.notify_secret == " hidden "
    with pytest.raises(SettingsError, match="must be text") as caught:
        ServeOptions(notify_secret=["hidden"])  # type: ignore[arg-type]
    assert "hidden" not in str(caught.value)


def test_a_file_that_is_empty_or_no_text_is_no_secret(tmp_path: Path) -> None:
    """An empty file in the place of the database's URL meant SQLite in the home."""
    for content, words in ((b"\n", "is empty"), (b"\xff\xfe", "is not text")):
        (tmp_path / "url").write_bytes(content)
        with pytest.raises(SettingsError, match=f"^EVERSTEP_DATABASE_FILE .* {words}"):
            ServeOptions.read({"EVERSTEP_DATABASE_FILE": str(tmp_path / "url")})


def test_the_page_of_settings_has_every_option_and_no_other() -> None:
    assert PAGE.read_text() == page(), "run `make format`"
    table = page().partition("| variable |")[2]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", table, re.MULTILINE)
    named = [name for cell, _ in rows for name in re.findall(r"EVERSTEP_[A-Z_]+", cell)]
    flags = [flag for _, cell in rows for flag in re.findall(r"--[a-z-]+", cell)]
    assert sorted(named) == sorted(VARIABLES) and len(rows) == len(OPTIONS)
    assert sorted(flags) == sorted(option.flag for option in FLAGS.values())


def test_operations_names_only_variables_that_somebody_reads() -> None:
    text = (PAGE.parent / "operations.md").read_text()
    assert set(re.findall(r"EVERSTEP_[A-Z_]+", text)) <= VARIABLES | OTHERS
    assert set(re.findall(r"everstep serve.*? (--[a-z-]+)", text)) <= {
        option.flag for option in FLAGS.values()
    }


def test_the_client_does_not_load_the_options() -> None:
    program = "import everstep, sys; sys.exit('everstep.options.serve' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
