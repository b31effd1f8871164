"""docker-compose.yml agrees with the compose specification, and with the commands, files and
modules that it names."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from everstep.options.serve import VARIABLES, ServeOptions
from tests.support.command_line import serve_flags

ROOT = Path(__file__).parents[3]
OURS = {"prepare", "bucket", "head", "worker", "gpu-worker", "service-a", "service-b"}
OTHERS = {"object-store", "database", "proxy", "prometheus", "grafana"}
ONCE = {"prepare", "bucket"}


def filled(text: str) -> str:
    """As compose reads it: defaults in place of variables, anchors and merges resolved."""
    return re.sub(r"\$\{\w+(?::-([^}]*))?\}", lambda found: found[1] or "", text)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(filled((ROOT / "docker-compose.yml").read_text()))
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def networks_of(service: dict[str, Any]) -> set[str]:
    return set(service.get("networks", ()))


def test_file_agrees_with_the_compose_specification(compose: dict[str, Any]) -> None:
    parsed = PyCompose.from_yaml(yaml.safe_dump(compose))
    parsed.validate()
    assert set(parsed.service_names()) == OURS | OTHERS


def test_only_the_proxy_is_published_and_only_on_loopback_unless_asked(
    services: dict[str, dict[str, Any]],
) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"proxy": ["127.0.0.1:8443:8443"]}


def test_users_code_reaches_neither_the_database_nor_the_proxy(
    services: dict[str, dict[str, Any]],
) -> None:
    assert {name for name, service in services.items() if "database" in networks_of(service)} == {
        "database",
        "service-a",
        "service-b",
    }
    assert {
        networks
        for name in ("head", "worker", "gpu-worker")
        for networks in networks_of(services[name])
    } == {"cluster"}


def test_the_proxys_word_on_who_asks_is_believed_and_nobody_elses(compose: dict[str, Any]) -> None:
    [front] = compose["networks"]["front"]["ipam"]["config"]
    [cluster] = compose["networks"]["cluster"]["ipam"]["config"]
    assert (
        compose["services"]["service-a"]["environment"]["FORWARDED_ALLOW_IPS"]
        == front["subnet"]
        != cluster["subnet"]
    )


def test_every_part_is_confined(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        runs_as_root = str(service.get("user", "")).startswith("0")
        assert not runs_as_root or (name == "prepare" and service["cap_add"] == ["CHOWN"]), name
        assert ("user" in service) or name in ("prometheus", "grafana"), (
            f"{name}: whose image runs as no root by itself"
        )
        assert name in ONCE or "mem_limit" in service, name
        assert service["restart"] == ("on-failure" if name in ONCE else "unless-stopped"), name
        assert name in ONCE or "healthcheck" in service, name


def names_of(certificate: bytes) -> set[str]:
    """What it is valid for, in openssl's words."""
    command = ["openssl", "x509", "-noout", "-ext", "subjectAltName"]
    done = subprocess.run(command, input=certificate, capture_output=True, check=True)
    return set(done.stdout.decode().splitlines()[1].strip().split(", "))


def test_secrets_come_by_files_that_the_script_makes(
    compose: dict[str, Any], services: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    directory = tmp_path / "secrets"
    script = [str(ROOT / "deploy/secrets.sh"), str(directory), "everstep.example.org", "10.0.0.1"]
    subprocess.run(script, check=True)
    made = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    assert {secret["file"] for secret in compose["secrets"].values()} == {
        f"./deploy/secrets/{name}" for name in made
    }
    assert {name for service in services.values() for name in service.get("secrets", ())} == set(
        made
    )
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir() if path.is_file()} == {
        0o444
    }
    subprocess.run(script, check=True)
    assert {
        path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()
    } == made, "what is there stays"
    assert {"DNS:everstep.example.org", "IP Address:10.0.0.1"} == names_of(made["tls_certificate"])
    subnet = ipaddress.ip_network(compose["networks"]["cluster"]["ipam"]["config"][0]["subnet"])
    assert {f"IP Address:{address}" for address in subnet.hosts()} <= names_of(
        made["ray_certificate"]
    ), "any that a node may get"
    refused = subprocess.run(
        script, env={**os.environ, "EVERSTEP_SUBNET": "10.0.0.0/16"}, capture_output=True, text=True
    )
    assert refused.returncode == 1 and "EVERSTEP_SUBNET must end in .0/24" in refused.stderr
    for name, service in services.items():
        said = yaml.safe_dump(service)
        assert not [
            secret
            for secret, value in made.items()
            if secret != "storage_user" and value.decode().strip() in said
        ], name


def test_every_module_program_file_and_volume_that_is_named_is_there(
    compose: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    used = set()
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            if not source.startswith("./"):
                used.add(source)
            elif not source.startswith("./deploy/secrets"):
                assert (ROOT / source).exists() and volume.endswith(":ro"), (
                    f"{name}: {source} at {target}"
                )
        modules = service.get("environment", {}).get("RAY_preload_python_modules", "").split(",")
        modules += [word for word in service.get("command", ()) if word.startswith("storage.")]
        for module in filter(None, modules):
            assert importlib.util.find_spec(module) is not None, f"{name} names {module}"
    assert used == set(compose["volumes"])


def test_every_part_of_ours_runs_one_image_and_ray_asks_for_its_token(
    services: dict[str, dict[str, Any]],
) -> None:
    assert {services[name]["image"] for name in OURS} == {
        "everstep:0.1.0-cpu",
        "everstep:0.1.0-cuda",
    }
    assert {services[name]["build"]["target"] for name in OURS} == {"cpu", "cuda"}
    for name in ("head", "worker", "gpu-worker"):
        environment = services[name]["environment"]
        assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == (
            "token",
            "/run/secrets/ray_token",
        )
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert {"cpu", "cuda"} <= set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    assert "RAY_AUTH_MODE=token" in dockerfile


def test_hosts_may_be_away_for_longer_than_a_minute(services: dict[str, dict[str, Any]]) -> None:
    for name in ("head", "worker", "gpu-worker"):
        environment = services[name]["environment"]
        one_try_ms = int(environment["RAY_health_check_period_ms"]) + int(
            environment["RAY_health_check_timeout_ms"]
        )
        assert one_try_ms * int(environment["RAY_health_check_failure_threshold"]) >= 120_000
        assert int(environment["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 300


def test_prometheus_scrapes_both_replicas_with_the_same_rules(
    services: dict[str, dict[str, Any]],
) -> None:
    ours = yaml.safe_load((ROOT / "deploy/prometheus/compose.yml").read_text())
    [job] = ours["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["service-a:8000", "service-b:8000"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/metrics_token"
    assert "metrics_token" in services["prometheus"]["secrets"]


def test_image_ignores_everything_that_the_dockerfile_does_not_copy() -> None:
    copied = {
        source
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_the_service_understands_its_command_and_every_variable(
    services: dict[str, dict[str, Any]],
) -> None:
    """Names of the service that it does not read would be without effect, in silence."""
    for name in ("service-a", "service-b"):
        command, environ = shlex.split(services[name]["command"]), services[name]["environment"]
        assert command[:2] == ["everstep", "serve"]
        ours = {key: str(value) for key, value in environ.items() if key.startswith("EVERSTEP_")}
        assert ours.keys() <= VARIABLES
        by_value = {key: value for key, value in ours.items() if not key.endswith("_FILE")}
        read = ServeOptions.read(by_value, serve_flags(*command[2:]))
        assert (read.host, read.port) == ("0.0.0.0", 8000) and read.storage_uri.startswith("s3://")
        assert read.ray_address == "http://head:8265"
        assert read.public_url == "https://localhost:8443"
