"""Settings: what an operator may say, and what a wrong word is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.options.model import SettingsError, home_directory
from everstep.options.serve import ServeOptions
from service.settings import Settings, existing_ray_token


def test_everything_lies_in_the_home_by_default() -> None:
    settings = Settings(home=Path("/srv/es"))
    assert settings.database_url == "sqlite:////srv/es/everstep.db"
    assert settings.storage_uri == "/srv/es/storage"
    assert settings.embedded


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("head:8265", "http://head:8265"),
        ("http://head:8265/", "http://head:8265"),
        ("https://ray.example.org", "https://ray.example.org"),
        ("http://[::1]:8265", "http://[::1]:8265"),
    ],
)
def test_a_dashboard_address_becomes_a_url(address: str, url: str) -> None:
    settings = Settings(home=Path("/srv/es"), ray_address=address)
    assert settings.ray_address == url
    assert not settings.embedded


def test_the_public_url_is_kept_without_its_slash() -> None:
    assert (
        Settings(home=Path("/srv/es"), public_url="https://es.example.org/").public_url
        == "https://es.example.org"
    )
    with pytest.raises(SettingsError, match="EVERSTEP_PUBLIC_URL"):
        Settings(home=Path("/srv/es"), public_url="es.example.org")


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "redis://head:6379", "", "http://", ":8265"]
)
def test_other_addresses_are_refused_with_the_way_out(address: str) -> None:
    with pytest.raises(SettingsError, match="http://head:8265"):
        Settings(home=Path("/srv/es"), ray_address=address)


@pytest.mark.parametrize(
    "values",
    [
        *(
            {"port": 70_000},
            {"port": -1},
            {"nodes": 0},
            {"cpus_per_node": 0},
            {"home": Path("rel")},
        ),
        *(
            {"cordon_runs": -1},
            {"cordon_failures": -1},
            {"cordon_window_s": 0.0},
            {"cordon_window_s": float("nan")},
        ),
    ],
)
def test_a_number_that_cannot_be_is_named(values: dict[str, int | float | Path]) -> None:
    with pytest.raises(SettingsError, match=next(iter(values))):
        Settings(**{"home": Path("/srv/es"), **values})  # type: ignore[arg-type]


def test_home_comes_from_the_environment() -> None:
    assert home_directory({"EVERSTEP_HOME": "/srv/es"}) == Path("/srv/es")
    assert home_directory({"EVERSTEP_HOME": ""}) == Path.home() / ".everstep"


def test_an_existing_cluster_s_token_is_found_where_ray_looks(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert existing_ray_token({"RAY_AUTH_TOKEN_PATH": str(file)}) == "from-file"
    assert (
        existing_ray_token({"RAY_AUTH_TOKEN_PATH": str(file), "RAY_AUTH_TOKEN": "direct"})
        == "direct"
    )
    with pytest.raises(SettingsError, match="RAY_AUTH_TOKEN_PATH"):
        existing_ray_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")})


def test_the_rule_of_cordons_comes_from_the_environment() -> None:
    def rule(environ: dict[str, str]) -> tuple[int, int, float]:
        read = ServeOptions.read(environ)
        return read.cordon_runs, read.cordon_failures, read.cordon_window_s

    assert rule({}) == (3, 5, 3600.0)
    given = {
        "EVERSTEP_CORDON_RUNS": "0",
        "EVERSTEP_CORDON_FAILURES": "9",
        "EVERSTEP_CORDON_WINDOW_S": "60",
    }
    assert rule(given) == (0, 9, 60.0)
    with pytest.raises(SettingsError, match="EVERSTEP_CORDON_FAILURES"):
        rule({"EVERSTEP_CORDON_FAILURES": "many"})


def test_secrets_may_come_by_files(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("postgresql+psycopg://everstep:hidden@db/everstep\n")
    by_file = {"EVERSTEP_DATABASE_FILE": str(path)}
    assert (
        ServeOptions.read(by_file).database_url
        == "postgresql+psycopg://everstep:hidden@db/everstep"
    )
    assert (
        ServeOptions.read({**by_file, "EVERSTEP_DATABASE": "sqlite:////x"}).database_url
        == "sqlite:////x"
    )
    home = {"EVERSTEP_HOME": "/srv/es"}
    assert ServeOptions.read(home).database_url == Settings(home=Path("/srv/es")).database_url
    assert ServeOptions.read(home).metrics_token == ""
    path.write_text("m" * 32 + "\n")
    assert ServeOptions.read({"EVERSTEP_METRICS_TOKEN_FILE": str(path)}).metrics_token == "m" * 32
    for name in ("EVERSTEP_DATABASE_FILE", "EVERSTEP_METRICS_TOKEN_FILE"):
        with pytest.raises(SettingsError, match=name):
            ServeOptions.read({name: str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    "secret", ["too-short", "two words of which neither is a secret", "ü" * 40]
)
def test_a_secret_for_metrics_that_is_none_is_refused_without_being_told(
    secret: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(secret)
    with pytest.raises(SettingsError) as refused:
        ServeOptions.read({"EVERSTEP_METRICS_TOKEN_FILE": str(tmp_path / "secret")})
    assert "EVERSTEP_METRICS_TOKEN_FILE" in str(refused.value) and secret not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", ()),
        ("0", ()),
        ("1", ("*",)),
        ("einops, vision:Tim_M", ("einops", "tim-m")),
        ("speech:*, einops", ("einops",)),
    ],
)
def test_packages_that_a_project_may_bring(text: str, allowed: tuple[str, ...]) -> None:
    assert Settings.read({"EVERSTEP_ALLOW_PIP": text}).pip_rule.allowed("vision") == allowed


@pytest.mark.parametrize(
    "text", ["einops,", "vision:", "einops>=0.8", "--index-url=x", "https://x/y.whl", "yes please"]
)
def test_what_is_no_package_is_told(text: str) -> None:
    with pytest.raises(
        SettingsError, match=r"EVERSTEP_ALLOW_PIP: .* neither PACKAGE nor PROJECT:PACKAGE"
    ):
        Settings.read({"EVERSTEP_ALLOW_PIP": text})


OIDC = {
    "EVERSTEP_OIDC_ISSUER": "https://login.example.org/realms/ml",
    "EVERSTEP_OIDC_CLIENT_ID": "everstep",
    "EVERSTEP_OIDC_GRANTS": "ops=admin,*=viewer:demo",
}


def test_an_identity_provider_and_its_rights() -> None:
    rule = Settings.of_process({**OIDC, "EVERSTEP_OIDC_SESSION_H": "0.5"}).provider
    assert rule is not None
    assert (rule.issuer, rule.client_id) == (OIDC["EVERSTEP_OIDC_ISSUER"], "everstep")
    assert rule.lasts_s == 1800 and len(rule.grants.grants(["ops"])) == 1
    assert Settings.of_process({}).provider is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"EVERSTEP_OIDC_ISSUER": "http://login.example.org"}, "give an https URL"),
        ({"EVERSTEP_OIDC_ISSUER": ""}, "EVERSTEP_OIDC_CLIENT_ID is set without a provider"),
        ({"EVERSTEP_OIDC_CLIENT_ID": ""}, "needs EVERSTEP_OIDC_CLIENT_ID"),
        ({"EVERSTEP_OIDC_GRANTS": ""}, "needs EVERSTEP_OIDC_GRANTS"),
        ({"EVERSTEP_OIDC_GRANTS": "ops"}, "EVERSTEP_OIDC_GRANTS: 'ops' names no group"),
        ({"EVERSTEP_OIDC_SCOPES": "email"}, "lacks openid"),
        ({"EVERSTEP_OIDC_SESSION_H": "1000"}, "less than or equal to 720"),
    ],
)
def test_half_an_identity_provider_is_refused(change: dict[str, str], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        Settings.of_process({**OIDC, **change})
